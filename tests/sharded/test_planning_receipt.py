"""Predicted arguments and collectives equal the compiled training step's, array by array."""

import dataclasses

import pytest

from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.planning.layout import UNROLLED, Layout, Recompute
from jaxinfra.planning.receipt import compile_on_cpu, run_config
from tests.sharded.cases import gemma_like, gpt_like, llama_like

UNTIED = dataclasses.replace(llama_like().with_layers(3), vocab_size=128, tie_embeddings=False)
MODELS = {"llama": UNTIED, "tied": llama_like(), "gpt": gpt_like(), "gemma": gemma_like()}


def receipt(model, **sizes):
    accumulation = sizes.get("accumulation", 1)
    layout = Layout(**{"length": 16, "batch": 8 * accumulation, "remat": Recompute.NONE} | sizes)
    return compile_on_cpu(MODELS[model], layout)


CASES = [
    ("llama", {"fsdp": 2, "tensor": 4}),
    ("llama", {"fsdp": 8, "accumulation": 4, "remat": Recompute.FULL}),
]
MORE = [
    ("llama", {"context": 4}),
    ("llama", {"fsdp": 8}),
    ("llama", {"fsdp": 8, "zero": 1}),
    ("llama", {"fsdp": 8, "zero": 2}),
    ("llama", {"replica": 8, "accumulation": 4}),
    ("llama", {"replica": 2, "fsdp": 4}),
    ("llama", {"replica": 2, "fsdp": 4, "accumulation": 4}),
    ("llama", {"fsdp": 8, "zero": 1, "accumulation": 4}),
    ("llama", {"fsdp": 8, "zero": 2, "accumulation": 4}),
    ("llama", {"replica": 2, "fsdp": 2, "zero": 1}),
    ("llama", {"tensor": 4}),
    ("llama", {"tensor": 4, "fsdp": 2, "remat": Recompute.FULL, "accumulation": 2}),
    ("llama", {"context": 2, "fsdp": 2}),
    ("llama", {"context": 2, "tensor": 2}),
    ("llama", {"context": 2, "replica": 2}),
    ("llama", {"context": 2, "replica": 2, "fsdp": 2}),
    ("llama", {"context": 8}),
    ("llama", {"context": 4, "remat": Recompute.FULL}),
    ("llama", {"fsdp": 8, "remat": Recompute.DOTS}),
    ("tied", {"fsdp": 8}),
    ("tied", {"fsdp": 2, "tensor": 2}),
    ("gpt", {"fsdp": 8}),
    ("gpt", {"fsdp": 4, "zero": 2}),
    ("gemma", {"tensor": 2}),
    ("gemma", {"fsdp": 8}),
]


def name(case):
    return case[0] + "-" + "-".join(f"{key}={value}" for key, value in case[1].items())


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=name
)
def test_the_program_is_what_was_predicted(case):
    model, sizes = case
    found = receipt(model, **sizes)
    assert sum(found.predicted_arguments.values()) == found.argument_bytes
    assert [line for line in found.lines if not line.equal] == []
    for kind, sums in found.totals().items():
        assert sums["predicted_bytes"] == sums["compiled_bytes"] > 0, kind


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pipe": 3, "accumulation": 3}, "pipe=1"),
        ({"fsdp": 2, "zero": 0}, "replica axis"),
        ({"expert": 2, "fsdp": 2}, "no expert axis"),
        ({"tensor": 2, "sequence_parallel": True}, "sequence_parallel"),
        ({"traits": UNROLLED}, "unroll"),
    ],
)
def test_a_step_that_is_not_predicted_call_by_call_is_refused(sizes, words):
    with pytest.raises(UnsupportedError, match=words):
        receipt("llama", **sizes)


def test_a_layout_is_run_as_it_says():
    layout = Layout(length=16, batch=16, pipe=2, chunks=2, accumulation=8, traits=UNROLLED)
    run = run_config(
        MODELS["gpt"], layout, policy=PolicyName.BF16, attention=AttentionImplementation.XLA
    )
    assert (run.mesh.pipe, run.pipeline.schedule, run.pipeline.chunks) == (2, "interleaved", 2)
    assert run.training.unroll == MODELS["gpt"].num_layers
    assert run.training.accumulation == 8
