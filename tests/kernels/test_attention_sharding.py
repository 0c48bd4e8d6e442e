"""Attention split over batch and heads: the same numbers, and only the collectives it must have."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import UnsupportedError, flash_attention
from pallas_kernels.common import device
from pallas_kernels.common.varying import vary_alike
from pallas_kernels.flash_attention import AttentionMasks, AttentionSpec, reference, xla
from pallas_kernels.flash_attention.implementations import AttentionPlan, attend
from pallas_kernels.flash_attention.spec import MeshAxes
from tests.kernels.attention_stand_in import BOTH, FAST_COMPILE, STAND_IN, XLA, results

P = PartitionSpec
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
B, T, H, V = 4, 20, 8, 12
SPEC = AttentionSpec(scale=0.3, right=0)
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(xla, "MAX_CHUNK", 8)


def arrays(N, K, *, sinks=False, bias=None):
    rng = np.random.default_rng(N + K)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    masks = AttentionMasks(
        q_segment_ids=jnp.asarray(np.arange(B * T).reshape(B, T) % T // 9, jnp.int32),
        kv_segment_ids=jnp.asarray(np.arange(B * T).reshape(B, T) % T // 9, jnp.int32),
        sinks=normal(N) if sinks else None,
        bias=None if bias is None else normal(*bias),
    )
    q, k, v = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, V)
    return q, k, v, masks, normal(B, T, N, V), normal(B, T, N)


def specs(kv_axis, masks):
    """Layouts of the arguments: batch over data, heads over tensor."""
    q, kv = P("data", None, "tensor"), P("data", None, kv_axis)
    bias = None
    if masks.bias is not None:
        b, n = (size > 1 for size in masks.bias.shape[:2])
        bias = P("data" if b else None, "tensor" if n else None)
    mask_specs = AttentionMasks(
        q_segment_ids=P("data"),
        kv_segment_ids=P("data"),
        sinks=None if masks.sinks is None else P("tensor"),
        bias=bias,
    )
    return q, kv, kv, mask_specs, q, q


def assert_equal(got, want):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@functools.cache
def unsharded(N, K, sinks, bias):
    args = arrays(N, K, sinks=sinks, bias=bias)
    return jax.jit(functools.partial(results, XLA, SPEC), compiler_options=FAST_COMPILE)(*args)


# N, K, mesh axis of the kv heads, sinks, bias, and the collectives there must be.
SPLITS = {
    # Batch and kv heads are independent: nothing may move.
    "gqa": (8, 4, "tensor", False, None, set()),
    # Gradients of what every batch row shares are summed over the batch.
    "sinks-and-bias": (4, 4, "tensor", True, (1, 4, 1, 20), {"all-reduce"}),
    # Queries of one kv head lie on several devices: dk and dv are summed over them.
    "mqa": (4, 1, None, False, None, {"all-reduce"}),
    # 2 kv heads on 4 devices: correct, but heads are gathered.
    "too-few-kv-heads": (8, 2, None, False, None, {"all-gather"}),
}


@pytest.mark.slow_cases(
    "xla-gqa-Explicit",
    "xla-sinks-and-bias-Auto",
    "custom-call-gqa-Auto",
    "custom-call-mqa-Auto",
    "custom-call-sinks-and-bias-Explicit",
    "custom-call-too-few-kv-heads-Explicit",
    "xla-gqa-Auto",
    "custom-call-gqa-Explicit",
    "xla-sinks-and-bias-Explicit",
    "custom-call-too-few-kv-heads-Auto",
    "custom-call-mqa-Explicit",
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
@pytest.mark.parametrize(
    ("name", "split"),
    [("xla", "gqa"), ("xla", "sinks-and-bias"), *(("custom-call", split) for split in SPLITS)],
)
def test_sharded_arrays(name, split, axis_type):
    N, K, kv_axis, sinks, bias, collectives = SPLITS[split]
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    args = arrays(N, K, sinks=sinks, bias=bias)
    layout = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs(kv_axis, args[3]),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    placed = jax.device_put(args, layout)
    function = jax.jit(functools.partial(results, BOTH[name], SPEC), compiler_options=FAST_COMPILE)
    compiled = function.lower(*placed).compile()
    found = set(COLLECTIVE.findall(compiled.as_text()))
    assert found == collectives
    (out, lse), grads = compiled(*placed)
    assert out.sharding.spec[:3] == lse.sharding.spec[:3] == ("data", None, "tensor")
    assert_equal(((out, lse), grads), unsharded(N, K, sinks, bias))


def test_sharded_arrays_outside_of_jit_are_not_gathered():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def forward(q, k, v, masks, *, spec):
        seen.append(q.shape)
        return reference.forward(q, k, v, masks, spec=spec)

    watched = dataclasses.replace(STAND_IN, forward=forward)
    q, k, v, *_ = arrays(8, 4)
    layout = NamedSharding(mesh, P("data", None, "tensor"))
    placed = jax.device_put((q, k, v), layout)
    out, lse = attend(AttentionPlan(implementation=watched, spec=SPEC), *placed, AttentionMasks())
    assert seen[-1] == (B // 2, T, 2, H)  # traced last for a device's block
    assert out.sharding.spec[:3] == lse.sharding.spec[:3] == ("data", None, "tensor")
    want = reference.forward(q, k, v, AttentionMasks(), spec=SPEC)
    assert_equal((out, lse), want)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["explicit", "shard_map", "shard_map of a part"])
def test_hopper_kernels_lower_on_a_mesh(where):
    """Where types say how arrays lie, a kernel's results must say it too: a result that seems the
    same on all devices has its cotangents summed over them.
    """
    kind = AxisType.Explicit if where == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
    layout, manual = P("data", None, "tensor"), ("data", "tensor")
    options: dict[str, Any] = {"implementation": "hopper"}
    if where == "shard_map of a part":
        layout, manual = P("data"), ("data",)
        options["mesh_axes"] = MeshAxes(heads=("tensor",))

    def attention(q, k, v):
        return flash_attention(q, k, v, **options)

    if where != "explicit":
        attention = jax.shard_map(
            attention, mesh=mesh, in_specs=(layout,) * 3, out_specs=layout, axis_names=set(manual)
        )

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v).astype(jnp.float32))

    shapes = [
        jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16, sharding=NamedSharding(mesh, layout))
        for n in (16, 8, 8)
    ]
    with device.compiling_for(device.H200), jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert len(kernels) == 2  # a forward and one fused backward
    assert all("tensor<1x256x4x64xbf16>" in line for line in kernels)  # a device's block
    assert "all_reduce" not in text


@pytest.mark.parametrize("name", BOTH)
def test_shard_map_over_batch_and_heads(name):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    args = arrays(4, 4, sinks=True, bias=(1, 4, 1, 20))

    def split(q, k, v, masks, d_out, d_lse):
        layout = specs("tensor", masks)
        return jax.shard_map(
            lambda *block: attend(
                AttentionPlan(implementation=BOTH[name], spec=SPEC), *vary_alike(block)
            ),
            mesh=mesh,
            in_specs=layout[:4],
            out_specs=(layout[0], layout[0]),
        )(q, k, v, masks)

    def whole(q, k, v, masks, d_out, d_lse):
        outs, pull = jax.vjp(lambda *a: split(*a, None, None), q, k, v, masks)
        dq, dk, dv, d_masks = pull((d_out, d_lse))
        return outs, (dq, dk, dv, d_masks.sinks, d_masks.bias)

    got = jax.jit(whole, compiler_options=FAST_COMPILE)(*args)
    assert_equal(got, unsharded(4, 4, True, (1, 4, 1, 20)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_a_part_of_the_mesh(check_vma):
    """The rest of the mesh splits batch and heads: declared, since a custom call cannot ask."""
    mesh = jax.make_mesh((2, 2, 2), ("pipe", "data", "tensor"), axis_types=(AxisType.Auto,) * 3)
    q, k, v, masks, d_out, d_lse = arrays(4, 4, sinks=True)
    axes = MeshAxes(batch=("pipe", "data"), heads=("tensor",))  # those that are manual do not count

    def forward(*block):
        return attend(
            AttentionPlan(implementation=STAND_IN, spec=SPEC, axes=axes), *vary_alike(block)
        )

    def whole(q, k, v, masks, d_out, d_lse):
        by_pipe = P("pipe")
        mask_specs = AttentionMasks(q_segment_ids=by_pipe, kv_segment_ids=by_pipe, sinks=P())
        split = jax.shard_map(
            forward,
            mesh=mesh,
            in_specs=(by_pipe, by_pipe, by_pipe, mask_specs),
            out_specs=(by_pipe, by_pipe),
            axis_names={"pipe"},
            check_vma=check_vma,
        )
        outs, pull = jax.vjp(split, q, k, v, masks)
        dq, dk, dv, d_masks = pull((d_out, d_lse))
        return outs, (dq, dk, dv, d_masks.sinks, None)

    both = NamedSharding(mesh, P(("pipe", "data"), None, "tensor"))
    placed = jax.device_put((q, k, v), both)
    compiled = jax.jit(whole, compiler_options=FAST_COMPILE)
    compiled = compiled.lower(*placed, masks, *jax.device_put((d_out, d_lse), both)).compile()
    assert set(COLLECTIVE.findall(compiled.as_text())) == {"all-reduce"}  # of the sinks' gradient
    assert_equal(compiled(*placed, masks, d_out, d_lse), unsharded(4, 4, True, None))


@pytest.mark.slow_cases("xla")
@pytest.mark.parametrize("name", BOTH)
def test_keys_that_all_devices_share(name):
    """Queries split over their positions, keys whole: gradients of the keys sum over devices."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
    spec = AttentionSpec(scale=0.3)
    q, k, v, _, d_out, _ = arrays(4, 2)

    def loss(split, q, k, v):
        def block(q, k, v):
            plan = AttentionPlan(implementation=BOTH[name], spec=spec)
            return attend(plan, *vary_alike((q, k, v, AttentionMasks())))[0]

        if split:
            by_position = P(None, "context")
            block = jax.shard_map(
                block, mesh=mesh, in_specs=(by_position, P(), P()), out_specs=by_position
            )
        return jnp.sum(block(q, k, v) * d_out)

    grad = jax.jit(
        jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0, compiler_options=FAST_COMPILE
    )
    assert_equal(grad(True, q, k, v), grad(False, q, k, v))


@pytest.mark.slow_cases("reference")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_public_function_on_explicit_axes(implementation):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    q, k, v, masks, *_ = arrays(8, 4, sinks=True)

    def loss(q, k, v, sinks):
        out = flash_attention(q, k, v, sinks=sinks, is_causal=True, implementation=implementation)
        return jnp.sum(jnp.square(out))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), compiler_options=FAST_COMPILE)
    want = grad(q, k, v, masks.sinks)
    with jax.set_mesh(mesh):
        spec = P("data", None, "tensor")
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
        got = grad(*placed, jax.device_put(masks.sinks, NamedSharding(mesh, P("tensor"))))
    assert got[0].sharding.spec[:3] == ("data", None, "tensor")
    assert_equal(got, want)


def test_split_positions_are_refused():
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    q, k, v, *_ = arrays(4, 4)
    q = jax.device_put(q, NamedSharding(mesh, P(None, "context")))
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=r"positions.*ring attention"):
        jax.jit(flash_attention)(q, k, v)
