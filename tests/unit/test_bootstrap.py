"""The set-up: which Python it takes, which index it tells uv of, and that it is whole or absent."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import bootstrap
import bootstrap_index
import bootstrap_python
import bootstrap_run
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def program(path: pathlib.Path, script: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def fake_python(path: pathlib.Path, version: str, *, tags: str = "final True False"):
    """Answers the probe as a CPython of that version would."""
    answer = f"echo cpython {version.replace('.', ' ')} {tags}; echo {path}"
    return program(path, answer)


SHIM = "echo 'pyenv: python3.12: command not found' >&2; exit 127"


# Interpreters


def test_this_python_is_accepted():
    answer = bootstrap_python.probe(pathlib.Path(sys.executable))
    assert isinstance(answer, bootstrap_python.Interpreter)
    assert answer.version == sys.version.split()[0]
    assert answer.path == pathlib.Path(os.path.realpath(sys.executable))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (SHIM, "pyenv: python3.12: command not found"),
        ("echo cpython 3 11 7 final True False; echo /p", "is 3.11.7"),
        ("echo cpython 3 13 0 candidate True False; echo /p", "is 3.13.0 candidate"),
        ("echo cpython 3 13 0 final True True; echo /p", "is a free-threaded build"),
        ("echo cpython 3 12 0 final False False; echo /p", "is a 32-bit build"),
        ("echo pypy 3 12 0 final True False; echo /p", "is pypy"),
        ("echo 'ImportError: no _lzma' >&2; exit 1", "ImportError: no _lzma"),
        ("true", "prints nothing"),
    ],
)
def test_unfit_pythons_are_rejected_with_the_reason(tmp_path, script, reason):
    answer = bootstrap_python.probe(program(tmp_path / "python3.12", script))
    assert isinstance(answer, bootstrap_python.Rejected)
    assert answer.reason == reason


def test_failing_shim_gives_way_to_pyenvs_newest_patch(tmp_path):
    home = tmp_path / "home"
    shims = program(home / ".pyenv/shims/python3.12", SHIM).parent
    fake_python(home / ".pyenv/versions/3.12.1/bin/python3.12", "3.12.1")
    newest = fake_python(home / ".pyenv/versions/3.12.10/bin/python3.12", "3.12.10")
    found, rejected = bootstrap_python.find({"PATH": str(shims)}, home)
    assert found is not None
    assert found.path == newest
    assert [item.path.parent for item in rejected] == [shims]


def test_pyenv_root_and_uvs_own_pythons_are_searched(tmp_path):
    pyenv = tmp_path / "elsewhere"
    thirteen = fake_python(pyenv / "versions/3.13.0/bin/python3.13", "3.13.0")
    env = {"PATH": "/nonexistent", "PYENV_ROOT": str(pyenv)}
    found, _ = bootstrap_python.find(env, tmp_path)
    assert found is not None
    assert found.path == thirteen
    uv_root = tmp_path / ".local/share/uv/python"
    twelve = fake_python(uv_root / "cpython-3.12.9-linux-x86_64-gnu/bin/python3.12", "3.12.9")
    found, _ = bootstrap_python.find(env, tmp_path)
    assert found is not None
    assert found.path == twelve


def test_no_python_at_all(tmp_path):
    old = fake_python(tmp_path / "bin/python3", "3.9.2")
    found, rejected = bootstrap_python.find({"PATH": str(old.parent)}, tmp_path)
    assert found is None
    assert [(item.path, item.reason) for item in rejected] == [(old, "is 3.9.2")]


# The package index


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    monkeypatch.setattr(bootstrap_index, "SYSTEM_FILES", ())


@pytest.fixture
def pip_home(tmp_path) -> tuple[dict[str, str], pathlib.Path]:
    """A home whose pip.conf names an index, two more, and a certificate."""
    (tmp_path / "wheels").mkdir()
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://main.example/simple\n"
        f"extra-index-url = https://more.example/simple\n    file://{tmp_path}/missing\n"
        f"find-links = {tmp_path}/wheels {tmp_path}/missing\n"
        "[install]\ncert = /ca.pem\ntrusted-host = inner.example\n"
    )
    return {"PIP_CONFIG_FILE": str(config), "XDG_CONFIG_DIRS": "/nonexistent"}, tmp_path


def test_uv_is_told_what_pip_knows(pip_home):
    env, home = pip_home
    told = bootstrap_index.uv_environment(env, home)
    assert told == {
        "UV_DEFAULT_INDEX": "https://main.example/simple",
        "UV_INDEX": "https://more.example/simple",
        "UV_FIND_LINKS": f"{home}/wheels",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "inner.example",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_variables_override_files_and_uvs_own_settings_stay(pip_home):
    env, home = pip_home
    told = bootstrap_index.uv_environment({**env, "PIP_INDEX_URL": "https://x.example"}, home)
    assert told["UV_DEFAULT_INDEX"] == "https://x.example"
    told = bootstrap_index.uv_environment({**env, "UV_INDEX_URL": "https://u.example"}, home)
    assert "UV_DEFAULT_INDEX" not in told
    config = home / ".config/uv/uv.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[[index]]\nurl = "https://u.example"\n')
    assert not {"UV_DEFAULT_INDEX", "UV_INDEX"} & bootstrap_index.uv_environment(env, home).keys()


def test_pip_is_told_what_uv_knows(tmp_path):
    env = {
        "PIP_CONFIG_FILE": os.devnull,
        "UV_DEFAULT_INDEX": "https://u.example/simple",
        "UV_INDEX": "more=https://more.example/simple",
    }
    assert bootstrap_index.pip_environment(env, tmp_path) == {
        "PIP_INDEX_URL": "https://u.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://more.example/simple",
    }
    assert not bootstrap_index.pip_environment(
        {**env, "PIP_INDEX_URL": "https://p.example", "PIP_EXTRA_INDEX_URL": "https://q.example"},
        tmp_path,
    )


def test_passwords_stay_out_of_messages(tmp_path):
    env = {"PIP_INDEX_URL": "https://me:secret@p.example/simple"}
    assert bootstrap_index.describe(env, tmp_path) == (
        "the package index https://***@p.example/simple"
    )


# Failures


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("error: Failed\n  cause: error sending request\n  cause: dns error\n", "(dns error)"),
        (
            "x NewConnectionError('<o at 0x7f>: [Errno 111] Connection refused')",
            "([Errno 111] Connection refused)",
        ),
        ("error: write failed: No space left on device (os error 28)", "disk is full"),
        ("error: Hash mismatch for `jax==0.11.2`", "other than the locked one"),
        ("ERROR: No matching distribution found for uv==9", "lacks a locked version"),
        (
            "error: Failed to build\n\nOSError: no README\n\nhint: try",
            "Failed to build; OSError: no",
        ),
    ],
)
def test_a_failure_is_one_line_with_its_cause(tmp_path, output, words):
    line = bootstrap_run.explain(output, "installing cpu.lock", tmp_path)
    assert words in line
    assert "\n" not in line


# The environment


FAKE_UV = """
echo "$@" >> {log}
for last; do :; done
case "$1 $2" in
  "pip sync") test ! -e {root}/broken || {{ echo "error: dns error"; exit 2; }} ;;
  "venv "*) mkdir -p "$last/bin"; ln -s {python} "$last/bin/python" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> pathlib.Path:
    """A checkout with a lock, and a uv that only makes the folders."""
    root = tmp_path / "checkout"
    (root / "tools" / "requirements").mkdir(parents=True)
    (root / "tools/requirements/cpu.lock").write_text("jax==1\n")
    (root / "tools/requirements/cuda.lock").write_text("jax==1\nnvidia==1\n")
    (root / "tools/requirements/cpu-jax0.12.lock").write_text("jax==2\n")
    (root / "pyproject.toml").write_text("[project]\n")
    script = FAKE_UV.format(log=root / "uv.log", root=root, python=os.path.realpath(sys.executable))
    uv = program(tmp_path / "uv", script)
    monkeypatch.setattr(bootstrap, "obtain_uv", lambda setup, interpreters: uv)
    monkeypatch.setattr(bootstrap, "detect_flavour", lambda: "cpu")
    return root


