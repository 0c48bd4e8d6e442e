"""A few cases of the fuzzer, whose long form is ``make fuzz``."""

import importlib
from pathlib import Path

import pytest

_TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_spoilt_input_is_refused_in_a_line_or_used_rightly(tmp_path, monkeypatch, seed):
    monkeypatch.syspath_prepend(_TOOLS)
    fuzz = importlib.import_module("fuzz")
    assert list(fuzz.cases(tmp_path / "fuzz", count=30, seed=seed)) == []
