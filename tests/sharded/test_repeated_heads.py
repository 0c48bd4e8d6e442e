"""Fewer key/value heads than devices of the tensor axis: each device has a copy of one.

The bound is that of rounding (``tests/sharded/oracle.py``), as for every other mesh.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.run import ContextMethod, Remat
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from tests.sharded import oracle
from tests.sharded.cases import OPTIMIZER, build, drawn, gemma_like, gradients_of, packed_batch
from tests.sharded.pipeline_cases import Case, loss_and_gradients
from tests.sharded.pipeline_cases import exact as exact_of_pipeline
from tests.tolerance import assert_within_rounding


@functools.cache
def model(num_kv_heads: int) -> ModelConfig:
    """Eight query heads; biases, which are repeated with their heads, and a window."""
    base = gemma_like()
    (stack,) = base.stacks
    block = next(each for each in stack.pattern if each.mixer.window is not None)
    mixer = dataclasses.replace(block.mixer, num_kv_heads=num_kv_heads, qkv_bias=True)
    pattern = (dataclasses.replace(block, mixer=mixer),)
    return dataclasses.replace(base, stacks=(dataclasses.replace(stack, pattern=pattern),))


@functools.cache
def exact(num_kv_heads: int):
    """Loss, norm and clipped gradients in float64, and how far fp32 programs may be from them."""
    config = model(num_kv_heads)
    found = oracle.samples(
        config, drawn(config), packed_batch(rows=8), z_loss=0.0, label_smoothing=0.0
    )
    after = []
    for loss, gradients in found:
        gradients, norm = oracle.clipped(gradients, OPTIMIZER.clip_norm)
        after.append((loss, norm, jax.tree.map(lambda g: (1 - OPTIMIZER.beta1) * g, gradients)))
    return oracle.rounded(after)


def run(num_kv_heads: int, mesh: MeshConfig, **how):
    built = build(model(num_kv_heads), mesh=mesh, **how)
    state, metrics = built.step(built.state(), built.put(packed_batch(rows=8)))
    return metrics.loss, metrics.gradient_norm, jax.device_get(gradients_of(state))


ZERO_1 = {"sharding": ShardingConfig(zero=1, sequence_parallel=True), "remat": Remat.DOTS}
KEPT = {"sharding": ShardingConfig(keep_gathered=True), "remat": Remat.FULL}
RING = {"context_method": ContextMethod.RING}
GATHER = {"context_method": ContextMethod.ALL_GATHER, "accumulation": 2}
CASES = {
    "two-tensor8": (2, MeshConfig(tensor=8), {}),
    "one-tensor8": (1, MeshConfig(tensor=8), {}),
    "four-tensor8": (4, MeshConfig(tensor=8), {}),
    "one-fsdp2-tensor4-zero1": (1, MeshConfig(fsdp=2, tensor=4), ZERO_1),
    "two-fsdp2-tensor4-kept": (2, MeshConfig(fsdp=2, tensor=4), KEPT),
    "two-context2-tensor4-ring": (2, MeshConfig(context=2, tensor=4), RING),
    "one-context2-tensor4-gather": (1, MeshConfig(context=2, tensor=4), GATHER),
}
QUICK = "two-fsdp2-tensor4-kept"  # kept weights, which `test_meshes.py` then has as slow ones


@pytest.mark.slow  # by default `test_meshes.py` has a mesh with heads for each device
@pytest.mark.parametrize("case", CASES)
def test_mesh_equals_one_device(case):
    num_kv_heads, mesh, how = CASES[case]
    assert_within_rounding(run(num_kv_heads, mesh, **how), exact(num_kv_heads), what=case)


def test_heads_are_kept_as_in_a_checkpoint_and_not_as_repeated():
    built = build(model(2), mesh=MeshConfig(tensor=8))
    weight = built.placement.parameters(built.model)["blocks"][0]["attention"]["key"]["weight"]
    assert weight.is_fully_replicated


@pytest.mark.slow
def test_pipeline_equals_one_device():
    case = Case(model=model(2), mesh=MeshConfig(pipe=2, tensor=4), micro_batches=4)
    true = exact_of_pipeline(case.model, case.rows)
    assert_within_rounding(loss_and_gradients(case), true, what=str(case))


@pytest.mark.slow
def test_gradients_summed_over_some_copies_are_caught():
    """What a missing sum over copies, or a second one, would give."""
    loss, norm, gradients = jax.tree.map(lambda leaf: leaf.value, exact(2), is_leaf=_is_rounded)
    for factor in (0.25, 2.0):
        faulty = jax.tree_util.tree_map_with_path(
            lambda path, g, factor=factor: g * factor if "value" in str(path) else g, gradients
        )
        faulty = jax.tree.map(np.float32, faulty)
        with pytest.raises(AssertionError, match="are rounding"):
            assert_within_rounding((np.float32(loss), np.float32(norm), faulty), exact(2))


def _is_rounded(leaf) -> bool:
    return hasattr(leaf, "spread")


def test_heads_that_neither_divide_nor_are_divided_are_refused():
    mesh = make_mesh(MeshConfig(tensor=4), devices=jax.devices()[:4])
    odd = dataclasses.replace(model(1), stacks=_with_heads(12, 6))
    with pytest.raises(ConfigError, match=r"dim kv_heads=6 does not divide over tensor = 4"):
        Placement(mesh=mesh).parameters(define_model(odd, execution_on()))


def _with_heads(q: int, k: int):
    (stack,) = model(1).stacks
    pattern = tuple(
        dataclasses.replace(
            block, mixer=dataclasses.replace(block.mixer, num_q_heads=q, num_kv_heads=k)
        )
        for block in stack.pattern
    )
    return (dataclasses.replace(stack, pattern=pattern),)