def calls(root: pathlib.Path) -> list[str]:
    log = root / "uv.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [" ".join(line.split()[:2]) for line in lines]


def ensure(root: pathlib.Path, flavour: str | None = None, jax: str = "0.11") -> list[str]:
    bootstrap.ensure(root, flavour=flavour, python=sys.executable, jax=jax)
    return calls(root)


def test_set_up_runs_once_and_again_when_something_changed(checkout):
    full = ["venv --clear", "pip sync", "pip install"]
    assert ensure(checkout) == full
    assert ensure(checkout) == []
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert ensure(checkout) == ["pip install"]
    (checkout / "tools/requirements/cpu.lock").write_text("jax==2\n")
    assert ensure(checkout) == full
    assert ensure(checkout, "cuda") == full
    assert ensure(checkout) == [], "the flavour asked for once is remembered"
    assert ensure(checkout, "auto") == full
    (checkout / ".venv/bin/python").unlink()
    assert ensure(checkout) == full
    assert ensure(checkout) == []


def test_another_jax_has_an_environment_of_its_own(checkout):
    ensure(checkout)
    assert "pip sync" in ensure(checkout, jax="0.12")
    (checkout / "tools/requirements/cpu-jax0.12.lock").write_text("jax==3\n")
    assert ensure(checkout) == []
    assert "pip sync" in ensure(checkout, jax="0.12")
    assert ensure(checkout, jax="0.12") == []
    (checkout / ".venv-jax0.12" / bootstrap.STAMP).unlink()
    with pytest.raises(bootstrap.SetupError, match=r"\.venv-jax0\.12 was not made by this set-up"):
        ensure(checkout, jax="0.12")
    assert ensure(checkout) == []


