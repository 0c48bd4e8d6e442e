"""Predicted arguments and exchanges beside the compiled training step's.

Models are wide enough for matrices to be most of their bytes; nothing of that size is allocated.
"""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import jax
import pytest

from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation, Remat
from jaxinfra.errors import UnsupportedError
from jaxinfra.hlo.program import Collective, collectives_in_kernels
from jaxinfra.planning.layout import UNROLLED, lay_out, run_config
from jaxinfra.planning.receipt import TOLERANCE, Receipt, compile_on_cpu, exchanged
from tests.sharded.cases import gemma_like, gpt_like, llama_like

LENGTH, WIDTH, LAYERS = 64, 512, 3
ROOM = ExchangeConfig(room_factor=1.5)
NODES_OF_4 = ExchangeConfig(room_factor=1.5, node_size=4)
EXACT_EXPERTS = {"fsdp exchange", "expert exchange"}
KEPT = {"keep_gathered": True, "remat": Remat.FULL}


def with_feed_forward(config, feed_forward):
    (stack,) = config.stacks
    pattern = tuple(
        dataclasses.replace(block, feed_forward=feed_forward) for block in stack.pattern
    )
    return dataclasses.replace(config, stacks=(dataclasses.replace(stack, pattern=pattern),))


def wide(config, **heads):
    """Its stack with heads and a feed-forward layer of more width."""
    (stack,) = config.stacks
    pattern = tuple(
        dataclasses.replace(
            block,
            mixer=dataclasses.replace(block.mixer, head_dim=32, **heads),
            feed_forward=dataclasses.replace(block.feed_forward, hidden_dim=1536),
        )
        for block in stack.pattern
    )
    stacks = (dataclasses.replace(stack, pattern=pattern),)
    return dataclasses.replace(config, stacks=stacks, model_dim=WIDTH, vocab_size=4096)


UNTIED = dataclasses.replace(wide(llama_like()).with_layers(LAYERS), tie_embeddings=False)
FEW_HEADS = wide(llama_like(), num_kv_heads=2).with_layers(LAYERS)
EXPERTS = ExpertsConfig(num_experts=8, top_k=2, hidden_dim=512)
MODELS = {
    "experts": with_feed_forward(UNTIED, EXPERTS),
    "few-heads": dataclasses.replace(FEW_HEADS, tie_embeddings=False),
    "llama": UNTIED,
    "tied": wide(llama_like()),
    "gpt": wide(gpt_like()),
    "gemma": wide(gemma_like()),
}


def receipt(model, **sizes) -> Receipt:
    accumulation = sizes.get("accumulation", 1)
    layout = lay_out(**{"length": LENGTH, "batch": 8 * accumulation, "remat": Remat.NONE} | sizes)
    return compile_on_cpu(MODELS[model], layout)


