"""An engine's memory: its roles are all of its largest program, and a remedy, applied, fits."""

import json
from pathlib import Path

import jax
import pytest

from jaxinfra.cli.main import main
from jaxinfra.cli.out_of_memory import explain_serving_out_of_memory
from jaxinfra.config.precision import PolicyName
from jaxinfra.diagnostics.memory.report import report_memory
from jaxinfra.diagnostics.memory.roles import CACHES, WEIGHTS
from jaxinfra.diagnostics.memory.serving import (
    ServingCase,
    serving_memory,
    serving_remedies,
)
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.training.recompute import step_bytes
from tests.engine_models import CONFIG, DEFINITION, OPTIONS, parameters

CASE = ServingCase(model=CONFIG, policy=POLICIES[PolicyName.FP32], engine=OPTIONS)


@pytest.fixture(scope="module")
def needs():
    return serving_memory(CASE)


def test_a_program_of_shapes_alone_has_its_roles():
    """The step of one token: nothing is allocated, and its roles are what its arrays are."""
    runner = CASE.runner()
    key = next(key for key in runner.keys if key.name == "step" and not key.is_full)
    report = report_memory(runner.lowered(key))
    assert sum(report.by_role().values()) == report.total_bytes
    pages = 2 * 2 * 2 * 8 * 4 * OPTIONS.page_size * OPTIONS.num_pages
    assert report.by_role()[CACHES] == pages


@pytest.mark.slow
def test_the_roles_are_all_of_the_program(needs):
    roles = needs.report.by_role()
    assert sum(roles.values()) == needs.bytes == max(needs.totals.values())
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(DEFINITION.shapes))
    assert roles[WEIGHTS] == weights
    # Keys and values of 2 layers, 2 heads of 8, in fp32.
    assert needs.page_bytes == 2 * 2 * 2 * 8 * 4 * OPTIONS.page_size
    assert roles[CACHES] == needs.page_bytes * OPTIONS.num_pages
    held = {each.name for each in needs.report.largest}
    assert any("pools" in each.made_by for each in needs.report.largest), held


@pytest.mark.slow
def test_it_is_what_a_running_engine_compiles(needs):
    """The program of shapes alone, and that of an engine with its arrays."""
    engine = Engine(DEFINITION.bind(parameters()), options=OPTIONS)
    compiled = engine.runner.lowered(needs.program).compile()
    assert step_bytes(compiled) == needs.bytes


@pytest.mark.slow
def test_a_remedy_fits_as_compiled(needs, tmp_path):
    """The report of an engine that was given less than it needs."""
    limit = needs.bytes - 3 * needs.page_bytes
    error = RuntimeError(f"RESOURCE_EXHAUSTED: allocating 4096 bytes; limit of {limit} bytes")
    text = explain_serving_out_of_memory(CASE, tmp_path, error)
    assert "asked for: 4.00 KiB" in text
    assert "remedy: " in text
    found = json.loads((tmp_path / "out-of-memory.json").read_text())
    assert Path(tmp_path / "out-of-memory.png").stat().st_size > 5_000
    assert sum(found["by_role"].values()) == found["total_bytes"] == needs.bytes
    remedies = serving_remedies(CASE, needs, limit_bytes=limit)
    assert len(remedies) == 3
    first = remedies[0]
    assert first.fits
    assert first.bytes <= limit
    assert serving_memory(first.case).bytes == first.bytes
    eighth = next(each for each in remedies if each.options == ("--cache", "fp8"))
    assert eighth.case.limits.num_pages == CASE.limits.num_pages
    assert needs.bytes - eighth.bytes > needs.page_bytes * OPTIONS.num_pages / 3
    fewer = [each for each in remedies if each.options == ("--num-pages", str(17 - 3))]
    assert [each.fits for each in fewer] == [True]


@pytest.mark.slow
def test_the_command_lists_pages_and_programs(capsys):
    sizes = ["--set=model.stacks.0.repeats=1", "--set=model.vocab_size=256"]
    shape = ["--max-running", "2", "--num-pages", "20", "--max-step-tokens", "24"]
    command = ["memory", "tiny", "--serve", *sizes, *shape, "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["by_role"].values()) == found["total_bytes"]
    assert found["by_role"]["caches"] == 20 * found["page_bytes"]
    assert main([*command[:-1], "--limit", "0.001"]) == 1
    assert "remedy: " in capsys.readouterr().out
