"""Experts in 8 bits on meshes: what a device multiplies is quantized there, to the same numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.model.execution import within_device
from jaxinfra.ops.experts import ExpertWeights
from jaxinfra.parallel.execution import kernels_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from tests.sharded.cases import COMPILER_OPTIONS
from tests.unit.test_fp8_experts import RECIPE

pytestmark = pytest.mark.slow  # each mesh takes two seconds to compile

B, T, D, E, F = 8, 16, 128, 8, 256
CONFIG = ExpertsConfig(num_experts=E, top_k=2, hidden_dim=F)
MESHES = [{"fsdp": 4, "expert": 2}, {"fsdp": 2, "tensor": 2}, {"replica": 2}]


@functools.cache
def arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    experts = ExpertWeights(
        gate_EDF=normal(E, D, F) / 8, up_EDF=normal(E, D, F) / 8, down_EFD=normal(E, F, D) / 8
    )
    x, d = (normal(B, T, D).astype(jnp.bfloat16) for _ in range(2))
    return x, jnp.asarray(rng.integers(0, E, (B, T, 2)), jnp.int32), normal(B, T, 2), experts, d


def computed(port):
    """The layer's result, and gradients of x and of the weights."""

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    def run(x, expert, weight, experts, d):
        f = functools.partial(port, config=CONFIG, recipe=RECIPE)
        y, pull = jax.vjp(lambda x, experts: f(x, expert, weight, experts)[0], x, experts)
        return y, *pull(d)

    return [np.asarray(each, np.float64) for each in jax.tree.leaves(run(*arrays()))]


@functools.cache
def alone():
    return computed(within_device)


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(sizes))
def test_a_mesh_computes_what_one_device_does(sizes):
    """Copies of a token travel, and are summed over devices, in bf16: a few roundings of 2**-9."""
    mesh = MeshConfig(**sizes)
    count = math.prod(size for axis, size in sizes.items() if axis != "expert")
    placement = Placement(
        mesh=make_mesh(mesh, devices=jax.devices()[:count]),
        rules=state_rules(ShardingConfig(), mesh),
    )
    y, dx, *dws = computed(kernels_on(placement).exchange)
    want_y, want_dx, *want_dws = alone()
    for got, want in ((y, want_y), (dx, want_dx)):
        assert np.linalg.norm(got - want) <= 2.0**-7 * np.linalg.norm(want)
    for got, want in zip(dws, want_dws, strict=True):  # sums of the same products in fp32
        assert np.linalg.norm(got - want) <= 2.0**-20 * np.linalg.norm(want)