# Model, layout, what is exchanged to the byte, and what XLA's CPU backend does differently: it sums
# the input gradients of projections apart, gathers the loss's table once for all micro-batches, and
# may gather a layer's matrices a third time. Token ids are gathered too, and are in no formula.
CASES = [
    (
        "llama",
        {"fsdp": 2, "tensor": 4, "keep_gathered": True},
        {"fsdp sum", "fsdp exchange"},
        {"tensor sum"},
    ),
]
MORE = [
    ("llama", {"fsdp": 8, "keep_gathered": True}, {"fsdp sum", "fsdp exchange"}, set()),
    ("llama", {"fsdp": 2, "tensor": 4}, {"fsdp sum", "fsdp exchange"}, {"tensor sum"}),
    ("llama", {"fsdp": 8}, {"fsdp sum", "fsdp exchange"}, set()),
    ("llama", {"fsdp": 8, "remat": Remat.FULL}, {"fsdp sum", "fsdp exchange"}, set()),
    ("llama", {"fsdp": 8, **KEPT}, {"fsdp sum", "fsdp exchange"}, set()),
    # Experts' weights, gathered beside the exchange, are gathered again whatever else stays.
    ("experts", {"fsdp": 8, "expert": 4, **KEPT}, EXACT_EXPERTS, set()),
    (
        "llama",
        {"replica": 2, "context": 2, "fsdp": 2},
        {"fsdp sum", "fsdp exchange", "replica sum", "context send"},
        set(),
    ),
    ("llama", {"fsdp": 8, "zero": 1}, {"fsdp sum", "fsdp gather"}, set()),
    ("llama", {"fsdp": 8, "zero": 2}, {"fsdp sum", "fsdp gather"}, set()),
    ("llama", {"fsdp": 8, "zero": 1, "accumulation": 4}, {"fsdp sum", "fsdp gather"}, set()),
    ("llama", {"fsdp": 8, "zero": 2, "accumulation": 4}, {"fsdp sum", "fsdp gather"}, set()),
    ("llama", {"replica": 2, "fsdp": 2, "zero": 1}, {"fsdp sum", "replica sum"}, set()),
    ("llama", {"replica": 8, "accumulation": 4}, {"replica sum"}, set()),
    ("llama", {"replica": 2, "fsdp": 4}, {"fsdp sum", "fsdp exchange", "replica sum"}, set()),
    (
        "llama",
        {"fsdp": 8, "accumulation": 4, "remat": Remat.FULL},
        {"fsdp sum", "fsdp exchange"},
        {"fsdp gather"},
    ),
    ("llama", {"context": 4, "fsdp": 2}, {"fsdp sum", "fsdp exchange", "context send"}, set()),
    ("llama", {"context": 8}, {"context sum", "context send"}, set()),
    ("tied", {"fsdp": 8}, {"fsdp sum", "fsdp exchange"}, set()),
    ("tied", {"fsdp": 2, "tensor": 2}, {"fsdp sum", "fsdp exchange"}, {"tensor sum"}),
    # Both tables' rows come back as one.
    ("gpt", {"fsdp": 8}, set(), {"fsdp exchange"}),
    ("gpt", {"fsdp": 4, "zero": 2}, {"fsdp sum"}, set()),
    ("gemma", {"tensor": 2}, set(), {"tensor sum"}),
    # Gathered weights of experts are kept where nothing is recomputed, the loss's table too.
    ("experts", {"fsdp": 8, "expert": 4, "exchange": ROOM}, EXACT_EXPERTS, set()),
    ("experts", {"fsdp": 8, "expert": 4, "remat": Remat.FULL}, EXACT_EXPERTS, set()),
    ("experts", {"fsdp": 8, "expert": 8, "accumulation": 2}, EXACT_EXPERTS, {"fsdp gather"}),
    (
        "experts",
        {"fsdp": 8, "expert": 8, "exchange": NODES_OF_4},
        {*EXACT_EXPERTS, "expert nodes exchange"},
        set(),
    ),
    # Probabilities of a sequence's experts are gathered for the balance losses.
    (
        "experts",
        {"replica": 2, "context": 2, "fsdp": 2, "expert": 4, "exchange": ROOM},
        {*EXACT_EXPERTS, "context send"},
        {"context gather", "replica gather"},
    ),
    # Each device has a copy of a key/value head, and only that one is gathered over fsdp.
    ("few-heads", {"tensor": 8, "accumulation": 4}, {"tensor gather"}, {"tensor sum"}),
    ("few-heads", {"fsdp": 2, "tensor": 4}, {"fsdp sum", "tensor gather"}, {"tensor sum"}),
]


def name(case):
    return case[0] + "-" + "-".join(f"{key}={value}" for key, value in case[1].items())


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=name
)
def test_the_program_exchanges_what_the_formulas_say(case):
    model, sizes, exact, different = case
    found = receipt(model, **sizes)
    assert found.arguments_equal
    assert found.axes_equal
    lines = {f"{line.axis} {line.purpose}": line for line in found.lines}
    assert {what for what, line in lines.items() if not line.holds} == different
    for what in exact:
        assert lines[what].predicted.array_bytes == lines[what].compiled.array_bytes > 0, what
    for what in different:
        assert lines[what].calls, "what differs is named"


