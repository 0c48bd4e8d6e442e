"""The package as people get it: a wheel in an environment of its own, and what a start costs."""

import os
import resource
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import jaxinfra
import pallas_kernels

ROOT = Path(__file__).parents[2]


def cpu_s(arguments: list[str]) -> float:
    """Least CPU seconds of three runs of this program, as a loaded machine slows some."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        (["-m", "jaxinfra", "--version"], 0.3),
        (["-m", "jaxinfra", "--help"], 0.3),
        (["-c", "import jaxinfra"], 0.2),
        (["-c", "import pallas_kernels"], 0.2),
    ],
    ids=["version", "help", "jaxinfra", "pallas_kernels"],
)
def test_a_start_is_quick(arguments, limit_s):
    assert cpu_s(arguments) < limit_s


def test_versions_agree():
    assert jaxinfra.__version__ == pallas_kernels.__version__ == version("jaxinfra")


def test_functions_stay_where_submodules_have_their_names():
    """Loading ``pallas_kernels.softmax.api`` sets the package's attribute ``softmax``."""
    program = (
        "import pallas_kernels.softmax.api, pallas_kernels.flash_attention.spec\n"
        "from pallas_kernels import softmax, flash_attention\n"
        "assert callable(softmax) and callable(flash_attention)\n"
        "assert 'softmax' in dir(pallas_kernels)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_has_license_types_and_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert {"jaxinfra/py.typed", "pallas_kernels/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in text
    assert "Classifier: Typing :: Typed" in text
    assert not [name for name in names if name.startswith(("tests/", "experiments/", "tools/"))]
    for package in ("jaxinfra", "pallas_kernels"):
        for file in (ROOT / package).rglob("*.json"):
            assert file.relative_to(ROOT).as_posix() in names


@pytest.fixture(scope="module")
def empty_python(wheel, tmp_path_factory) -> Path:
    """An environment with this wheel; of the dependencies it sees those that are installed here."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    # Entries of a .pth file are not searched for .pth files, so this checkout stays out of sight.
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_the_wheel_plans_trains_and_generates(empty_python, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = str(empty_python.parent / "jaxinfra")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            arguments, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(empty_python), "-c", "import jaxinfra; print(jaxinfra.__file__)")
    assert str(ROOT) not in where
    assert run(command, "--version") == f"jaxinfra {jaxinfra.__version__}\n"
    assert "fsdp" in run(command, "plan", "llama3_8b", "--devices", "8", "--device", "h100")
    for name in ("one.txt", "two.txt", "three.txt"):
        (tmp_path / name).write_text(f"{name}: " + "the quick brown fox " * 200)
    sizes = ["--steps", "2", "--batch-size", "2", "--sequence-length", "32"]
    data = ["--data", str(tmp_path / "*.txt"), "--set", "data.heldout_fraction=0.4"]
    run(command, "train", *sizes, *data, "--set", "optimizer.warmup_steps=0", "--run", "r")
    assert run(command, "generate", "r", "--prompt", "the", "--max-new-tokens", "4")
