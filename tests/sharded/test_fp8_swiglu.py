"""SwiGLU that is cast as it is computed, in layers and steps in 8 bits: steps apart's bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfra.config.model import MlpConfig
from jaxinfra.config.precision import Fp8Format, Fp8Matmuls, Fp8Scaling, PolicyName, PrecisionConfig
from jaxinfra.config.run import Remat
from jaxinfra.model import mlp
from jaxinfra.model.mlp import Mlp
from jaxinfra.model.passes import Pass
from jaxinfra.model.recomputation import kept_by
from jaxinfra.numerics.policy import policy_of
from jaxinfra.ops import fp8
from jaxinfra.ops.fp8_swiglu import swiglu_input
from jaxinfra.parallel.execution import execution_on
from pallas_kernels.common import device
from tests.sharded import test_fp8
from tests.unit.test_fp8_layers import num_casts

B, T, D, F = 2, 128, 128, 256


@pytest.fixture
def fused(monkeypatch):
    """Makes what follows cast SwiGLU as it is computed, by the implementation that is named."""

    def take(implementation: str) -> None:
        made = functools.partial(swiglu_input, implementation=implementation)
        monkeypatch.setattr(mlp, "swiglu_input", made)

    return take


def layer_of(config: Fp8Matmuls):
    """A layer as a function of its arrays and x, these arrays, x and a cotangent."""
    policy = policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=config))
    layer = Mlp(
        MlpConfig(hidden_dim=F),
        model_dim=D,
        std=0.05,
        out_std=0.05,
        execution=execution_on(policy=policy),
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(layer)
    rng = np.random.default_rng(0)
    x, cotangent = (rng.normal(size=(B, T, D)).astype(jnp.bfloat16) for _ in range(2))

    def run(state, x):
        return nnx.merge(graph, state)(x, Pass(positions_BT=jnp.zeros((B, T), jnp.int32))).x

    return run, (state, x), cotangent


def gradients(config: Fp8Matmuls) -> dict[str, np.ndarray]:
    """A layer's value, and its gradients in x, weights and histories, by their names."""
    run, arguments, cotangent = layer_of(config)

    def both(state, x, cotangent):
        y, pull = jax.vjp(run, state, x)
        return y, pull(cotangent)

    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(both)(*arguments, cotangent))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize(
    "config",
    [
        Fp8Matmuls(gradient=Fp8Format.E5M2),
        pytest.param(Fp8Matmuls(scaling=Fp8Scaling.SQUARES), marks=pytest.mark.slow),
    ],
    ids=["blocks", "squares"],
)
def test_a_layer_computes_what_steps_apart_do(fused, config):
    apart = gradients(config)
    fused("xla")
    ours = gradients(config)
    assert len(ours) == 8  # y, x, three weights, three histories
    assert list(ours) == list(apart)
    for name in ours:
        np.testing.assert_array_equal(ours[name], apart[name], err_msg=name)


@pytest.mark.slow  # the kernel alone: `kernels/test_quantize_both_ways.py`
def test_a_layer_computes_with_the_kernel(fused, monkeypatch):
    config = Fp8Matmuls()
    # The products' own kernels have instructions that the interpreter does not know.
    plainly = functools.partial(fp8.scaled_matmul, implementation="xla")
    monkeypatch.setattr(fp8, "scaled_matmul", plainly)
    apart = gradients(config)
    fused("hopper")
    parameters = plgpu.InterpretGPUParams()
    with device.compiling_for(device.H200), plgpu.force_gpu_interpret_mode(parameters):
        ours = gradients(config)
    for name in ours:
        want = apart[name].astype(np.float64)
        error = np.linalg.norm(ours[name] - want) / np.linalg.norm(want)
        assert error < 0.01, (name, error)


def casts_in_a_layer(config: Fp8Matmuls) -> int:
    """To 8 bits, in a layer's gradient with what recomputation repeats."""
    run, arguments, cotangent = layer_of(config)
    policy = jax.checkpoint_policies.save_only_these_names(*kept_by(Remat.DOTS))
    kept = jax.checkpoint(run, policy=policy)

    def pulled(state, x):
        return jax.vjp(kept, state, x)[1](cotangent)

    return num_casts(jax.make_jaxpr(pulled)(*arguments).jaxpr)


def test_nothing_is_quantized_twice(fused):
    """x, the hidden values and three cotangents, each cast along rows and across; three weights."""
    fused("xla")
    assert casts_in_a_layer(Fp8Matmuls()) == 2 * (2 + 3) + 3


@pytest.mark.slow
def test_a_mesh_trains_as_with_steps_apart(fused):
    mesh, how = test_fp8.CASES["tensor-sequence"]
    apart, *_ = test_fp8.trained(mesh, **how)
    fused("xla")
    ours, *_ = test_fp8.trained.__wrapped__(mesh, **how)
    np.testing.assert_allclose(ours, apart, rtol=1e-5)
