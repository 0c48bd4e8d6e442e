"""Which mesh axes a compiled collective goes over."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.hlo.program import axes_between, collectives, first_group
from jaxinfra.parallel.mesh import make_mesh

SIZES = {"replica": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,2},{1,3}}, use_global_device_ids=true", (0, 2)),
        ("replica_groups={{0,1,2,3}}", (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,2,2]T(1,2,0)", (0, 4)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", (0, 1)),
        ("source_target_pairs={{3,0},{0,1}}", (3, 0)),
    ],
)
def test_every_way_of_writing(text, group):
    assert first_group(text) == group


def test_what_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="not understood"):
        first_group("replica_groups=surprise")


@pytest.mark.parametrize(
    "axes", [c for n in (1, 2, 3) for c in itertools.combinations(SIZES, n)], ids="-".join
)
def test_axes_of_compiled_sums(axes):
    mesh = make_mesh(MeshConfig(**SIZES))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    (found,) = collectives(jax.jit(summed).lower(jnp.ones(8)).compile())
    assert found.axes(dict(mesh.shape)) == axes
    assert found.num_devices == 2 ** len(axes)


def test_axes_between_places():
    assert axes_between((0, 5), {"pipe": 2, "fsdp": 1, "tensor": 4}) == ("pipe", "tensor")
    assert axes_between(tuple(np.arange(4)), {"pipe": 2, "fsdp": 1, "tensor": 4}) == ("tensor",)
