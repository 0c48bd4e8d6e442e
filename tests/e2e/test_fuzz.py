"""A few cases of the fuzzer, whose long form is ``make fuzz``."""

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[2] / "tools" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_spoilt_input_is_refused_in_a_line_or_used_rightly(tmp_path, seed):
    spec = importlib.util.spec_from_file_location("fuzz", _FILE)
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    assert list(fuzz.cases(tmp_path / "fuzz", count=30, seed=seed)) == []
