"""A layer of experts on a Hopper GPU: in bf16 by the kernels, beside fp32 by plain products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.experts import Experts
from jaxinfra.model.passes import Pass
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.parallel.execution import execution_on

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

B, T, D = 2, 1536, 256
CONFIG = ExpertsConfig(num_experts=16, top_k=4, hidden_dim=192, shared_hidden_dim=128)
# From x to an output, or from a cotangent to a gradient, no more than so many tensors are rounded
# to bf16 on the way, each with a relative error of at most 2**-9.
BOUND = np.sqrt(10) * 2.0**-9


def run(policy: PolicyName):
    execution = execution_on(policy=dataclasses.replace(POLICIES[policy], param=jnp.float32))
    layer = Experts(
        CONFIG, model_dim=D, std=0.1, out_std=0.1, execution=execution, rngs=nnx.Rngs(params=0)
    )
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), state)
    x_BTD, d_BTD = jax.random.normal(jax.random.key(1), (2, B, T, D), jnp.bfloat16)
    given = Pass(positions_BT=jnp.zeros((B, T), jnp.int32), segment_ids_BT=None)

    def objective(state, x_BTD):
        out = nnx.merge(graphdef, state)(x_BTD.astype(execution.policy.compute), given)
        return jnp.sum(out.x.astype(jnp.float32) * d_BTD.astype(jnp.float32)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(
        state, x_BTD.astype(jnp.float32)
    )
    return out, jax.device_get((out.x, gradients))


def test_a_layer_is_the_same_in_both():
    out, got = run(PolicyName.BF16)
    oracle_out, oracle = run(PolicyName.FP32)
    np.testing.assert_array_equal(
        out.sums.added["expert_tokens"], oracle_out.sums.added["expert_tokens"]
    )
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, mine), true in zip(leaves, jax.tree.leaves(oracle), strict=True):
        mine, true = (np.asarray(each, np.float64) for each in (mine, true))
        error = np.linalg.norm(mine - true) / np.linalg.norm(true)
        assert error <= BOUND, (jax.tree_util.keystr(path), error)
        swapped = mine.copy()
        swapped[..., :2, :] = swapped[..., 1::-1, :]
        assert np.linalg.norm(swapped - true) / np.linalg.norm(true) > BOUND, "finds a fault"


def test_a_layer_repeats():
    for once, again in zip(
        jax.tree.leaves(run(PolicyName.BF16)[1]),
        jax.tree.leaves(run(PolicyName.BF16)[1]),
        strict=True,
    ):
        np.testing.assert_array_equal(once, again)
