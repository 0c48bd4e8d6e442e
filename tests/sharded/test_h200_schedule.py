"""What XLA makes of a step for four H200s: which collectives, and what its schedule hides them by.

The CPU compiler neither sums the gradients of q, k and v before it reduces them, nor writes
reduce-scatters, nor schedules; so these are read off programs compiled for GPUs, on any machine
with the CUDA plugin (the extra ``cuda``).
"""

import collections
import functools
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.sharded.h200_step import LAYERS, LENGTH, ROWS, WIDTH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None
        or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
        reason="compiling for GPUs needs the CUDA plugin: install the extra cuda",
    ),
]


@functools.cache
def compiled(*arguments: str) -> dict[str, Any]:
    """What ``h200_step`` prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.sharded.h200_step", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def step(*arguments: str) -> list[dict[str, Any]]:
    """Collectives of more than 1 MiB."""
    return [e for e in compiled(*arguments)["collectives"] if e["sent_bytes"] > 2**20]


def of_blocks(found: list[dict[str, Any]]) -> collections.Counter[tuple[str, str, str]]:
    """(pass, half block, kind) to how many there are in one turn of the loop over layers."""
    counted: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for each in found:
        scope = each["scope"]
        if "(layer)" not in scope:
            continue
        assert each["times"] == LAYERS, scope
        assert each["dtype"] == "bf16", scope
        half = "attention" if "attention" in scope else "mlp"
        when = "forward"
        if "rematted_computation" in scope:
            when = "recomputed"
        elif "transpose(" in scope:
            when = "backward"
        counted[when, half, each["kind"]] += 1
    return counted


def test_tensor_parallel_is_one_all_reduce_a_half_block():
    found = step("tensor=4")
    expected = {
        (when, half, "all-reduce"): 1
        for when in ("forward", "backward")
        for half in ("attention", "mlp")
    }
    assert of_blocks(found) == expected
    activation = ROWS * LENGTH * WIDTH * 2
    in_blocks = sum(each["sent_bytes"] for each in found if "(layer)" in each["scope"])
    assert in_blocks == 4 * LAYERS * 2 * activation * 3 / 4


def test_sequence_parallel_scatters_and_gathers():
    found = step("tensor=4", "--sequence-parallel")
    expected = {
        (when, half, kind): 1
        for when in ("forward", "backward")
        for half in ("attention", "mlp")
        for kind in ("all-gather", "reduce-scatter")
    }
    # Recomputation reads the gathered stream again.
    expected |= {("recomputed", half, "all-gather"): 1 for half in ("attention", "mlp")}
    assert of_blocks(found) == expected
    activation = ROWS * LENGTH * WIDTH * 2
    in_blocks = sum(each["sent_bytes"] for each in found if "(layer)" in each["scope"])
    assert in_blocks == 10 * LAYERS * activation * 3 / 4


def test_what_a_norm_hands_on_is_gathered_rounded():
    """At these widths the partitioner would take the gather into the norm, to fp32."""
    of_blocks(step("tensor=4", "--sequence-parallel", "--preset", "llama31_8b"))


def covered(found: list[dict[str, Any]]) -> float:
    """The share of bytes that the schedule puts a matmul or a kernel beside."""
    sent = sum(each["sent_bytes"] for each in found)
    return sum(each["sent_bytes"] for each in found if each["covered_by"]) / sent


def test_fully_sharded_is_hidden_by_the_better_schedule():
    """Next layers' weights are gathered, and gradients scattered, while a layer computes."""
    plain, better = step("fsdp=4"), step("fsdp=4", "--o1")
    assert covered(better) > 0.8
    assert covered(better) > covered(plain)
    kinds = {each["kind"] for each in better}
    assert kinds == {"all-gather", "reduce-scatter", "all-to-all"}
    # Weights go as bf16, gradients as fp32, and the loss's table once for all its chunks.
    assert {each["dtype"] for each in better if each["kind"] == "all-gather"} == {"bf16"}
    assert {each["dtype"] for each in better if each["kind"] == "reduce-scatter"} == {"f32"}
    tables = [e for e in better if e["kind"] == "all-gather" and max(e["shape"]) > 100_000]
    assert [each["times"] for each in tables] == [1]


def test_shared_experts_run_beside_an_exchange():
    """Their three products beside the rows' way back; in the backward pass, those of the inputs'
    gradients beside the gradients' way back.
    """
    arguments = ("fsdp=4,expert=4", "--experts", "--o1")
    beside = compiled(*arguments)["shared_beside"]
    rows = [e for e in step(*arguments) if "/exchange/" in e["scope"] and e["dtype"] == "bf16"]
    for backward in (False, True):
        found = [e["instruction"] for e in rows if ("transpose(" in e["scope"]) == backward]
        assert max(beside[name] for name in found) == 3


def test_rounded_gradients_are_summed_in_half_the_bytes():
    """Of every matrix and of the vocabulary's table; norms' scales stay fp32, under 1 MiB."""
    scattered = {
        arguments: [e for e in step("fsdp=4", *arguments) if e["kind"] == "reduce-scatter"]
        for arguments in ((), ("--rounded",))
    }
    assert {each["dtype"] for each in scattered["--rounded",]} == {"bf16"}
    whole, half = (sum(each["sent_bytes"] for each in found) for found in scattered.values())
    assert half == whole / 2


def test_gradients_of_kept_weights_leave_in_order_and_lie_as_the_weights():
    """The table's and those of the last layer are summed before the first layer's backward pass;
    no update turns weights and moments to a gradient that came with its split dim outermost.
    """
    found = compiled("fsdp=4", "--kept")
    assert len(found["reduced_early"]) >= 2
    assert found["turned_updates"] == 0


def test_gathered_weights_do_not_turn_the_residual_stream():
    """Its width stays contiguous; a weight gathered along it arrives with the width outermost."""
    assert compiled("fsdp=4")["width_first"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("fsdp=2,tensor=2", "--sequence-parallel", "--fp8", "squares"),
        ("fsdp=4,expert=4", "--experts", "--o1"),
    ],
)
def test_no_kernel_is_fused_with_the_store_of_its_result(arguments):
    """XLA would run it a second time where the result has another use."""
    assert compiled(*arguments)["fused"] == []


def test_in_8_bits_layers_have_no_product_of_xlas_and_the_reductions_of_bf16():
    mesh = ("fsdp=2,tensor=2", "--sequence-parallel")
    eight, sixteen = compiled(*mesh, "--fp8", "squares"), compiled(*mesh)
    assert sixteen["products"]
    assert not eight["products"]
    # Of a layer: 21 products, and what quantizes 7 weights, 4 inputs and 7 cotangents.
    assert eight["kernels"] - sixteen["kernels"] >= 39
    sent: list[collections.Counter[tuple[str, str]]] = []
    for found in (eight, sixteen):
        sent.append(collections.Counter())
        for each in found["collectives"]:
            if "(layer)" in each["scope"]:
                sent[-1][each["kind"], each["dtype"]] += each["sent_bytes"]
    for key in (("reduce-scatter", "bf16"), ("reduce-scatter", "f32"), ("all-reduce", "bf16")):
        assert abs(sent[0][key] - sent[1][key]) < 2**20, (key, sent)
    # Weights for both passes, inputs and cotangents; bf16 gathers inputs again for the backward.
    assert sent[0]["all-gather", "bf16"] == 0
    assert sent[0]["all-gather", "u8"] < 0.5 * sent[1]["all-gather", "bf16"]
