"""What lies where: parameters' bytes a device, shardings across a step, drawing on a mesh."""

import dataclasses
import math

import chex
import jax
import pytest
from jax.sharding import PartitionSpec

from jaxinfra import axes
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import StateRules, make_mesh
from jaxinfra.parallel.place import Placement, path_name
from tests.sharded.cases import COMPILER_OPTIONS, build, gpt_like, llama_like, packed_batch

MESHES = {
    "replica8": MeshConfig(replica=8),
    "fsdp8": MeshConfig(fsdp=8),
    "fsdp2-tensor4": MeshConfig(fsdp=2, tensor=4),
    "replica2-fsdp2-tensor2": MeshConfig(replica=2, fsdp=2, tensor=2),
}


def shards_of(name: str, mesh: MeshConfig) -> int:
    """Devices that share one copy of a parameter, as the rules promise it.

    fsdp shards the model width, which every parameter has but the heads' and the mlp's inward
    biases; tensor shards heads, mlp width and vocabulary, which norms, learned positions and
    outward biases lack.
    """
    whole_over_fsdp = ("query/bias", "key/bias", "value/bias", "up/bias", "gate/bias")
    whole_over_tensor = ("norm/scale", "norm/bias", "out/bias", "down/bias", "positions/table")
    fsdp = 1 if name.endswith(whole_over_fsdp) else mesh.fsdp
    return fsdp * (1 if name.endswith(whole_over_tensor) else mesh.tensor)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [llama_like, gpt_like])
def test_bytes_a_device_are_what_the_rules_promise(make, mesh):
    built = build(make(), mesh=MESHES[mesh])
    state = built.state()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.parameters)[0]:
        expected = leaf.nbytes / shards_of(path_name(path), MESHES[mesh])
        assert [shard.data.nbytes for shard in leaf.addressable_shards] == [expected] * 8
    parameters = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves(state.parameters))
    whole = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves(state))
    # Two moments lie as their parameters do; the rest is counters and a key.
    assert whole - 3 * parameters == sum(leaf.nbytes for leaf in leaves(state) if leaf.size <= 2)


def leaves(tree):
    return jax.tree.leaves(tree)


@pytest.mark.slow  # a program more; `test_meshes.py` runs steps one after another
def test_a_step_leaves_shardings_and_types_unchanged():
    built = build(llama_like(), mesh=MESHES["replica2-fsdp2-tensor2"])
    before = built.state()
    placed = jax.tree.map(lambda leaf: (leaf.sharding, leaf.shape, leaf.dtype), before)
    # Decided by the partitioner itself: without out_shardings nothing forces the result back.
    free = jax.jit(built.step.__wrapped__, compiler_options=COMPILER_OPTIONS)
    after, _ = free(before, jax.device_put(packed_batch(), built.placement.batch))

    def same(leaf, was):
        sharding, shape, dtype = was
        assert (leaf.shape, leaf.dtype) == (shape, dtype)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.sharding, sharding)

    jax.tree.map(same, after, placed, is_leaf=lambda node: isinstance(node, jax.Array))


@pytest.mark.slow
def test_a_mesh_draws_the_values_one_device_draws():
    on_mesh, alone = (
        build(llama_like(), mesh=mesh) for mesh in (MESHES["replica2-fsdp2-tensor2"], MeshConfig())
    )
    states = [
        jax.jit(
            built.initialize, out_shardings=built.shardings, compiler_options=COMPILER_OPTIONS
        )()
        for built in (on_mesh, alone)
    ]
    chex.assert_trees_all_equal(*states)


def test_specs():
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2))
    placement = Placement(mesh=mesh)
    data = ("replica", "fsdp")
    assert placement.spec((axes.BATCH, axes.SEQUENCE)) == PartitionSpec(data, None)
    assert placement.spec((axes.EMBED, axes.MLP)) == PartitionSpec("fsdp", "tensor")
    assert placement.spec((None, axes.HEAD)) == PartitionSpec(None, None)
    rules = {"a": ("fsdp",), "b": ("tensor", "fsdp")}
    same = StateRules(parameters=rules, used=rules, gradients=rules, optimizer=rules)
    twice = Placement(mesh=mesh, rules=same)
    with pytest.raises(ConfigError, match=r"twice over \['fsdp'\]"):
        twice.spec(("a", "b"))


def test_a_dim_that_does_not_divide_is_refused():
    placement = Placement(mesh=make_mesh(MeshConfig(tensor=8)))
    model = define_model(dataclasses.replace(llama_like(), vocab_size=60), execution_on())
    with pytest.raises(ConfigError, match=r"vocab=60 does not divide over tensor = 8 devices"):
        placement.parameters(model)


def test_mesh_of_the_wrong_size_is_refused():
    with pytest.raises(ConfigError, match=r"fsdp=4 x tensor=4 needs 16 devices, 8 are here"):
        make_mesh(MeshConfig(fsdp=4, tensor=4))
    assert math.prod(make_mesh(MeshConfig()).devices.shape) == 1
