"""ELU and its gradient in one pass over memory: the example of a fused elementwise kernel.

``y = x`` where ``x > 0``, else ``exp(x) - 1``; ``d_x = d_y`` where ``x > 0``, else ``d_y exp(x)``
(Clevert et al., arXiv 1511.07289, with alpha 1).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.errors import InputError, UnsupportedError

LOG2E = math.log2(math.e)
CHUNK = 4096  # elements a block: 32 a thread
WIDEST = 8  # bf16 numbers in the 16 bytes that a thread can load at once


def elu_reference(x: jax.Array) -> jax.Array:
    """The formula in fp32, rounded to the dtype of ``x``."""
    return jax.nn.elu(x.astype(jnp.float32)).astype(x.dtype)


def elu_and_gradient_reference(x: jax.Array, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y and d_x by JAX's own differentiation."""
    y, pull = jax.vjp(elu_reference, x)
    return y, pull(d_y)[0]


def elu(x: jax.Array, *, vector: int = WIDEST) -> jax.Array:
    """ELU of bf16 [..., C].

    Args:
        x: bf16, a multiple of 4096 elements.
        vector: elements that a thread loads at once, 1 to 8.
    """
    return _elementwise(lambda x: (_elu(x),), [x], num_outputs=1, vector=vector)[0]


def elu_and_gradient(
    x: jax.Array, d_y: jax.Array, *, vector: int = WIDEST
) -> tuple[jax.Array, ...]:
    """y and d_x of one shape: x and d_y are read once, the exponential is taken once."""

    def formula(x, d_y):
        y = _elu(x)
        return y, d_y * jnp.where(x > 0, 1.0, y + 1.0)

    return _elementwise(formula, [x, d_y], num_outputs=2, vector=vector)


def _elu(x: jax.Array) -> jax.Array:
    # exp(x) - 1 loses the digits of a small x; three terms of its series are exact to fp32 there.
    series = x * (1.0 + x * (0.5 + x * (1 / 6)))
    below = jnp.where(x > -0.01, series, jnp.exp2(x * LOG2E) - 1.0)
    return jnp.where(x > 0, x, below)


def _elementwise(formula, inputs, *, num_outputs: int, vector: int) -> tuple[jax.Array, ...]:
    x = inputs[0]
    if any(each.shape != x.shape or each.dtype != x.dtype for each in inputs):
        raise InputError(f"elu: {[f'{i.dtype}{i.shape}' for i in inputs]} differ in shape or dtype")
    if x.dtype != jnp.bfloat16 or x.size % CHUNK:
        raise UnsupportedError(
            f"elu: {x.dtype}{x.shape}; this kernel takes bfloat16 and multiples of {CHUNK} "
            "elements, jax.nn.elu others"
        )
    layout = plgpu.Layout.WG_STRIDED((CHUNK,), vector)

    def body(*refs):
        chunk = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)
        loaded = [
            plgpu.load(ref.at[chunk], layout=layout, optimized=False).astype(jnp.float32)
            for ref in refs[: len(inputs)]
        ]
        for ref, result in zip(refs[len(inputs) :], formula(*loaded), strict=True):
            ref[chunk] = result.astype(x.dtype)

    out = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((x.size,), x.dtype),) * num_outputs,
        grid=(x.size // CHUNK,),
        grid_names=("chunk",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*(each.reshape(-1) for each in inputs))
    return tuple(each.reshape(x.shape) for each in out)
