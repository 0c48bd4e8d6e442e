"""Makes `.venv`, or for another JAX one beside it: finds a Python, installs the lock with its
hashes, then the project itself.

Standard library only, under any Python >= 3.8. The environment is built beside the old one and
takes its place when it is whole, so an interrupted set-up leaves nothing half-made. uv lives in
`.bootstrap` and not in there: where no Python is new enough, uv must be there first to fetch one.
"""

from __future__ import annotations  # this file runs under any Python >= 3.8

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import dataclass
from typing import Generator, Mapping

import bootstrap_index
import bootstrap_python
from bootstrap_run import SetupError, disk_full, run, say

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAMP = ".jaxinfra-setup.json"
RECIPE = "1"  # raised when this file starts to build a different environment
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
MIN_CUDA_DRIVER = 580  # of CUDA 13, which the CUDA locks install
JAX_SERIES = ("0.11", "0.12")  # each has its locks; the first is what .venv gets


@dataclass(frozen=True)
class Request:
    """What was asked for; kept with the environment, so that asking once is enough."""

    flavour: str = "auto"  # auto | cpu | cuda
    python: str = ""  # the interpreter to build on; empty: the best one found


def series_suffix(jax: str) -> str:
    """What tells the environment and the locks of a series of JAX from those of the first."""
    return "" if jax == JAX_SERIES[0] else f"-jax{jax}"


@dataclass(frozen=True)
class Setup:
    """One checkout and what its environment is to be made from."""

    root: pathlib.Path
    request: Request
    flavour: str  # cpu | cuda
    jax: str = JAX_SERIES[0]

    @property
    def venv(self) -> pathlib.Path:
        """Where the environment is."""
        return self.root / f".venv{series_suffix(self.jax)}"

    @property
    def work(self) -> pathlib.Path:
        """Where all that making it needs is."""
        return self.root / ".bootstrap"

    @property
    def lock(self) -> pathlib.Path:
        """The versions and hashes of everything installed."""
        name = f"{self.flavour}{series_suffix(self.jax)}.lock"
        return self.root / "tools" / "requirements" / name

    def keys(self) -> dict[str, str]:
        """Digests of what the environment, and the project's entry in it, are made from."""
        parts = [RECIPE, str(self.root), platform.machine(), self.flavour, self.request.python]
        return {
            "environment": _digest("\0".join(parts).encode() + self.lock.read_bytes()),
            "project": _digest((self.root / "pyproject.toml").read_bytes()),
        }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver, where `nvidia-smi` works."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.check_output(query, stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return output.decode().split("\n")[0].strip()


def detect_flavour() -> str:
    """`cuda` on a Linux machine whose NVIDIA driver is loaded, else `cpu`."""
    if not sys.platform.startswith("linux"):
        return "cpu"
    return "cuda" if any(map(os.path.exists, DRIVER_FILES)) or nvidia_driver() else "cpu"


def warn_of_old_driver() -> None:
    """Says so where the driver cannot run what the CUDA lock installs."""
    version = nvidia_driver() or ""
    major = version.split(".")[0]
    if major.isdigit() and int(major) < MIN_CUDA_DRIVER:
        say(
            f"warning: NVIDIA driver {version}; CUDA 13 needs {MIN_CUDA_DRIVER} or newer and JAX "
            "will not see the GPU; update the driver, or set up with FLAVOUR=cpu"
        )


def read_stamp(venv: pathlib.Path) -> dict[str, str]:
    """What a finished set-up noted; empty if there is none."""
    try:
        stamp = json.loads((venv / STAMP).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: pathlib.Path, setup: Setup, **changes: str) -> None:
    """Notes that the environment is whole: the last thing done to it."""
    interpreter = os.path.realpath(str(venv / "bin" / "python"))
    stamp = {**setup.keys(), **vars(setup.request), "interpreter": interpreter, **changes}
    draft = venv / (STAMP + ".new")
    draft.write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")
    os.replace(str(draft), str(venv / STAMP))


def environment_is_current(setup: Setup, stamp: Mapping[str, str]) -> bool:
    """True while the lock, the flavour and the Python below the environment are the noted ones."""
    python = setup.venv / "bin" / "python"
    return (
        stamp.get("environment") == setup.keys()["environment"]
        and python.exists()
        and os.path.realpath(str(python)) == stamp.get("interpreter")
    )


