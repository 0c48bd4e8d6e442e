"""What the packages import is declared, and what is declared is locked with its hashes."""

import functools
import pathlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import bootstrap
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("jaxinfra", "pallas_kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = sorted((ROOT / "tools" / "requirements").glob("*.lock"))
BY_JAX = pytest.mark.parametrize("jax", bootstrap.JAX_SERIES)


def canonical(requirement: str) -> str:
    """The distribution a requirement names, spelled as the lock spells it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


distributions_of_packages = functools.cache(packages_distributions)


# A twentieth of the time of syntax trees. Prose that looks alike would name a package that is not
# declared.
IMPORT = re.compile(r"^ *(?:from (\w[\w.]*) import|import (\w[\w.]*)(?: as \w+)?$)", re.MULTILINE)


def imported_packages(package: str) -> set[str]:
    texts = (path.read_text() for path in (ROOT / package).rglob("*.py"))
    found = (name for text in texts for names in IMPORT.findall(text) for name in names if name)
    return {name.partition(".")[0] for name in found}


def locked(flavour: str, jax: str) -> dict[str, str]:
    """Version by distribution; a version that differs by platform is listed with its marker."""
    lock = bootstrap.Setup.of(ROOT, flavour, jax=jax).lock
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE)
    return dict(pins)


def test_what_only_a_server_needs_is_imported_there_only():
    """The extra is not installed where models are trained."""
    extra = {"fastapi", "h11", "llguidance", "prometheus_client", "pydantic", "uvicorn"}
    allowed = {"serving/http", "serving/replicas", "serving/engine/grammar.py"}
    for path in (ROOT / "jaxinfra").rglob("*.py"):
        text = path.read_text()
        place = path.relative_to(ROOT / "jaxinfra").as_posix()
        found = {name for name in extra if re.search(rf"^(import|from) {name}\b", text, re.M)}
        assert not found or any(place.startswith(each) for each in allowed), (place, found)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_are_declared(package):
    wanted = [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["serve"],
    ]
    declared = {canonical(entry) for entry in wanted}
    distributions = distributions_of_packages()
    foreign = imported_packages(package) - set(sys.stdlib_module_names) - set(PACKAGES)
    for module in sorted(foreign):
        names = {canonical(entry) for entry in distributions.get(module, [module])}
        assert names & declared, f"{package} imports {module}: declare it in pyproject.toml"


@BY_JAX
@pytest.mark.parametrize("flavour", ["cpu", "cuda"])
def test_declared_is_locked(flavour, jax):
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    wanted += PROJECT["build-system"]["requires"]
    wanted += PROJECT["project"]["optional-dependencies"]["serve"]
    missing = {canonical(entry) for entry in wanted} - set(locked(flavour, jax))
    assert not missing, "run `make lock`"


@BY_JAX
def test_flavours_agree(jax):
    cpu, cuda = (locked(name, jax) for name in ("cpu", "cuda"))
    assert cpu.items() <= cuda.items()
    assert cuda["jax-cuda13-plugin"] == cuda["jax"] == cuda["jaxlib"]
    assert cuda["jax"].startswith(f"{jax}.")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_lock_is_pinned_hashed_and_nameless(lock):
    text = lock.read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==\S+", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{entry} has no hash"
    assert "://" not in text, "a lock names no host"
