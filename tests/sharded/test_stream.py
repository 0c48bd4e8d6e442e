"""Projections that gather and scatter the stream themselves: values, and the collectives sent."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.axes import EMBED, HEAD, KV_HEADS, Q_HEADS
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.precision import Fp8Matmuls, Numerics, PolicyName, PrecisionConfig
from jaxinfra.config.run import Remat
from jaxinfra.numerics.policy import POLICIES, policy_of
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.multiply import StreamFactor
from jaxinfra.parallel import execution
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.stream import StreamProducts, stream_products
from pallas_kernels.common import device
from tests.sharded.test_meshes import assert_as_one_device, run

SPLIT = ShardingConfig(sequence_parallel=True)
KEPT = ShardingConfig(sequence_parallel=True, keep_gathered=True)


@pytest.fixture
def traced(monkeypatch):
    """Products of the stream, which a CPU has only on request, and a list of those traced."""
    seen = []

    class Products(StreamProducts):
        def gather(self, x_BTD, products, *, recipe):
            seen.append(tuple(each.spec for each in products))
            return super().gather(x_BTD, products, recipe=recipe)

        def scatter(self, x, product, *, recipe):
            seen.append(product.spec)
            return super().scatter(x, product, recipe=recipe)

    def products(placement):
        return Products(placement=placement, implementation="xla")

    monkeypatch.setattr(execution, "stream_products", products)
    return seen


def test_products_and_gradients_are_those_of_whole_arrays():
    """Small whole numbers, whose sums are exact in any order."""
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), devices=jax.devices()[:4])
    place = Placement(mesh=mesh, rules=state_rules(SPLIT))
    stream = StreamProducts(placement=place, implementation="xla")
    recipe = POLICIES[PolicyName.FP32].recipe(Site.PROJECTION)
    rng = np.random.default_rng(2)
    x, *weights, back = (
        jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
        for shape in ((4, 6, 8), (8, 4, 3), (8, 2, 3), (4, 3, 8))
    )
    inward, outward = "BTD,DNH->BTNH", "BTNH,NHD->BTD"
    dims = (EMBED, Q_HEADS, HEAD), (EMBED, KV_HEADS, HEAD)
    assert all(stream.gathers(inward, each) for each in dims)
    assert stream.scatters(outward, dims[0][1:] + dims[0][:1])

    def shared(x, weights, back):
        factors = [StreamFactor(inward, w, w, d) for w, d in zip(weights, dims, strict=True)]
        queries, keys = stream.gather(x, factors, recipe=recipe)
        heads = queries + jnp.repeat(keys, 2, axis=2)
        factor = StreamFactor(outward, back, back, dims[0][1:] + dims[0][:1])
        return stream.scatter(heads, factor, recipe=recipe)

    def plain(x, weights, back):
        queries, keys = (jnp.einsum(inward, x, w) for w in weights)
        return jnp.einsum(outward, queries + jnp.repeat(keys, 2, axis=2), back)

    got, want = (
        jax.jit(lambda *a, f=f: _with_gradients(f, *a))(x, weights, back) for f in (shared, plain)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def _with_gradients(f, *operands):
    y, pull = jax.vjp(f, *operands)
    return y, pull(jnp.sign(y))


@pytest.mark.slow
def test_a_step_whose_projections_gather_the_stream_equals_one_device(traced):
    how = {"sharding": KEPT, "remat": Remat.DOTS}
    _, result = run("tied", MeshConfig(fsdp=4, tensor=2), **how)
    assert_as_one_device(result, "tied", what="products of the stream")
    assert ("BTD,DF->BTF", "BTD,DF->BTF") in traced, "gate and up"
    assert ("BTD,DNH->BTNH",) * 3 in traced
    assert {"BTNH,NHD->BTD", "BTF,FD->BTD"} <= set(traced)


@pytest.mark.slow
def test_products_are_apart_where_the_kernels_cannot_address_the_devices(traced):
    how = {"sharding": ShardingConfig(zero=2, sequence_parallel=True)}
    _, result = run("untied", MeshConfig(replica=2, fsdp=2, tensor=2), **how)
    assert_as_one_device(result, "untied", what="inside another shard_map")
    assert not traced


def test_only_meshes_that_were_measured_have_them():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    for sharding in (SPLIT, ShardingConfig()):
        assert stream_products(Placement(mesh=mesh, rules=state_rules(sharding))) is None
    assert stream_products(None) is None


def test_only_meshes_of_two_hopper_gpus_have_them(monkeypatch):
    def products(**axes):
        mesh = make_mesh(MeshConfig(**axes), devices=jax.devices()[: math.prod(axes.values())])
        return stream_products(Placement(mesh=mesh, rules=state_rules(SPLIT)))

    with device.compiling_for(device.H200):
        assert products(tensor=2) is not None
        assert products(fsdp=2, tensor=2) is None
        assert products(tensor=4) is None
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert products(tensor=2) is None, "kernels cannot write to another process's memory"


@pytest.mark.parametrize("precision", [{"fp8": Fp8Matmuls()}, {"numerics": Numerics.EXACT}])
def test_products_in_eight_bits_or_in_one_order_are_apart(precision):
    mesh = make_mesh(MeshConfig(tensor=2), devices=jax.devices()[:2])
    place = Placement(mesh=mesh, rules=state_rules(SPLIT))
    plain = PrecisionConfig(policy=PolicyName.BF16)
    with device.compiling_for(device.H200):
        for config in (plain, dataclasses.replace(plain, **precision)):
            products = execution.execution_on(place, policy=policy_of(config)).multiply.stream
            assert (products is None) == (config != plain)