@contextlib.contextmanager
def exclusive(work: pathlib.Path) -> Generator[None, None, None]:
    """One set-up of a checkout at a time; the second waits for the first."""
    work.mkdir(exist_ok=True)
    with open(str(work / "lock"), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up of this checkout")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def pip_of(interpreters: list[pathlib.Path], work: pathlib.Path) -> list[str] | None:
    """The command of a pip, made with `venv` where no interpreter has one installed."""
    for python in interpreters:
        pip = [str(python), "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0:
            return pip
    for python in interpreters:
        home = work / "pip"
        make = [str(python), "-m", "venv", "--clear", str(home)]
        if subprocess.run(make, capture_output=True, check=False).returncode == 0:
            return [str(home / "bin" / "python"), "-m", "pip"]
    return None


def obtain_uv(setup: Setup, interpreters: list[pathlib.Path]) -> pathlib.Path:
    """The uv named in bootstrap.lock: pip brings its wheel, and the binary is all we need of it."""
    lock = setup.root / "tools" / "requirements" / "bootstrap.lock"
    text = lock.read_text("utf-8")
    version = re.findall(r"^uv==([\w.]+)", text, re.MULTILINE)[0]
    binary = setup.work / f"uv-{version}-{sysconfig.get_platform()}"
    if binary.exists():
        return binary
    pip = pip_of(interpreters, setup.work)
    if pip is None:
        found = shutil.which("uv")
        if found:
            return pathlib.Path(found)
        raise SetupError(
            f"{sys.executable} has neither pip nor venv, and there is no uv; one of them must "
            "install the rest; add pip (on Debian: apt install python3-venv) or uv"
        )
    wheels = setup.work / "wheels"
    shutil.rmtree(str(wheels), ignore_errors=True)
    command = [*pip, "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--no-input", "--retries=2", "--dest", str(wheels), "--requirement", str(lock)]
    env = bootstrap_index.pip_environment(os.environ, pathlib.Path.home())
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    run(command, env, setup.root, doing=f"fetching uv {version}")
    (wheel,) = wheels.glob("uv-*.whl")
    with zipfile.ZipFile(str(wheel)) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("/scripts/uv"))
        draft = binary.with_name(binary.name + ".new")
        draft.write_bytes(archive.read(member))
    draft.chmod(0o755)
    os.replace(str(draft), str(binary))
    shutil.rmtree(str(wheels))
    return binary


def fetch_python(
    setup: Setup, uv: pathlib.Path, rejected: list[bootstrap_python.Rejected]
) -> pathlib.Path:
    """Has uv install a Python, where the machine has none that we can use."""
    wanted = f"3.{bootstrap_python.MINORS[0]}"
    say(f"no Python {bootstrap_python.SUPPORTED} on this machine; uv fetches {wanted}")
    try:
        command = [str(uv), "python", "install", "--no-bin", wanted]
        source = "the store of uv's Pythons (UV_PYTHON_INSTALL_MIRROR)"
        run(command, uv_settings(), setup.root, doing="uv python install", source=source)
    except SetupError as error:
        seen = "; ".join(f"{item.path}: {item.reason}" for item in rejected[:8])
        reason = str(error).partition(" (all of it")[0]
        raise SetupError(
            f"no Python {bootstrap_python.SUPPORTED} found, and uv cannot fetch one ({reason}); "
            "install one (apt, pyenv, uv) or name it: make setup BASE_PYTHON=/path/to/python3.12 "
            f"[looked at {seen or 'nothing: PATH has no python'}]"
        ) from None
    interpreter, _ = bootstrap_python.find(os.environ, pathlib.Path.home())
    if interpreter is None:
        raise SetupError(f"uv installed Python {wanted}, but it does not run here; see `uv python`")
    return interpreter.path


def choose_python(
    setup: Setup,
) -> tuple[pathlib.Path | None, list[bootstrap_python.Rejected]]:
    """The interpreter asked for, or the best one of the machine, or none."""
    if setup.request.python:
        named = bootstrap_python.probe(pathlib.Path(setup.request.python))
        if isinstance(named, bootstrap_python.Rejected):
            raise SetupError(
                f"BASE_PYTHON={setup.request.python}: {named.reason}; jaxinfra needs CPython "
                f"{bootstrap_python.SUPPORTED}; name another, or leave it out"
            )
        return named.path, []
    interpreter, rejected = bootstrap_python.find(os.environ, pathlib.Path.home())
    return (interpreter.path if interpreter else None), rejected


def uv_settings() -> dict[str, str]:
    """The environment of every call of uv."""
    env = bootstrap_index.uv_environment(os.environ, pathlib.Path.home())
    return {**env, "UV_NO_PROGRESS": "1"}


def build_environment(setup: Setup) -> None:
    """Makes the environment in `.bootstrap` and, when it is whole, puts it in place."""
    started = time.monotonic()
    if setup.flavour == "cuda":
        warn_of_old_driver()
    python, rejected = choose_python(setup)
    uv = obtain_uv(setup, [pathlib.Path(sys.executable), *([python] if python else [])])
    if python is None:
        python = fetch_python(setup, uv, rejected)
    count = len(re.findall(r"^[\w.-]+==", setup.lock.read_text("utf-8"), re.MULTILINE))
    say(f"{python}: installing {count} locked packages ({setup.flavour})")
    for leftover in setup.work.glob("venv-*"):
        shutil.rmtree(str(leftover), ignore_errors=True)
    # A name of its own: the uv of a killed set-up may still be writing to the last one.
    draft = setup.work / f"venv-{os.getpid()}"
    command = [str(uv), "venv", "--clear", "--relocatable", "--no-project", "--prompt", "jaxinfra"]
    command += ["--python", str(python), str(draft)]
    run(command, uv_settings(), setup.root, doing=f"making {setup.venv.name}")
    command = [str(uv), "pip", "sync", "--require-hashes", "--python", str(draft / "bin/python")]
    command += bootstrap_index.uv_arguments(os.environ, pathlib.Path.home())
    run(
        [*command, str(setup.lock)],
        uv_settings(),
        setup.root,
        doing=f"installing {setup.lock.name}",
    )
    install_project(setup, uv, draft)
    write_stamp(draft, setup)
    retired = setup.work / "retired"
    shutil.rmtree(str(retired), ignore_errors=True)
    if os.path.lexists(str(setup.venv)):
        os.rename(str(setup.venv), str(retired))
    os.rename(str(draft), str(setup.venv))
    shutil.rmtree(str(retired), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        (setup.work / "failure.log").unlink()
    say(f"{setup.venv.name} is ready ({time.monotonic() - started:.0f} s)")


def install_project(setup: Setup, uv: pathlib.Path, venv: pathlib.Path) -> None:
    """Enters the checkout itself, editable, built by the locked hatchling without an index."""
    command = [str(uv), "pip", "install", "--offline", "--no-deps", "--no-build-isolation"]
    command += ["--python", str(venv / "bin" / "python"), "--editable", str(setup.root)]
    run(command, uv_settings(), setup.root, doing="installing jaxinfra itself")


def ensure(
    root: pathlib.Path, *, flavour: str | None, python: str | None, jax: str = JAX_SERIES[0]
) -> None:
    """Makes or renews an environment of `root`; quick and silent when nothing has changed."""
    with exclusive(root / ".bootstrap"):
        venv = Setup(root, Request(), "cpu", jax).venv
        stamp = read_stamp(venv)
        if not stamp and os.path.lexists(str(venv)):
            raise SetupError(
                f"{venv} was not made by this set-up, which replaces only its own; remove it, or "
                f"keep it and run make with ENV_PYTHON={venv.name}/bin/python"
            )
        request = Request(
            flavour=flavour or stamp.get("flavour", "auto"),
            python=stamp.get("python", "") if python is None else python,
        )
        chosen = detect_flavour() if request.flavour == "auto" else request.flavour
        setup = Setup(root=root, request=request, flavour=chosen, jax=jax)
        if not environment_is_current(setup, stamp):
            build_environment(setup)
        elif stamp.get("project") != setup.keys()["project"]:
            write_stamp(setup.venv, setup, project="")
            install_project(setup, obtain_uv(setup, [pathlib.Path(sys.executable)]), setup.venv)
            write_stamp(setup.venv, setup)
            say(f"pyproject.toml changed: jaxinfra's entry in {setup.venv.name} is renewed")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description="Makes the environment.")
    parser.add_argument("--flavour", choices=("auto", "cpu", "cuda"), help="default: auto")
    parser.add_argument("--python", help="the interpreter to build on; 'auto': the best one found")
    parser.add_argument(
        "--jax", choices=JAX_SERIES, default=JAX_SERIES[0],
        help="which series of JAX; each has an environment of its own (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Runs the set-up; whatever goes wrong is one line and a non-zero exit."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    python = options.python
    if python is not None:
        python = "" if python == "auto" else os.path.abspath(shutil.which(python) or python)
    try:
        ensure(ROOT, flavour=options.flavour, python=python, jax=options.jax)
    except SetupError as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = (
            disk_full(ROOT) if full else f"{error}; set-up writes .venv* and .bootstrap in {ROOT}"
        )
        print(f"setup: error: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; nothing is half-made: run it again", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
