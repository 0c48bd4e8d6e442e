"""Hopper attention called directly on arrays sharded over a mesh of the GPUs there are."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import flash_attention
from tests.kernels import attention_oracle
from tests.tolerance import assert_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

P = PartitionSpec
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
B, T, N, H = 4, 300, 16, 64


def mesh_of(axis_type):
    count = len(jax.devices())
    data = 2 if count % 4 == 0 else 1
    return jax.make_mesh((data, count // data), ("data", "tensor"), axis_types=(axis_type,) * 2)


def arrays(K):
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (B, T, heads, H), jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K, N), strict=True)
    ]


def segment_ids():
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (B, T)), axis=1), jnp.int32)


def gradients(q, k, v, d_out, ids=None, *, split=None, **options):
    """dq, dk, dv; ``split`` is put around the attention."""

    def attention(q, k, v, *ids):
        ids = {"q_segment_ids": ids[0], "kv_segment_ids": ids[0]} if ids else {}
        return flash_attention(q, k, v, is_causal=True, **ids, **options)

    split = split or (lambda f: f)
    arguments = (q, k, v) if ids is None else (q, k, v, ids)
    return jax.vjp(split(attention), *arguments)[1](d_out)[:3]


@functools.cache
def expected(K, packed):
    """The oracle's gradients."""
    args = [*arrays(K), *([segment_ids()] if packed else [])]
    seen = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))
    if packed:
        ids = np.asarray(args.pop())
        seen = seen & (ids[:, :, None] == ids[:, None, :])
    *qkv, d_out = (np.asarray(x, np.float64) for x in args)
    oracle = attention_oracle.attention(
        *qkv, d_out, np.zeros((B, T, N)), seen, scale=H**-0.5, kept=jnp.bfloat16
    )
    return [oracle[name] for name in ("dq", "dk", "dv")]


def assert_right(got, K, packed):
    whole = [jnp.asarray(np.asarray(x)) for x in got]
    assert_within_rounding(whole, expected(K, packed), what="dq, dk, dv")


WAYS = [  # each way with either kind of axis; both kinds of each are near copies, and take minutes
    pytest.param(axis_type, how, id=f"{axis_type.name}-{how}", marks=marks)
    for axis_type, how, marks in (
        (AxisType.Auto, "jit", ()),
        (AxisType.Explicit, "jit", ()),
        (AxisType.Explicit, "eager", ()),
        (AxisType.Auto, "shard_map", ()),
        (AxisType.Auto, "eager", pytest.mark.slow),
        (AxisType.Explicit, "shard_map", pytest.mark.slow),
    )
]


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
@pytest.mark.parametrize(("axis_type", "how"), WAYS)
def test_sharded_over_batch_and_heads(axis_type, how, packed):
    """The gradients of one device, and nothing moves."""
    mesh, layout = mesh_of(axis_type), P("data", None, "tensor")
    args, layouts = arrays(8), [layout] * 4
    if packed:
        args, layouts = [*args, segment_ids()], [*layouts, P("data")]
    function = functools.partial(gradients, implementation="hopper")
    if how == "shard_map":
        inside = (layout,) * 3 + (P("data"),) * packed
        whole = functools.partial(jax.shard_map, mesh=mesh, in_specs=inside, out_specs=layout)
        function = functools.partial(function, split=whole)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, layouts, strict=True)
        ]
        if how != "eager":
            function = jax.jit(function).lower(*placed).compile()
            assert not COLLECTIVE.findall(function.as_text())
        sharded = function(*placed)
    if len(jax.devices()) > 1:
        assert all(x.sharding.spec[:3] == ("data", None, "tensor") for x in sharded)
    assert_right(sharded, 8, packed)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
def test_queries_of_one_key_head_on_several_devices(axis_type):
    """dk and dv are summed over the devices, and that is all that moves."""
    mesh, args = mesh_of(axis_type), arrays(1)
    q_layout, kv_layout = P("data", None, "tensor"), P("data")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, (q_layout, kv_layout, kv_layout, q_layout), strict=True)
        ]
        function = jax.jit(functools.partial(gradients, implementation="hopper"))
        function = function.lower(*placed).compile()
        moved = {"all-reduce"} if mesh.shape["tensor"] > 1 else set()
        assert set(COLLECTIVE.findall(function.as_text())) == moved
        assert_right(function(*placed), 1, False)


def test_auto_on_a_mesh_compiles():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    shape = (2 * len(jax.devices()), 512, 8, 128)
    layout = NamedSharding(mesh, PartitionSpec("data"))
    q = jax.device_put(jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), layout)
    grad = jax.jit(jax.grad(lambda q: flash_attention(q, q, q, is_causal=True).mean()))
    assert grad(q).sharding.is_equivalent_to(layout, 4)
    assert bool(jnp.isfinite(grad(q)).all())
