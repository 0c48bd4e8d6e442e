"""The floors hold: import contracts, public JAX only, file sizes, the reading path."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("jaxinfra", "pallas_kernels", "experiments")
    for path in (ROOT / package).rglob("*.py")
)
READING_PATH = (
    "jaxinfra/axes.py",
    "jaxinfra/config/presets/models.py",
    "jaxinfra/model/grouped_attention.py",
    "jaxinfra/model/decoder.py",
    "jaxinfra/parallel/place.py",
    "jaxinfra/training/step.py",
)


def test_import_contract():
    linter = pathlib.Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def broken_rules(path: pathlib.Path) -> list[str]:
    text, found = path.read_text(), []
    if re.search(r"^\s*(from|import) jax\._src", text, re.MULTILINE):
        found.append("public JAX only")
    if "from __future__ import annotations" in text:
        found.append("jaxtyping reads real annotations")
    if len(text.splitlines()) > 600:
        found.append("a file over 600 lines is two rooms")
    if path.is_relative_to(ROOT / "pallas_kernels") and path.name not in ("mosaic.py", "timing.py"):
        early = r"^(from|import) jax\.experimental\.(mosaic|pallas import mosaic_gpu)"
        if re.search(early, text, re.MULTILINE):
            found.append("import it from hopper/mosaic.py")
    return [f"{path.relative_to(ROOT)}: {rule}" for rule in found]


def test_source_rules():
    """Of all files in one test: as a test of its own each costs more than to be read."""
    assert len(SOURCES) > 500
    assert not [each for path in SOURCES for each in broken_rules(path)]


def test_reading_path_is_short():
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in READING_PATH)
    # The presets of all models are one file: who reads on needs one of its functions.
    assert lines < 1650
