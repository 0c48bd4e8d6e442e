"""Makes `.venv`, or for another JAX one beside it: uv, a Python, the lock with its hashes.

The environment is built beside the old one and takes its place when it is whole, so an interrupted
set-up leaves nothing half-made."""

from __future__ import annotations  # this file runs under any Python >= 3.8

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from typing import Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
PIP = (os.path.realpath(sys.executable), "-m", "pip")  # environments of uv have none
STAMP = ".jaxinfra-setup.json"
RECIPE = "1"  # raised when this file starts to build a different environment
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
JAX_SERIES = ("0.11", "0.12")  # each has its locks; the first is what .venv gets
PYTHONS = ("3.12", "3.13", "3.14")  # in the order in which they are looked for
REMEDIES = {
    r"No module named pip": "add pip (on Debian: apt install python3-pip) or uv",
    r"request|fetch|dns|refused|timed out|unreachable|no matching": "check the network, or name an "
    "index in PIP_INDEX_URL",
}


class SetupError(Exception):
    """Set-up failure and its remedy, in one line for the person who ran the set-up."""


def explain(output: str, doing: str) -> str:
    """The line that says why ``doing`` failed, from what the tool printed."""
    lines = [line.strip(" ×╰─▶├│\t") for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("hint:", "[notice]"))]
    cause = "; ".join(lines[-2:]) or "it printed nothing"
    remedies = [how for what, how in REMEDIES.items() if re.search(what, output, re.IGNORECASE)]
    return re.sub(r"//[^/@\s]*@", "//***@", "; ".join([f"{doing}: {cause[:400]}", *remedies[:1]]))


def run(command: Sequence[str], env: Mapping[str, str], root: pathlib.Path, *, doing: str) -> None:
    """Runs a tool in ``root``; raises the reason if it fails."""
    done = subprocess.run(
        list(command), env={**os.environ, **env}, cwd=str(root), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False,
    )  # fmt: skip
    if done.returncode:
        log = root / ".bootstrap" / "failure.log"
        log.write_text(f"$ {' '.join(command)}\n{done.stdout}", "utf-8")
        raise SetupError(f"{explain(done.stdout, doing)} (all of it: {log.relative_to(root)})")


def series_suffix(jax: str) -> str:
    """Suffix of the environment and locks of a JAX series; empty for the first series."""
    return "" if jax == JAX_SERIES[0] else f"-jax{jax}"


@dataclass(frozen=True)
class Setup:
    """One checkout, where its environment is, and what that is made from."""

    root: pathlib.Path
    venv: pathlib.Path
    lock: pathlib.Path  # versions and hashes of everything installed
    python: str  # the interpreter to build on; empty: the best one found

    @classmethod
    def of(cls, root: pathlib.Path, flavour: str, python: str = "", jax: str = "0.11") -> Setup:
        """The set-up of a flavour, cpu or cuda, and a series of JAX."""
        lock = root / "tools" / "requirements" / f"{flavour}{series_suffix(jax)}.lock"
        return cls(root, root / f".venv{series_suffix(jax)}", lock, python)

    def keys(self) -> dict[str, str]:
        """Digests of what the environment, and the project's entry in it, are made from."""
        flavour = re.split("[-.]", self.lock.name)[0]
        parts = [RECIPE, str(self.root), platform.machine(), flavour, self.python]
        environment = "\0".join(parts).encode() + self.lock.read_bytes()
        project = (self.root / "pyproject.toml").read_bytes()
        given = {"environment": environment, "project": project}
        return {name: hashlib.sha256(content).hexdigest() for name, content in given.items()}


def detect_flavour() -> str:
    """`cuda` on a Linux machine with an NVIDIA driver, else `cpu`."""
    smi = shutil.which("nvidia-smi")
    works = smi and subprocess.run([smi], capture_output=True, check=False).returncode == 0
    has_gpu = sys.platform.startswith("linux") and (works or any(map(os.path.exists, DRIVER_FILES)))
    return "cuda" if has_gpu else "cpu"


def pip_settings() -> dict[str, str]:
    """pip's own settings by option name, from its files and variables; empty without a pip."""
    done = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    # Variables come last: they override files.
    lines = sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:"))
    found = (re.match(r"(?:global|install|download|:env:)\.([\w-]+)=(.+)", line) for line in lines)
    return {match[1]: str(ast.literal_eval(match[2])) for match in found if match}


def uv_settings() -> dict[str, str]:
    """Variables for uv, which reads no pip.conf: the index pip would use, unless uv has its own."""
    pip = pip_settings()

    def is_there(place: str) -> bool:  # pip skips a missing folder, uv stops at it
        path = re.sub(r"^file://", "", place)
        return "://" in path or os.path.exists(os.path.expanduser(path))

    extra = " ".join(filter(is_there, pip.get("extra-index-url", "").split()))
    wanted = {
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_INDEX": extra,
        "UV_FIND_LINKS": ",".join(filter(is_there, pip.get("find-links", "").split())),
        "UV_INDEX_STRATEGY": "unsafe-best-match" if extra else "",  # pip's rule: all are equal
        "UV_INSECURE_HOST": pip.get("trusted-host"),
        "UV_HTTP_TIMEOUT": pip.get("timeout", pip.get("default-timeout")),
        "UV_NO_INDEX": "1" if pip.get("no-index", "") in ("1", "true", "yes", "on") else "",
        "SSL_CERT_FILE": pip.get("cert"),
    }
    told = {name: value for name, value in wanted.items() if value and not os.environ.get(name)}
    return {**told, "UV_NO_PROGRESS": "1"}


