"""An engine's memory: its roles are all of its largest program, and a remedy, applied, fits."""

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path

import jax
import pytest
import tokenizers

from jaxinfra.checkpoint.load_pretrained import load_pretrained, pretrained_shapes
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.cli import serve
from jaxinfra.cli.main import main
from jaxinfra.cli.out_of_memory import explain_serving_out_of_memory
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.diagnostics.memory.report import CACHES, WEIGHTS, report_memory
from jaxinfra.diagnostics.memory.serving import (
    ServingCase,
    serving_memory,
    serving_remedies,
)
from jaxinfra.hf import to_hf_config
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.model.definition import by_path
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.quantize.quantize import SourceModel, quantize_model
from jaxinfra.quantize.recipes import quantization_recipe
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.load import LoadedModel
from tests.engine_models import CONFIG, OPTIONS, POISON, definition, parameters

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


def test_a_step_is_given_as_many_arrays_whatever_its_layers():
    """Each costs the host time at every step, and the longer the more layers there are."""

    def arrays(repeats: int) -> int:
        (stack,) = CONFIG.stacks
        config = dataclasses.replace(CONFIG, stacks=(dataclasses.replace(stack, repeats=repeats),))
        runner = dataclasses.replace(CASE, model=config, is_unrolled=True).runner()
        key = next(key for key in runner.keys if key.name == "step" and not key.is_full)
        return len(jax.tree.leaves(runner.lowered(key).in_avals))

    assert arrays(2) == arrays(5)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A directory of the model in 4 bits."""
    values = parameters()
    values["embedding"]["table"] = values["embedding"]["table"].at[POISON].set(0.0)
    place = tmp_path_factory.mktemp("model")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(place / "tokenizer.json"))
    model = SourceModel(
        definition=definition(),
        source=LiveParameters(arrays=by_path(values)),
        hf=to_hf_config(CONFIG),
        tokenizer_directory=place,
    )
    quantize_model(model, place / "out", quantization_recipe("rtn-int4", group=32), ids_BT=None)
    return place / "out"


def test_shapes_of_a_directory_are_those_of_what_is_loaded(quantized):
    """Packed weights and plain ones, their dtypes and places; nothing but headers is read."""
    shapes, loaded = pretrained_shapes(quantized), load_pretrained(quantized, keep_packed=True)
    told, held = (jax.tree.leaves(each.parameters) for each in (shapes, loaded))
    assert jax.tree.structure(shapes.parameters) == jax.tree.structure(loaded.parameters)
    assert [(x.shape, x.dtype, x.sharding) for x in told] == [
        (x.shape, x.dtype, x.sharding) for x in held
    ]
    assert any(x.dtype.name == "uint8" for x in told)


@pytest.mark.slow
@pytest.mark.parametrize("is_unrolled", [False, True])
def test_an_engine_of_weights_in_4_bits_compiles_what_was_predicted(quantized, is_unrolled):
    shapes = pretrained_shapes(quantized)
    policy = shapes.definition.execution.policy
    case = ServingCase(
        model=shapes.definition.config,
        policy=policy,
        engine=OPTIONS,
        is_unrolled=is_unrolled,
        weights=shapes.parameters,
    )
    needs = serving_memory(case)
    model = load_pretrained(quantized, keep_packed=True)
    loaded = LoadedModel(
        definition=model.definition,
        parameters=model.parameters,
        tokenizer=bytes_tokenizer(),
        config=None,
        step=None,
    )
    engine = Engine(loaded.serving_decoder(is_unrolled=is_unrolled), options=OPTIONS)
    assert step_bytes(engine.runner.lowered(needs.program).compile()) == needs.bytes
    plain = dataclasses.replace(case, weights=None, policy=stored_as_computed(policy))
    assert needs.report.by_role()[WEIGHTS] < serving_memory(plain).report.by_role()[WEIGHTS]


@pytest.mark.slow
def test_the_roles_are_all_of_the_program(needs):
    roles = needs.report.by_role()
    assert sum(roles.values()) == needs.bytes == max(needs.totals.values())
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(definition().shapes))
    assert roles[WEIGHTS] == weights
    # Keys and values of 2 layers, 2 heads of 8, in fp32.
    assert needs.page_bytes == 2 * 2 * 2 * 8 * 4 * OPTIONS.page_size
    assert roles[CACHES] == needs.page_bytes * OPTIONS.num_pages
    held = {each.name for each in needs.report.largest}
    assert any("pools" in each.made_by for each in needs.report.largest), held


@pytest.mark.slow
def test_it_is_what_a_running_engine_compiles(needs):
    """The program of shapes alone, and that of an engine with its arrays."""
    engine = Engine(definition().bind(parameters()), options=OPTIONS)
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
    remedies = serving_remedies(CASE, needs, limit_bytes=limit, count=9)
    assert len(found["remedies"]) == 3
    first = remedies[0]
    assert first.fits
    assert first.bytes <= limit
    assert serving_memory(first.case).bytes == first.bytes
    # Bytes and a scale of four for each 8 elements, in place of 32.
    (smaller,) = [each for each in remedies if each.options == ("--cache", "int8")]
    assert smaller.bytes < needs.bytes - needs.page_bytes
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
    printed = re.findall(r"^remedy: (.*?): ", capsys.readouterr().out, re.MULTILINE)
    assert printed
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    for each in printed:
        parser.parse_args(["DIR", *shape, *shlex.split(each)])
