"""Places that faults and tests name by string are there: a renamed function fails here at once."""

import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "jaxinfra" / "faults").glob("*.py"), *(ROOT / "tests" / "e2e").glob("*.py")]
TARGETS = sorted(
    {
        found
        for file in FILES
        for found in re.findall(r'"(jaxinfra\.[\w.]+:[\w.]+)"', file.read_text())
    }
)


def test_there_are_some():
    assert len(TARGETS) > 10


@pytest.mark.parametrize("target", TARGETS)
def test_target(target):
    module, path = target.split(":")
    functools.reduce(getattr, path.split("."), importlib.import_module(module))
