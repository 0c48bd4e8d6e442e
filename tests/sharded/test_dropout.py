"""One key gives one dropout mask, on whatever mesh."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.model.dropout import dropout
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import to_zigzag

X = np.ones((8, 8, 6), np.float32)


@functools.cache
def alone() -> np.ndarray:
    kept = jax.jit(
        lambda x: dropout(x, rate=0.5, key=jax.random.key(3), place=execution_on().place)
    )(X)
    assert 0 < np.count_nonzero(kept) < kept.size
    return np.asarray(kept)


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        (MeshConfig(replica=2, fsdp=2, tensor=2), PartitionSpec(("replica", "fsdp"))),
        pytest.param(
            MeshConfig(replica=2, fsdp=2, tensor=2),
            PartitionSpec(None, "tensor", "fsdp"),
            marks=pytest.mark.slow,
        ),
        (MeshConfig(context=4, tensor=2), PartitionSpec(None, ("context", "tensor"))),
        pytest.param(
            MeshConfig(fsdp=2, context=2, tensor=2),
            PartitionSpec("fsdp", "context"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_mask_does_not_depend_on_the_mesh(mesh, spec):
    placement = Placement(mesh=make_mesh(mesh))
    sharding = NamedSharding(placement.mesh, spec)

    def drop(x):
        return dropout(x, rate=0.5, key=jax.random.key(3), place=placement.constraint())

    on_mesh = jax.jit(drop, in_shardings=sharding, out_shardings=sharding)(X)
    expected = alone() if mesh.context == 1 else to_zigzag(alone(), mesh.context)
    np.testing.assert_array_equal(on_mesh, expected)


def test_rows_apart_draw_as_within_the_batch():
    placement = Placement(mesh=make_mesh(MeshConfig(replica=8)))
    rows = PartitionSpec("replica")

    def drop(x):
        return dropout(x, rate=0.5, key=jax.random.key(3), place=placement.constraint())

    apart = jax.shard_map(
        drop, mesh=placement.mesh, in_specs=rows, out_specs=rows, axis_names={"replica"}
    )
    np.testing.assert_array_equal(jax.jit(apart)(X), alone())