@pytest.mark.slow
def test_input_gradients_of_projections_are_summed_apart():
    """Of the stream's five readers in a layer, where the sum of all of a half block would do."""
    found = receipt("llama", fsdp=2, tensor=4)
    (line,) = [line for line in found.lines if line.axis == "tensor"]
    stream = 4 * (8 // 2) * LENGTH * WIDTH
    more = line.compiled.array_bytes - line.predicted.array_bytes
    assert math.isclose(more, (5 - 2) * LAYERS * stream, rel_tol=TOLERANCE)


def call(kind, shape, group, scope="a scope") -> Collective:
    return Collective(
        kind=kind,
        dtype="f32",
        shape=shape,
        times=3,
        group=group,
        scope=scope,
        instruction="name",
    )


def test_a_sum_over_two_axes_is_one_over_each():
    """[4, 2] devices: fsdp sums the whole, replica what a device then holds; the same is sent."""
    mesh = {"replica": 4, "fsdp": 2}
    joint = call("all-reduce", (10, 8), tuple(range(8)))
    found = exchanged([joint, call("all-reduce", (), tuple(range(8)))], mesh)
    assert {key: each.array_bytes for key, each in found.items()} == {
        ("fsdp", "sum"): 3 * 320,
        ("replica", "sum"): 3 * 160,
    }
    assert sum(each.sent_bytes for each in found.values()) == joint.sent_bytes


def test_a_reduce_scatter_counts_what_was_there_before():
    scattered = exchanged([call("reduce-scatter", (5, 8), (0, 1))], {"fsdp": 2})["fsdp", "sum"]
    whole = exchanged([call("all-reduce", (10, 8), (0, 1))], {"fsdp": 2})["fsdp", "sum"]
    assert scattered.array_bytes == whole.array_bytes
    assert 2 * scattered.sent_bytes == whole.sent_bytes


@pytest.mark.parametrize(
    ("kind", "shape", "name"),
    [
        ("all-gather", (10, 8), "gather_by_copies"),
        ("reduce-scatter", (5, 8), "scatter_sum_by_copies"),
    ],
)
def test_copies_count_as_the_collective_in_whose_place_they_are(kind, shape, name):
    copied = call("collective-permute", (5, 8), (0, 1), f"shard_map/{name}/ppermute")
    found, wanted = (exchanged([each], {"fsdp": 2}) for each in (copied, call(kind, shape, (0, 1))))
    assert found.keys() == wanted.keys()
    for key, each in found.items():
        assert each.array_bytes == wanted[key].array_bytes
        assert each.sent_bytes == wanted[key].sent_bytes


PROGRAM = """
ENTRY %main (x: bf16[4,8]) -> bf16[8,6] {
  %a = (bf16[8,6]{1,0}, bf16[8,8]{1,0}, s32[3]{0}) custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/mlp/shard_map/all_gather_matmul/mpmd_map"}
  %b = (bf16[4,8]{1,0}, bf16[1,4]{1,0}, s32[3]{0}) custom-call(%y, %v), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/mlp/shard_map/matmul_reduce_scatter/mpmd_map"}
  %c = bf16[8,6]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/attention/core/mpmd_map"}
}
"""  # noqa: E501


def test_kernels_that_send_while_they_multiply_are_counted():
    compiled = cast(jax.stages.Compiled, SimpleNamespace(as_text=lambda: PROGRAM))
    found = exchanged(collectives_in_kernels(compiled), {"tensor": 2})
    assert {
        key: (each.array_bytes, each.sent_bytes, each.kinds) for key, each in found.items()
    } == {
        ("tensor", "gather"): (2 * 8 * 8, 8 * 8, {"all-gather in kernels"}),
        ("tensor", "sum"): (2 * 8 * 8, 8 * 8, {"reduce-scatter in kernels"}),
    }


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None
    or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="compiling for GPUs needs the CUDA plugin: install the extra cuda",
)
@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        (("fsdp=2",), {"fsdp gather": "collective-permute", "fsdp sum": "collective-permute"}),
        (
            ("tensor=2", "--sequence-parallel"),
            {"tensor gather": "all-gather in kernels", "tensor sum": "reduce-scatter in kernels"},
        ),
    ],
)
def test_the_step_compiled_for_two_h200s_is_the_one_that_runs_there(mesh, kinds):
    """By copies over fsdp, in kernels over tensor; as many bytes and temporaries as planned."""
    sizes = ("--devices", "2", "--batch", "8", "--length", "4096", "--compile", "gpu", "--json")
    ended = subprocess.run(
        [sys.executable, "-m", "jaxinfra", "plan", "llama32_1b", "--mesh", *mesh, *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)["receipt"]
    lines = {f"{line['axis']} {line['purpose']}": line for line in found["exchanged"]}
    for name, kind in kinds.items():
        assert kind in lines[name]["compiled"]["kinds"]
        sides = [lines[name][side]["array_bytes"] for side in ("predicted", "compiled")]
        assert math.isclose(*sides, rel_tol=0.025)  # embedding and final norm gather once more
    temporaries = found["temporary_bytes"]
    assert math.isclose(temporaries["predicted"], temporaries["compiled"], rel_tol=0.03)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pipe": 3, "accumulation": 3}, "pipe=1"),
        ({"fsdp": 2, "zero": 0}, "replica axis"),
    ],
)
def test_a_step_that_cannot_be_compared_is_refused(sizes, words):
    with pytest.raises(UnsupportedError, match=words):
        receipt("llama", **sizes)


def test_a_layout_is_run_as_it_says():
    layout = lay_out(length=16, batch=16, pipe=2, chunks=2, accumulation=8, traits=UNROLLED)
    run = run_config(
        MODELS["gpt"], layout, policy=PolicyName.BF16, attention=AttentionImplementation.XLA
    )
    assert (run.mesh.pipe, run.pipeline.schedule, run.pipeline.chunks) == (2, "interleaved", 2)
    assert run.training.unroll == MODELS["gpt"].num_layers
    assert run.training.accumulation == 8
