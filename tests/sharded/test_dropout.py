"""One key gives one dropout mask, on whatever mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.layers.dropout import dropout
from jaxinfra.parallel.mesh import make_mesh

MESH = MeshConfig(replica=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(("replica", "fsdp")),
        PartitionSpec(None, "tensor", "fsdp"),
        PartitionSpec("tensor", "replica", "fsdp"),
    ],
    ids=str,
)
def test_mask_does_not_depend_on_the_sharding(spec):
    x = np.ones((8, 4, 6), np.float32)
    key = jax.random.key(3)
    alone = jax.jit(lambda x: dropout(x, rate=0.5, key=key))(x)
    sharding = NamedSharding(make_mesh(MESH), spec)
    on_mesh = jax.jit(
        lambda x: dropout(x, rate=0.5, key=key), in_shardings=sharding, out_shardings=sharding
    )(x)
    np.testing.assert_array_equal(alone, on_mesh)
    assert 0 < np.count_nonzero(alone) < alone.size
