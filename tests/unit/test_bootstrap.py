"""The set-up: which Python it takes, which index it tells uv of, and that it is whole or absent."""

import json
import os
import pathlib
import sys

import bootstrap
import pytest


def program(path: pathlib.Path, script: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# The package index


def test_uv_is_told_what_pip_knows(tmp_path, monkeypatch):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://main.example/simple\n"
        f"extra-index-url = https://more.example/simple\n    file://{tmp_path}/missing\n"
        f"find-links = {tmp_path}/wheels {tmp_path}/missing\n"
        "[install]\ncert = /ca.pem\ntrusted-host = inner.example\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    told = bootstrap.uv_settings()
    assert told["UV_DEFAULT_INDEX"] == "https://main.example/simple"
    assert told["UV_INDEX"].split()[0] == "https://more.example/simple"
    assert f"{tmp_path}/missing" not in told["UV_INDEX"] + told["UV_FIND_LINKS"]
    assert f"{tmp_path}/wheels" in told["UV_FIND_LINKS"].split(",")
    assert told["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert (told["SSL_CERT_FILE"], told["UV_INSECURE_HOST"]) == ("/ca.pem", "inner.example")
    monkeypatch.setenv("PIP_INDEX_URL", "https://x.example")
    assert bootstrap.uv_settings()["UV_DEFAULT_INDEX"] == "https://x.example"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://u.example")
    assert "UV_DEFAULT_INDEX" not in bootstrap.uv_settings()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("error: Failed\n  cause: error sending request\n  cause: dns error\n", "PIP_INDEX_URL"),
        ("ERROR: No matching distribution found for uv==9", "found for uv==9; check the network"),
        ("error: https://me:secret@p.example\n\nhint: try", "//***@p.example"),
        ("error: Failed to build\n\nOSError: no README", "Failed to build; OSError: no README"),
    ],
)
def test_a_failure_is_one_line_with_its_cause(output, words):
    line = bootstrap.explain(output, "installing cpu.lock")
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
    monkeypatch.setattr(bootstrap, "obtain_uv", lambda root: uv)
    monkeypatch.setattr(bootstrap, "detect_flavour", lambda: "cpu")
    monkeypatch.setattr(bootstrap, "pip_settings", dict)  # half a second each, tested above
    return root


def calls(root: pathlib.Path) -> list[str]:
    log = root / "uv.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [" ".join(line.split()[:2]) for line in lines]


def ensure(root: pathlib.Path, flavour: str | None = None, jax: str = "0.11") -> list[str]:
    (root / ".bootstrap").mkdir(exist_ok=True)
    bootstrap.ensure(root, flavour, sys.executable, jax)
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
    with pytest.raises(bootstrap.SetupError, match="dns error; check the network"):
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
    old = program(tmp_path / "python3", "echo 3.9")
    with pytest.raises(bootstrap.SetupError, match=r"is 3\.9; jaxinfra needs Python 3\.12"):
        bootstrap.choose_python(str(old), tmp_path / "uv")


def test_the_first_python_that_uv_finds_is_taken(tmp_path):
    """Also of pyenv's versions; where there is none, uv fetches one."""
    uv = program(tmp_path / "uv", 'for last; do :; done\ntest "$last" = 3.13 && echo /python')
    assert bootstrap.choose_python("", uv) == "/python"
    assert bootstrap.choose_python("", program(tmp_path / "none", "exit 2")) == "3.12"


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
