"""Gathers and sums by DMA engines on two GPUs: always complete before they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.parallel.copies import copying_axis, gather_by_copies, scatter_sum_by_copies
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.training.xla_options import PEER_COPIES

pytestmark = pytest.mark.gpu


def test_two_gpus_read_what_was_sent():
    """Thirty steps, each of which overwrites what the one before sent, beside matmuls; whole
    numbers up to 2**24, whose sums are exact.
    """
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    mesh = make_mesh(MeshConfig(fsdp=2), devices=jax.devices()[:2])
    placement = Placement(mesh=mesh)
    axis = copying_axis(placement)
    assert axis == "fsdp"

    def local(x, factor):
        whole = gather_by_copies(x, axis, dim=0)
        total = scatter_sum_by_copies(whole * factor[0], axis, dim=1)
        return whole @ whole.T, whole, total

    one = PartitionSpec(axis)
    run = jax.jit(
        placement.on_each_device(
            local,
            in_specs=(one, one),
            out_specs=(one, one, PartitionSpec(None, axis)),
            check_vma=False,
        ),
        compiler_options=PEER_COPIES,
    )
    draw = np.random.default_rng(0)
    for _ in range(30):
        x = draw.integers(-999, 999, (2048, 2048)).astype(np.float32)
        factor = draw.integers(1, 99, 2).astype(np.float32)
        _, whole, total = run(x, jnp.asarray(factor))
        assert np.array_equal(whole, np.concatenate([x, x]))
        assert np.array_equal(total, x * factor.sum())
