"""Scales that move error from where it is heard to where it is not, and ranges that are cut.

Multiplying an input's weights with s, and what makes that input by 1 / s, changes nothing but how
they round. AWQ (Lin et al. 2023, arXiv 2306.00978) takes s = mean |x| ** alpha for the alpha at
which outputs are off least; SmoothQuant (Xiao et al. 2022, arXiv 2211.10438) takes
s = max |x| ** alpha / max |w| ** (1 - alpha), so that inputs round as easily as weights do.

With D the error of a weight [K, N] and H = x^T x, the error of its outputs is tr(D^T H D).

Dims: K input, N output, G group of inputs, R input of a group.
"""

import functools

import jax
import jax.numpy as jnp

from jaxinfra.numerics.storage import EXACT
from jaxinfra.ops.quantized import WeightFormat, round_weight
from jaxinfra.serving.quantize.statistics import InputStatistics

NUM_ALPHAS = 20
NUM_CLIPS, LEAST_CLIP = 10, 0.5
SMOOTHNESS = 0.5  # SmoothQuant's alpha
_LEAST = 1e-4  # of a scale


@functools.partial(jax.jit, static_argnames=("form",))
def awq_scales(
    weights: list[jax.Array], seen: InputStatistics, *, form: WeightFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scale of each input that all these weights [K, N] share, [K]; the relative error of
    their outputs with it; and without any.
    """

    def scales(alpha: jax.Array) -> jax.Array:
        s = jnp.maximum(jnp.maximum(seen.mean_K, _LEAST) ** alpha, _LEAST)
        return s / jnp.sqrt(jnp.max(s) * jnp.min(s))

    def error(alpha: jax.Array) -> jax.Array:
        s = scales(alpha)[:, None]
        off = jnp.zeros((), EXACT)
        for w in weights:
            rounded = round_weight(w * s, form, has_zeros=True).dequantize(EXACT).reshape(w.shape)
            off = off + output_error(rounded / s - w, seen)
        return off

    alphas = jnp.arange(NUM_ALPHAS, dtype=EXACT) / NUM_ALPHAS
    errors = jax.lax.map(error, alphas)
    whole = sum(output_error(w, seen) for w in weights)
    best = jnp.argmin(errors)
    return scales(alphas[best]), errors[best] / whole, errors[0] / whole


def output_error(off_KN: jax.Array, seen: InputStatistics) -> jax.Array:
    """Sum of squares of the outputs of a weight's error, over all tokens."""
    return jnp.sum(off_KN * jnp.dot(seen.products_KK, off_KN, precision="highest"))


@functools.partial(jax.jit, static_argnames=("form",))
def clipped_ranges(w_KN: jax.Array, seen: InputStatistics, *, form: WeightFormat) -> jax.Array:
    """What the range of each group is multiplied with, [G, N]: of some, that with which the group's
    share of the outputs is off least.
    """
    rows, columns = w_KN.shape
    size = form.group_rows
    products = seen.products_KK.reshape(rows // size, size, rows // size, size)
    own = jnp.arange(rows // size)
    products_GRR = products[own, :, own]

    def error(clip: jax.Array) -> jax.Array:
        rounded = round_weight(w_KN, form, has_zeros=True, clip=clip).dequantize(EXACT)
        off = (rounded.reshape(w_KN.shape) - w_KN).reshape(rows // size, size, columns)
        heard = jnp.einsum("grs,gsn->grn", products_GRR, off, precision="highest")
        return jnp.sum(off * heard, axis=1)

    clips = 1.0 - (1.0 - LEAST_CLIP) * jnp.arange(NUM_CLIPS, dtype=EXACT) / NUM_CLIPS
    errors = jax.lax.map(error, clips)
    return clips[jnp.argmin(errors, axis=0)]


@jax.jit
def smooth_scales(weights: list[jax.Array], seen: InputStatistics) -> jax.Array:
    """SmoothQuant's scale of each input that all these weights [K, N] share, [K]."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(w), axis=1) for w in weights]), axis=0)
    of_inputs = jnp.maximum(seen.largest_K, _LEAST) ** SMOOTHNESS
    # Weights are multiplied with it, inputs divided.
    return jnp.maximum(of_inputs / jnp.maximum(largest, _LEAST) ** (1.0 - SMOOTHNESS), _LEAST)
