"""Hopper attention called directly on arrays sharded over a mesh of the GPUs there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import flash_attention
from pallas_kernels.common import device

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    if device.target().capability != (9, 0):
        pytest.skip("needs an NVIDIA Hopper GPU (compute capability 9.0)")


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda x: x.name)
def test_sharded_over_batch_and_heads(axis_type, jitted):
    """The same bits as on one device: blocks are independent, the split backward deterministic."""
    count = len(jax.devices())
    data = 2 if count % 4 == 0 else 1
    mesh = jax.make_mesh((data, count // data), ("data", "tensor"), axis_types=(axis_type,) * 2)
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (16, 8, 8)
    arrays = [
        jax.random.normal(key, (2, 300, n, 64), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]

    def loss(q, k, v):
        out = flash_attention(q, k, v, is_causal=True, implementation="hopper", backward="split")
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    grad = jax.grad(loss, argnums=(0, 1, 2))
    alone = jax.jit(grad)(*arrays)
    layout = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, layout)
        sharded = (jax.jit(grad) if jitted else grad)(*placed)
    for got, want in zip(sharded, alone, strict=True):
        if count > 1:
            assert got.sharding.spec[:3] == ("data", None, "tensor")
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_auto_on_a_mesh_compiles():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    shape = (2 * len(jax.devices()), 512, 8, 128)
    layout = NamedSharding(mesh, PartitionSpec("data"))
    q = jax.device_put(jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), layout)
    grad = jax.jit(jax.grad(lambda q: flash_attention(q, q, q, is_causal=True).mean()))
    assert grad(q).sharding.is_equivalent_to(layout, 4)
    assert bool(jnp.isfinite(grad(q)).all())