def obtain_uv(root: pathlib.Path) -> pathlib.Path:
    """The uv named in bootstrap.lock, which pip brings; where there is no pip, the one on PATH."""
    lock = root / "tools" / "requirements" / "bootstrap.lock"
    version = re.findall(r"^uv==([\w.]+)", lock.read_text("utf-8"), re.MULTILINE)[0]
    binary = root / ".bootstrap" / f"uv-{version}-{sysconfig.get_platform()}"
    if binary.exists():
        return binary
    target = root / ".bootstrap" / "uv-wheel"
    shutil.rmtree(str(target), ignore_errors=True)
    command = [*PIP, "install", "--no-deps", "--require-hashes"]
    command += ["--no-input", "--only-binary=:all:", "--target", str(target), "-r", str(lock)]
    try:
        run(command, {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}, root, doing=f"fetching uv {version}")
    except SetupError:
        if shutil.which("uv") is None:
            raise
        return pathlib.Path(str(shutil.which("uv")))
    os.replace(str(target / "bin" / "uv"), str(binary))
    shutil.rmtree(str(target))
    return binary


def choose_python(named: str, uv: pathlib.Path) -> str:
    """The interpreter asked for, or the best one here, or the version that uv then fetches."""
    if named:
        probe = [named, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.stdout.strip() not in PYTHONS:
            raise SetupError(
                f"BASE_PYTHON={named} is {(done.stdout or done.stderr).strip()[:200]}; jaxinfra "
                f"needs Python {', '.join(PYTHONS)}; name another, or leave it out"
            )
        return named
    # pyenv's versions are on no PATH: its shims give only the selected ones.
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv")
    places = map(str, sorted(pyenv.glob("versions/3.*/bin"), reverse=True))
    env = {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *places])}
    find = [str(uv), "python", "find", "--no-project", "--no-python-downloads"]
    for version in PYTHONS:
        done = subprocess.run(
            [*find, version], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return PYTHONS[0]


def build(setup: Setup, uv: pathlib.Path) -> pathlib.Path:
    """Makes the environment in `.bootstrap`; returns where."""
    python, env, work = choose_python(setup.python, uv), uv_settings(), setup.root / ".bootstrap"
    print(f"setup: {python}: installing {setup.lock.name}", flush=True)
    for leftover in work.glob("venv-*"):
        shutil.rmtree(str(leftover), ignore_errors=True)
    draft = work / f"venv-{os.getpid()}"  # uv of a killed set-up may still write to another
    command = [str(uv), "venv", "--clear", "--relocatable", "--no-project", "--prompt", "jaxinfra"]
    command += ["--python", python, str(draft)]
    run(command, env, setup.root, doing=f"making {setup.venv.name}")
    command = [str(uv), "pip", "sync", "--require-hashes", "--python", str(draft / "bin/python")]
    run([*command, str(setup.lock)], env, setup.root, doing=f"installing {setup.lock.name}")
    return draft


def enter_project(setup: Setup, uv: pathlib.Path, venv: pathlib.Path, asked: str) -> None:
    """Installs the checkout, editable, and notes that the environment is whole."""
    command = [str(uv), "pip", "install", "--offline", "--no-deps", "--no-build-isolation"]
    command += ["--python", str(venv / "bin" / "python"), "--editable", str(setup.root)]
    run(command, uv_settings(), setup.root, doing="installing jaxinfra itself")
    interpreter = os.path.realpath(str(venv / "bin" / "python"))
    stamp = {**setup.keys(), "flavour": asked, "python": setup.python, "interpreter": interpreter}
    (venv / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")


def ensure(root: pathlib.Path, flavour: str | None, python: str | None, jax: str) -> None:
    """Makes or renews an environment of `root`; quick and silent when nothing has changed."""
    venv = root / f".venv{series_suffix(jax)}"
    stamp: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads((venv / STAMP).read_text("utf-8"))
    if not stamp and os.path.lexists(str(venv)):
        raise SetupError(
            f"{venv} was not made by this set-up, which replaces only its own; remove it, or "
            f"keep it and run make with ENV_PYTHON={venv.name}/bin/python"
        )
    asked = flavour or stamp.get("flavour", "auto")
    python = stamp.get("python", "") if python is None else python
    setup = Setup.of(root, detect_flavour() if asked == "auto" else asked, python, jax)
    keys, inside = setup.keys(), venv / "bin" / "python"
    is_whole = inside.exists() and os.path.realpath(str(inside)) == stamp.get("interpreter")
    if not is_whole or stamp.get("environment") != keys["environment"]:
        uv = obtain_uv(root)
        draft = build(setup, uv)
        enter_project(setup, uv, draft, asked)
        retired = draft.with_name(draft.name + "-old")
        if os.path.lexists(str(venv)):
            os.rename(str(venv), str(retired))
        os.rename(str(draft), str(venv))
        shutil.rmtree(str(retired), ignore_errors=True)
        print(f"setup: {venv.name} is ready", flush=True)
    elif stamp.get("project") != keys["project"]:
        enter_project(setup, obtain_uv(root), venv, asked)


def main() -> int:
    """Runs the set-up; whatever goes wrong is one line and a non-zero exit."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description="Makes the environment.")
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), help="default: auto")
    parser.add_argument("--python", help="the interpreter to build on; 'auto': the best one found")
    parser.add_argument("--jax", choices=JAX_SERIES, default=JAX_SERIES[0], help="series of JAX")
    options = parser.parse_args()
    python = "" if options.python == "auto" else options.python
    if python:
        python = os.path.abspath(shutil.which(python) or python)
    try:
        (ROOT / ".bootstrap").mkdir(exist_ok=True)
        with open(str(ROOT / ".bootstrap" / "lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)  # one set-up of a checkout at a time
            ensure(ROOT, options.flavour, python, options.jax)
    except (SetupError, OSError) as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
