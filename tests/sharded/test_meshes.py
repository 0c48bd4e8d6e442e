"""Every mesh computes what one device computes: loss, each gradient, each parameter after a step.

The bound is derived: against float64, a mesh's fp32 error may be at most twice the single
device's, plus two units in the last place. The single device's is the largest of eight orders of
the batch's rows: of a gradient of six elements, one order's may be small by luck.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.run import Remat
from tests.sharded import oracle
from tests.sharded.cases import (
    OPTIMIZER,
    build,
    gemma_like,
    gpt_like,
    gradients_of,
    llama_like,
    packed_batch,
)
from tests.tolerance import assert_no_worse

MESHES = {
    "replica8": MeshConfig(replica=8),
    "fsdp8": MeshConfig(fsdp=8),
    "fsdp2-tensor4": MeshConfig(fsdp=2, tensor=4),
    "replica2-fsdp2-tensor2": MeshConfig(replica=2, fsdp=2, tensor=2),
    "tensor2": MeshConfig(tensor=2),
}
CASES = {
    "tied": (llama_like, {"z_loss": 0.01, "label_smoothing": 0.1}),
    "untied": (gpt_like, {"accumulation": 4, "batch_size": 32}),
    "capped": (gemma_like, {}),
}
# Every mesh with one model; every model with one mesh of three axes and one with more tensor
# shards than the smaller dims would like.
PAIRS = [
    *(("tied", mesh) for mesh in MESHES),
    *(("untied", mesh) for mesh in ("replica8", "fsdp2-tensor4", "replica2-fsdp2-tensor2")),
    *(("capped", mesh) for mesh in ("fsdp2-tensor4", "replica2-fsdp2-tensor2")),
]


def run(case: str, mesh: MeshConfig, **how):
    """Parameters before one step, and (loss, gradient norm, gradients, parameters) after it, whole
    on the host.
    """
    return next(_runs(case, mesh, **how))


def _runs(case: str, mesh: MeshConfig, **how):
    """``run``, then again with the batch's rows turned: what is summed in another order."""
    make, options = CASES[case]
    built = build(make(), mesh=mesh, **options, **how)
    batch = packed_batch(rows=options.get("batch_size", 8))
    for turn in itertools.count():
        before = built.state()
        parameters = jax.device_get(before.parameters)
        rows = jax.tree.map(lambda leaf, turn=turn: np.roll(leaf, 3 * turn, axis=0), batch)
        state, metrics = built.step(before, built.put(rows))
        after = jax.device_get((gradients_of(state), state.parameters))
        yield parameters, (metrics.loss, metrics.gradient_norm, *after)


@functools.cache
def _single_in_orders(case: str):
    return tuple(itertools.islice(_runs(case, MeshConfig()), 8))


def single(case: str):
    """``run`` on one device."""
    return _single_in_orders(case)[0]


def assert_as_one_device(got, case: str, *, what: str) -> None:
    """The first parts of ``run``'s result; one device's error is the largest of eight orders."""
    parts = len(got)
    _, plain = single(case)
    orders = [result[:parts] for _, result in _single_in_orders(case)[1:]]
    assert_no_worse(got, plain=plain[:parts], oracle=exact(case)[:parts], what=what, orders=orders)


@functools.cache
def exact(case: str):
    make, options = CASES[case]
    parameters, _ = single(case)
    batch = packed_batch(rows=options.get("batch_size", 8))
    loss, gradients = oracle.loss_and_gradients(
        make(),
        parameters,
        batch,
        z_loss=options.get("z_loss", 0.0),
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    gradients, norm = oracle.clipped(gradients, OPTIMIZER.clip_norm)
    assert norm > OPTIMIZER.clip_norm, "clipping is part of what is compared"

    def updated(path, theta, gradient):
        decay = not {"scale", "bias"} & {getattr(key, "key", None) for key in path}
        rate = OPTIMIZER.learning_rate / OPTIMIZER.warmup_steps
        return oracle.adamw(OPTIMIZER, theta, [gradient], [rate], decay=decay)

    after = jax.tree_util.tree_map_with_path(updated, parameters, gradients)
    first_moment = jax.tree.map(lambda g: (1 - OPTIMIZER.beta1) * g, gradients)
    return loss, norm, first_moment, after


@pytest.mark.parametrize("case", CASES)
def test_one_device_equals_the_oracle(case):
    """Guards the next test: its bound is worthless if the single device itself is wrong."""
    _, result = single(case)
    epsilon = np.finfo(np.float32).eps
    for got, true in zip(jax.tree.leaves(result), jax.tree.leaves(exact(case)), strict=True):
        # fp32 rounding, through some tens of dependent operations of sums over up to 512 terms.
        assert np.max(np.abs(got - true)) <= 100 * epsilon * max(np.max(np.abs(true)), 1e-3)


@pytest.mark.parametrize(("case", "mesh"), PAIRS)
def test_mesh_equals_one_device(case, mesh):
    start, _ = single(case)
    mesh_start, result = run(case, MESHES[mesh])
    chex.assert_trees_all_equal(mesh_start, start)
    assert_as_one_device(result, case, what=f"{case} on {mesh}")


@pytest.mark.parametrize(
    ("case", "mesh"),
    [("tied", "fsdp2-tensor4"), pytest.param("untied", "fsdp8", marks=pytest.mark.slow)],
)
def test_kept_weights_change_nothing(case, mesh):
    how = {"sharding": ShardingConfig(keep_gathered=True), "remat": Remat.DOTS}
    _, result = run(case, MESHES[mesh], **how)
    assert_as_one_device(result, case, what=f"{case} on {mesh} with kept weights")


def test_dropout_mask_is_the_same_on_a_mesh():
    """A mask that differed in one element would move gradients by parts in a thousand; rounding
    moves them by what the oracle shows: one device's error, twice that for the mesh.
    """
    config = dataclasses.replace(llama_like(), dropout_rate=0.25)
    results = []
    for shape in (MeshConfig(), MESHES["replica2-fsdp2-tensor2"]):
        built = build(config, mesh=shape, accumulation=2, batch_size=16)
        state, metrics = built.step(built.state(), packed_batch(rows=16))
        results.append(jax.device_get((metrics.loss, gradients_of(state))))
    _, (plain_loss, _, plain, _) = single("tied")
    loss, _, true, _ = exact("tied")
    assert abs(results[0][0] - plain_loss) > 1e-3, "dropout was off"

    epsilon = np.finfo(np.float32).eps
    for alone, sharded, fp32, fp64 in zip(
        *map(jax.tree.leaves, (*results, (plain_loss, plain), (loss, true))), strict=True
    ):
        relative = np.max(np.abs(fp32 - fp64)) / np.max(np.abs(fp64)) + 2 * epsilon
        assert np.max(np.abs(sharded - alone)) <= 3 * relative * np.max(np.abs(alone))
