"""What flash_attention accepts, what it refuses in which words, and who computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import InputError, UnsupportedError, flash_attention
from pallas_kernels.common import device, tables
from pallas_kernels.flash_attention import AttentionSpec, MeshAxes, dispatch
from pallas_kernels.flash_attention.spec import AttentionCall, AttentionMasks


def array(*shape, dtype=jnp.float32):
    return jax.device_put(np.zeros(shape, dtype))  # which no program computes


Q, K, V = array(2, 8, 4, 16), array(2, 10, 2, 16), array(2, 10, 2, 24)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": array(8, 4, 16)}, r"query has shape \(8, 4, 16\).*\[B,T,N,H\]"),
        ({"key": array(2, 10, 2, 16, dtype=jnp.bfloat16)}, "float32, bfloat16, float32.*cast"),
        ({"key": array(3, 10, 2, 16)}, "batch sizes 2, 3, 2"),
        ({"value": array(2, 10, 4, 24)}, r"key \(2, 10, 2, 16\) and value \(2, 10, 4, 24\)"),
        ({"key": array(2, 10, 2, 8)}, "head width 16 and key 8"),
        ({"query": array(2, 8, 5, 16)}, "num_query_heads=5 is not a multiple of num_kv_heads=2"),
        ({"query": array(2, 8, 0, 16)}, "only sequence lengths may be 0"),
        ({"scale": float("nan")}, "scale=nan must be a finite Python number"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap=0.0 must be above 0"),
        ({"local_window_size": (3, -1)}, r"local_window_size=\(3, -1\).*None in the pair"),
        ({"local_window_size": (1, 2, 3)}, "pair"),
        ({"q_segment_ids": array(2, 8, dtype=jnp.int32)}, "come together"),
        (
            {"q_segment_ids": array(2, 8), "kv_segment_ids": array(2, 10)},
            r"q_segment_ids is float32 \(2, 8\).*integers of shape \(2, 8\)",
        ),
        ({"query_seq_lengths": array(3, dtype=jnp.int32)}, r"query_seq_lengths.*shape \(2,\)"),
        ({"key_value_seq_lengths": array(2)}, "key_value_seq_lengths is float32"),
        ({"sinks": array(2)}, r"one float a query head: \(4,\)"),
        ({"bias": array(2, 3, 8, 10)}, r"broadcast to \[B,N,T,S\] = \(2, 4, 8, 10\)"),
        ({"bias": array(1, 2, 4, 8, 10)}, "bias is float32"),
        ({"implementation": "triton"}, "implementation='triton' must be auto or hopper"),
    ],
)
def test_bad_input_is_explained(change, words):
    with pytest.raises(InputError, match=words):
        flash_attention(**({"query": Q, "key": K, "value": V} | change))


def test_a_traced_scale_is_refused():
    with pytest.raises(InputError, match="multiply the query instead"):
        jax.jit(lambda scale: flash_attention(Q, K, V, scale=scale))(0.5)


def test_types_of_results():
    attention = functools.partial(flash_attention, return_residual=True)
    out, lse = jax.eval_shape(attention, *(x.astype(jnp.bfloat16) for x in (Q, K, V)))
    assert (out.shape, out.dtype) == ((2, 8, 4, 24), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 8, 4), jnp.float32)
    out = jax.eval_shape(flash_attention, Q, K, V, array(8, 10))
    assert out.dtype == jnp.float32


def make_call(**changes):
    values = {
        "spec": AttentionSpec(scale=1.0, right=0),
        "masks": AttentionMasks(),
        "q": array(2, 8, 4, 64, dtype=jnp.bfloat16),
        "k": array(2, 8, 2, 64, dtype=jnp.bfloat16),
        "v": array(2, 8, 2, 64, dtype=jnp.bfloat16),
        "return_residual": False,
    }
    return AttentionCall(**(values | changes))


def test_a_named_implementation_refuses_and_names_who_can():
    words = r"'cudnn' cannot .* needs an NVIDIA GPU.*These can: xla, reference"
    with pytest.raises(UnsupportedError, match=words):
        flash_attention(Q, K, V, implementation="cudnn")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"q": array(2, 8, 4, 64)}, "does not take float32"),
        ({"v": array(2, 8, 2, 32, dtype=jnp.bfloat16)}, "one head width"),
        ({"k": array(2, 9, 2, 64, dtype=jnp.bfloat16)}, "top-left"),
        ({"spec": AttentionSpec(scale=1.0, left=3, right=1)}, "window to the right"),
        ({"spec": AttentionSpec(scale=1.0, left=3)}, "must be causal"),
        ({"spec": AttentionSpec(scale=1.0, logit_soft_cap=3.0)}, "soft cap"),
        ({"masks": AttentionMasks(q_segment_ids=1)}, "segment ids"),
        ({"masks": AttentionMasks(kv_lengths=1)}, "rows without keys"),
        ({"masks": AttentionMasks(sinks=1)}, "sinks"),
        ({"masks": AttentionMasks(bias=1)}, "bias gradient"),
        ({"return_residual": True}, "logsumexp"),
    ],
)
def test_what_cudnn_is_trusted_with(change, reason):
    with device.compiling_for(device.H200):
        got = dispatch.why_not("cudnn", make_call(**change))
    assert got is None if reason is None else reason in got


LOSING = (("hopper", 2.0), ("cudnn", 1.0))
"""Times of our kernels beside a faster one."""


def test_auto_takes_the_fastest_measured_near_the_case(monkeypatch):
    case = dispatch.case_of(make_call(), gradient=True)

    def row(length, name, ms):
        lengths = {"q_length": length, "kv_length": length}
        return tables.Row.of(case=case | lengths, choice={"implementation": name}, ms=ms)

    table = (row(16, "xla", 1.0), row(16, "cudnn", 2.0), row(4096, "cudnn", 3.0))
    assert dispatch.rank(table, case) == ["xla", "cudnn"]
    far = case | {"q_length": 2048, "kv_length": 2048}
    assert dispatch.rank(table, far) == ["cudnn"]  # the other was not timed around there
    for other in ({"mask": "other"}, {"head_width": 64}, {"packed": True}):
        assert dispatch.rank(table, case | other) == ["xla", "cudnn"]  # what there is
    for other in ({"gradient": False}, {"dtype": "float16"}):
        assert dispatch.rank(table, case | other) == []
    # One odd measurement among neighbours that agree does not count alone.
    near = [row(length, "cudnn", 2.0) for length in (1024, 1100, 1200)]
    near += [row(1024, "xla", 1.9), row(1100, "xla", 3.0), row(1200, "xla", 3.0)]
    between = case | {"q_length": 1050, "kv_length": 1050}
    assert dispatch.rank((*table, *near), between) == ["cudnn", "xla"]
    # Of two that disagree the one of the same mask and width counts.
    other = [
        tables.Row.of(case=dict(each.case) | {"mask": "other"}, choice=dict(each.choice), ms=ms)
        for each, ms in zip(near[:1] + near[3:4], (3.0, 1.0), strict=True)
    ]
    mixed = (*table, near[1], near[4], *other)
    assert dispatch.rank(mixed, between) == ["cudnn", "xla"]
    assert dispatch.rank(mixed, between | {"mask": "other"}) == ["xla", "cudnn"]
    # A kernel that cannot compute the nearest case may be the fastest of those that are next.
    near = [row(1050, "hopper", 2.0), row(1050, "xla", 3.0)]
    near += [row(length, name, ms) for length in (900, 1200) for name, ms in LOSING]
    unlike = (*table, *near)
    assert dispatch.rank(unlike, between) == ["cudnn", "hopper", "xla"]
    monkeypatch.setattr(tables, "find", lambda folder, question: table)
    call = make_call()
    order = dispatch.preferences(call, gradient=True)
    assert order == ["xla", "cudnn", "hopper"]


def test_a_shard_map_over_a_part_of_the_mesh_needs_declared_axes():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    reasons = {}

    def block(x, axes):
        for declared in (None, MeshAxes(heads=("tensor",))):
            call = make_call(mesh_axes=declared)
            reasons[axes, declared is None] = dispatch.why_not("hopper", call)
            reasons[axes, "cudnn"] = dispatch.why_not("cudnn", call)
        return x

    for axes in ("data",), ("data", "tensor"):
        spec = PartitionSpec(*axes)
        split = jax.shard_map(
            functools.partial(block, axes=axes),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names=set(axes),
        )
        with device.compiling_for(device.H200):
            jax.eval_shape(split, array(4, 4))
    refused = {case for case, reason in reasons.items() if reason is not None}
    assert refused == {(("data",), True), (("data",), "cudnn")}
    assert "leaves mesh axes tensor to the compiler" in reasons[("data",), True]
