"""Muon on a mesh: its state lies as the parameters do, its updates and losses are one device's."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.optimizer import MuonConfig
from jaxinfra.config.run import CheckpointConfig
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement, path_name
from jaxinfra.training.optim.optimizer import make_optimizer
from tests.sharded.cases import (
    COMPILER_OPTIONS,
    OPTIMIZER,
    STEPS,
    build,
    gpt_like,
    llama_like,
    packed_batch,
)

MUON = dataclasses.replace(OPTIMIZER, muon=MuonConfig(), epsilon=1e-8, learning_rate=0.03)
_MODEL = define_model(gpt_like(), execution_on())
_OPTIMIZER = make_optimizer(MUON, dims=_MODEL.dims, steps=STEPS)
MESHES = {
    "fsdp8": (MeshConfig(fsdp=8), ShardingConfig()),
    "fsdp8-zero1": (MeshConfig(fsdp=8), ShardingConfig(zero=1)),
    "fsdp2-tensor4": (MeshConfig(fsdp=2, tensor=4), ShardingConfig()),
    "pipe2-fsdp2-tensor2": (MeshConfig(pipe=2, fsdp=2, tensor=2), ShardingConfig()),
    "replica2-tensor4-sequence": (
        MeshConfig(replica=2, tensor=4),
        ShardingConfig(sequence_parallel=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp8-zero1",
        "pipe2-fsdp2-tensor2",
        "fsdp8",
        "fsdp2-tensor4",
        "replica2-tensor4-sequence",
    ],
)
def test_updates_are_one_device_s(mesh):
    """In float64: the same sums in another order, which five Newton-Schulz steps (525, see
    ``test_optimizer_is_muon``) over at most 40 terms multiply; three steps of momentum.
    """
    shape, sharding = MESHES[mesh]
    placement = Placement(mesh=make_mesh(shape), rules=state_rules(sharding))
    shares = placement.updates(_MODEL)
    states = placement.optimizer(_OPTIMIZER, _MODEL)
    got, state = updates(in_shardings=(shares, states, shares), out_shardings=(shares, states))
    bound = 3 * 525 * 10 * 40 * float(np.finfo(np.float64).eps)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(alone()), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)
    _assert_moments_lie_as(state, shares)


def updates(**how):
    """The third step's, and the state after it."""
    rng = np.random.default_rng(0)
    parameters, *gradients = (
        jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), _MODEL.shapes) for _ in range(4)
    )
    with jax.enable_x64(True):
        step = jax.jit(_OPTIMIZER.update, compiler_options=COMPILER_OPTIONS, **how)
        state = _OPTIMIZER.init(parameters)
        for gradient in gradients:
            update, state = step(gradient, state, parameters)
    return jax.device_get(update), state


@functools.cache
def alone():
    return updates()[0]


def _assert_moments_lie_as(state, shares) -> None:
    by_name = {
        path_name(path): sharding for path, sharding in jax.tree_util.tree_leaves_with_path(shares)
    }
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = next((name for name in by_name if path_name(path).endswith("/" + name)), None)
        if name is None:
            assert leaf.size <= 3, "counters and the coefficients of the steps"
            continue
        seen.add(name)
        assert leaf.sharding.is_equivalent_to(by_name[name], leaf.ndim), name
    assert seen == set(by_name)


def losses(shape: MeshConfig, sharding: ShardingConfig, *, turn: int = 0) -> np.ndarray:
    """Of three steps on one batch, its rows turned."""
    built = _built(shape, sharding)
    rows = jax.tree.map(lambda leaf: np.roll(leaf, 3 * turn, axis=0), packed_batch(rows=8))
    state, found = built.state(), []
    for _ in range(3):
        state, metrics = built.step(state, built.put(rows))
        found.append(float(metrics.loss))
    return np.array(found)


@functools.cache
def _built(shape: MeshConfig, sharding: ShardingConfig):
    return build(llama_like(), mesh=shape, sharding=sharding, optimizer_config=MUON)


@functools.cache
def one_device() -> np.ndarray:
    """Losses in eight orders of the batch's rows: [order, step]."""
    turns = range(8)
    return np.stack([losses(MeshConfig(), ShardingConfig(), turn=turn) for turn in turns])


@pytest.mark.slow_cases("fsdp2-tensor4")
@pytest.mark.parametrize(
    "mesh", ["fsdp2-tensor4", pytest.param("fsdp8-zero1", marks=pytest.mark.slow)]
)
def test_losses_are_one_device_s(mesh):
    """As near as one device comes to itself with its sums in another order, twice."""
    orders = one_device()
    assert orders[0, 2] < orders[0, 0] - 0.05, "nothing was learnt that could differ"
    spread = max(np.abs(a - b).max() for a, b in itertools.combinations(orders, 2))
    got = losses(*MESHES[mesh])
    bound = 2 * spread + 2 * np.finfo(np.float32).eps * orders.max()
    assert np.abs(got - orders[0]).max() <= bound


@pytest.mark.slow
def test_a_saved_state_is_restored_on_other_meshes(tmp_path):
    """Its moments are fewer than its parameters: what has none is no part of the checkpoint."""
    built, other = _built(*MESHES["fsdp2-tensor4"]), _built(MeshConfig(), ShardingConfig())
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: (
            rng.normal(size=leaf.shape).astype(leaf.dtype) if leaf.dtype == np.float32 else leaf
        ),
        jax.device_get(built.state()),
    )
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(), identity={}) as checkpointer:
        checkpointer.save(1, jax.device_put(state, built.shardings), data_state={})
        apart, alone = (
            checkpointer.restore(
                jax.tree.map(
                    lambda leaf, place: jax.ShapeDtypeStruct(
                        leaf.shape, leaf.dtype, sharding=place
                    ),
                    built.shapes,
                    shardings,
                )
            ).state
            for shardings in (built.shardings, other.shardings)
        )
    for restored in (apart, alone):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), state)