def test_failed_set_up_leaves_the_environment_before_it(checkout):
    ensure(checkout)
    before = json.loads((checkout / ".venv" / bootstrap.STAMP).read_text())
    (checkout / "tools/requirements/cpu.lock").write_text("jax==2\n")
    (checkout / "broken").touch()
    with pytest.raises(bootstrap.SetupError, match="cannot be reached"):
        ensure(checkout)
    assert json.loads((checkout / ".venv" / bootstrap.STAMP).read_text()) == before
    (checkout / "broken").unlink()
    calls(checkout)
    assert "pip sync" in ensure(checkout)
    assert not list((checkout / ".bootstrap").glob("venv-*"))


def test_an_environment_of_someone_else_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv/precious").touch()
    with pytest.raises(bootstrap.SetupError, match="was not made by this set-up"):
        ensure(checkout)
    assert (checkout / ".venv/precious").exists()


def test_named_python_must_fit(checkout, tmp_path):
    old = fake_python(tmp_path / "python3", "3.9.2")
    with pytest.raises(bootstrap.SetupError, match=r"is 3\.9\.2; jaxinfra needs CPython 3\.12"):
        bootstrap.ensure(checkout, flavour=None, python=str(old))


def test_gpu_is_seen_by_its_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "DRIVER_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.detect_flavour() == "cpu"
    program(tmp_path / "nvidia-smi", "echo NVIDIA-SMI has failed >&2; exit 9")
    assert bootstrap.detect_flavour() == "cpu"
    program(tmp_path / "nvidia-smi", "echo 580.159.04")
    assert bootstrap.detect_flavour() == "cuda"
    (tmp_path / "nvidia-smi").unlink()
    (tmp_path / "nvidiactl").touch()
    assert bootstrap.detect_flavour() == "cuda"


# The wheel


def test_wheel_holds_both_packages_with_their_data(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("jaxinfra-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (entry,) = (archive.read(name) for name in held if name.endswith("entry_points.txt"))
    for package in ("jaxinfra", "pallas_kernels"):
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".json"):
                assert path.relative_to(ROOT).as_posix() in held
    assert b"jaxinfra = jaxinfra.cli.entry:main" in entry
