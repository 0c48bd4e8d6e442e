"""Layers without a loop compute what ``jax.lax.scan`` does."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.precision import PolicyName, PrecisionConfig, WeightGradients
from jaxinfra.model.layer_loop import one_by_one, opened, take_apart, take_in_place
from tests.sharded.cases import build, gradients_of, packed_batch
from tests.sharded.test_experts import MODEL

COUNT, WIDTH = 3, 4
EPSILON = 2.0**-8  # of bf16


def step(carry, layer):
    weights, key, _ = layer
    after = jnp.tanh(carry @ weights["w"] + weights["b"][None])
    return after + jax.random.normal(key, carry.shape), {"sum": jnp.sum(after)}


def test_values_and_gradients_of_a_scan():
    keys = jax.random.split(jax.random.key(0), COUNT)
    weights = {
        "w": jax.random.normal(keys[0], (COUNT, WIDTH, WIDTH)),
        "b": jax.random.normal(keys[1], (COUNT, WIDTH)),
    }
    x = jax.random.normal(keys[2], (2, WIDTH))

    def objective(run, weights, x):
        after, results = run(step, x, (weights, keys, None))
        return jnp.sum(after * x) + jnp.sum(results["sum"] ** 2), (after, results)

    def results(run):
        pulled = jax.value_and_grad(objective, argnums=(1, 2), has_aux=True)
        return jax.jit(pulled, static_argnums=0)(run, weights, x)

    def loop(*args):
        return jax.lax.scan(*args)

    def alone(step, *args, take=take_in_place, in_order=False):
        return one_by_one([opened(step)] * COUNT, *args, take=take, in_order=in_order)[:2]

    want = results(loop)
    for take, in_order in ((take_in_place, False), (take_apart, True)):
        one = functools.partial(alone, take=take, in_order=in_order)
        chex.assert_trees_all_close(results(one), want, rtol=1e-6)


def test_gradients_are_waited_for_in_order():
    """Those of what is behind the layers, and of a layer that later layers' backward passes left
    behind; a vector's are not, nor those of what is frozen or not used.
    """
    stack = {"w": jnp.ones((COUNT, WIDTH, WIDTH)), "b": jnp.ones((COUNT, WIDTH))}
    frozen = jnp.ones((COUNT, WIDTH, 3))
    x, table = jnp.ones((2, WIDTH)), jnp.ones((5, WIDTH))

    def tanh(x, layer):
        weights, kept = layer
        after = jnp.tanh(x @ weights["w"] + weights["b"][None])
        return after + (after @ kept) @ kept.T, None

    def objective(stack, table, x, in_order):
        steps = [opened(tanh)] * COUNT
        after, _, (read, _) = one_by_one(
            steps,
            x,
            (stack, frozen),
            take=take_apart,
            in_order=in_order,
            behind=(table, 2.0 * table[:2]),
        )
        return jnp.sum((after @ read.T) ** 2)

    pulled = jax.grad(objective, argnums=(0, 1, 2))
    learned = stack, table, x
    chex.assert_trees_all_close(pulled(*learned, True), pulled(*learned, False), rtol=1e-6)
    waited_for = [
        sorted(each.aval.shape for each in equation.invars)
        for equation in jax.make_jaxpr(pulled, static_argnums=3)(*learned, True).eqns
        if equation.primitive.name == "optimization_barrier"
    ]
    assert waited_for == [[x.shape, table.shape], [x.shape, (WIDTH, WIDTH)]]


def test_recomputation_holds_no_copy_of_a_layer():
    """Cut out of the stack before it, layers are held in fp32 from one pass to the other."""
    count, width = 4, 256
    stack = jnp.ones((count, width, width))

    def tanh(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32)), None

    def scanned(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(tanh), x, w, unroll=count)[0])

    def read_late(w, x):
        steps = [jax.checkpoint(opened(tanh))] * count
        return jnp.sum(one_by_one(steps, x, w, take=take_apart)[0])

    def temporaries(objective):
        compiled = jax.jit(jax.grad(objective)).lower(stack, jnp.ones((2, width))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(read_late) < temporaries(scanned) - stack.nbytes / 4


ROUNDED = PrecisionConfig(policy=PolicyName.BF16, weight_gradients=WeightGradients.COMPUTE)


def built(*, unroll: int):
    return build(MODEL, precision=ROUNDED, unroll=unroll, accumulation=2)


def learned(*, unroll: int):
    step = built(unroll=unroll)
    state, metrics = step.step(step.state(), packed_batch())
    return jax.device_get((metrics.loss, gradients_of(state)))


@pytest.mark.slow
def test_weights_of_experts_are_rounded_before_the_layers():
    """In a loop each layer rounds its own: the same numbers, up to how bf16 sums are fused."""
    loss, got = learned(unroll=2)
    loop_loss, loop = learned(unroll=1)
    np.testing.assert_allclose(loss, loop_loss, rtol=EPSILON)
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(loop), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert mine.dtype == np.float32, name
        difference = np.linalg.norm(mine - theirs)
        assert difference <= 4 * EPSILON * np.linalg.norm(theirs), name


def test_only_experts_are_read_as_rounded():
    read = jax.eval_shape(built(unroll=2).model.as_read, built(unroll=2).model.shapes)
    mlp = read["blocks"][0]["mlp"]
    rounded = {name for name in mlp if getattr(mlp[name], "dtype", None) == jnp.bfloat16}
    assert rounded == {"gate", "up", "down"}
    assert mlp["router"]["weight"].dtype == jnp.float32
