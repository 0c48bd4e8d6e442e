"""Preparation of a layer's weights for rounding: input scaling and clipped group ranges.

Dividing an input by s and multiplying the weights that read it by s changes only rounding errors.
AWQ (Lin et al. 2023, arXiv 2306.00978) takes s = mean |x| ** alpha, with the alpha of least output
error. SmoothQuant (Xiao et al. 2022, arXiv 2211.10438) takes
s = max |x| ** alpha / max |w| ** (1 - alpha), which balances the ranges of inputs and weights.

If D is the rounding error of a weight [K, N] and H = x^T x, the squared error of its outputs is
tr(D^T H D). Weights of experts are [E, K, N]; each expert has the H of its own tokens.

Dims: E expert, K input, N output, G group of inputs, R input of a group.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxinfra.config.model import BlockConfig
from jaxinfra.numerics.storage import EXACT
from jaxinfra.ops.quantized import WeightFormat, round_weight
from jaxinfra.quantize.equivalence import (
    ScaledInput,
    divided_columns,
    divided_norm,
    scaled_inputs,
)
from jaxinfra.quantize.layers import MatrixDims
from jaxinfra.quantize.recipes import Method, QuantizationRecipe
from jaxinfra.quantize.statistics import InputStatistics

NUM_ALPHAS = 20
NUM_CLIPS, LEAST_CLIP = 10, 0.5
SMOOTHNESS = 0.5  # SmoothQuant's alpha
_LEAST = 1e-4  # of a scale

type _OfOne = Callable[[jax.Array, InputStatistics], jax.Array]


@functools.partial(jax.jit, static_argnames=("form",))
def awq_scales(
    weights: list[jax.Array], seen: list[InputStatistics], mean_K: jax.Array, *, form: WeightFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Searches AWQ's scale of each input channel [K] that a group of weights shares.

    Returns the scales, and the relative error of the outputs with and without them.

    Args:
        weights: the weights that read the input, [K, N], or [E, K, N] for experts.
        seen: statistics of each weight's input.
        mean_K: mean magnitude of each input channel over all tokens.
    """

    def scales(alpha: jax.Array) -> jax.Array:
        s = jnp.maximum(jnp.maximum(mean_K, _LEAST) ** alpha, _LEAST)
        return s / jnp.sqrt(jnp.max(s) * jnp.min(s))

    def total(error: _OfOne) -> jax.Array:
        each = (_by_expert(error, w, of) for w, of in zip(weights, seen, strict=True))
        return sum((jnp.sum(one) for one in each), jnp.zeros((), EXACT))

    def with_scales(alpha: jax.Array) -> jax.Array:
        s = scales(alpha)[:, None]

        def error(w_KN: jax.Array, seen: InputStatistics) -> jax.Array:
            rounded = round_weight(w_KN * s, form, has_zeros=True).dequantize(EXACT)
            return output_error(rounded.reshape(w_KN.shape) / s - w_KN, seen)

        return total(error)

    alphas = jnp.arange(NUM_ALPHAS, dtype=EXACT) / NUM_ALPHAS
    errors = jax.lax.map(with_scales, alphas)
    best, whole = jnp.argmin(errors), total(output_error)
    return scales(alphas[best]), errors[best] / whole, errors[0] / whole


@functools.partial(jax.jit, static_argnames=("form",))
def awq_scales_by_expert(
    w_EKN: jax.Array, seen: InputStatistics, *, form: WeightFormat
) -> jax.Array:
    """Searches AWQ's scales of each expert's own input channels, [E, K]."""

    def of_one(w_KN: jax.Array, seen: InputStatistics) -> jax.Array:
        return awq_scales([w_KN], [seen], seen.mean_K, form=form)[0]

    return _by_expert(of_one, w_EKN, seen)


def _by_expert(of_one: _OfOne, w: jax.Array, seen: InputStatistics) -> jax.Array:
    """Applies a function to one weight, or to one expert after another."""
    if w.ndim == 2:
        return of_one(w, seen)
    return jax.lax.map(lambda each: of_one(*each), (w, seen))


def output_error(off_KN: jax.Array, seen: InputStatistics) -> jax.Array:
    """Returns the squared error of a weight's outputs over all tokens, given the weight's error."""
    grid = seen.products_GRR.shape[:2]
    off_GRN = off_KN.reshape(*grid, -1)
    return jnp.sum(off_GRN * _heard(seen.products_GRR, off_GRN))


def _heard(products_GRR: jax.Array, off_GRN: jax.Array) -> jax.Array:
    return jnp.einsum("grs,gsn->grn", products_GRR, off_GRN, precision="highest")


@functools.partial(jax.jit, static_argnames=("form",))
def clipped_ranges(w: jax.Array, seen: InputStatistics, *, form: WeightFormat) -> jax.Array:
    """Searches the factor [G, N] or [E, G, N] on each group's range with the least error.

    The error minimized is that of the group's contribution to the outputs.
    """
    return _by_expert(functools.partial(_clipped, form=form), w, seen)


def _clipped(w_KN: jax.Array, seen: InputStatistics, *, form: WeightFormat) -> jax.Array:
    rows, columns = w_KN.shape
    size = form.group_rows
    products_GRR = _of_groups(seen.products_GRR, size)

    def error(clip: jax.Array) -> jax.Array:
        rounded = round_weight(w_KN, form, has_zeros=True, clip=clip).dequantize(EXACT)
        off_GRN = (rounded.reshape(w_KN.shape) - w_KN).reshape(rows // size, size, columns)
        return jnp.sum(off_GRN * _heard(products_GRR, off_GRN), axis=1)

    clips = 1.0 - (1.0 - LEAST_CLIP) * jnp.arange(NUM_CLIPS, dtype=EXACT) / NUM_CLIPS
    errors = jax.lax.map(error, clips)
    return clips[jnp.argmin(errors, axis=0)]


def _of_groups(products_GRR: jax.Array, size: int) -> jax.Array:
    """Returns diagonal blocks of input products at the group size, cut from larger blocks."""
    blocks, width = products_GRR.shape[:2]
    inner = products_GRR.reshape(blocks, width // size, size, width // size, size)
    own = jnp.arange(width // size)
    # Dims that are indexed come first: group of the block, block, and both of the products.
    return jnp.swapaxes(inner[:, own, :, own], 0, 1).reshape(-1, size, size)


@jax.jit
def smooth_scales(weights: list[jax.Array], largest_K: jax.Array) -> jax.Array:
    """Returns SmoothQuant's scale of each input channel [K] that the weights share.

    Args:
        weights: the weights that read the input, [K, N], or [E, K, N] for experts.
        largest_K: largest magnitude of each input channel over all tokens.
    """
    by_input = [jnp.max(jnp.abs(w), axis=(*range(w.ndim - 2), w.ndim - 1)) for w in weights]
    largest = jnp.max(jnp.stack(by_input), axis=0)
    of_inputs = jnp.maximum(largest_K, _LEAST) ** SMOOTHNESS
    # Weights are multiplied with it, inputs divided.
    return jnp.maximum(of_inputs / jnp.maximum(largest, _LEAST) ** (1.0 - SMOOTHNESS), _LEAST)


_UNCUT = ("query", "key")
"""Weights that AWQ does not clip: queries and keys matter through their products with one another.
"""


def with_scaled_inputs(
    parameters: Mapping[str, jax.Array],
    seen: Mapping[str, InputStatistics],
    block: BlockConfig,
    recipe: QuantizationRecipe,
    dims: Mapping[str, MatrixDims],
    *,
    quantized: frozenset[str],
) -> tuple[dict[str, jax.Array], dict[str, InputStatistics]]:
    """Returns a layer's fp32 parameters with scaled input channels; the layer's outputs are equal.

    Also returns statistics of the scaled inputs, by the weight's path in the block.

    Args:
        seen: statistics of each weight's input; empty for a recipe that needs no text.
        dims: dims of each weight as a matrix.
        quantized: the weights that will be rounded.
    """
    changed, seen = dict(parameters), dict(seen)
    for group in scaled_inputs(block, recipe.method):
        rounded = [path for path in group.readers if path in quantized]
        if not rounded:
            continue
        scales = _scales(group, rounded, changed, seen, recipe, dims)
        for path in (*group.readers, *group.kept):
            w = dims[path].matrix(changed[path])
            scaled = w * jnp.broadcast_to(scales, w.shape[:-1])[..., None]
            changed[path] = scaled.reshape(changed[path].shape)
            if path in seen:
                seen[path] = seen[path].divided(scales)
        divided = divided_columns if group.norm is None else divided_norm
        changed |= divided(changed, group, scales)
    return changed, seen


def cut_ranges(
    parameters: Mapping[str, jax.Array],
    seen: Mapping[str, InputStatistics],
    recipe: QuantizationRecipe,
    dims: Mapping[str, MatrixDims],
    *,
    quantized: frozenset[str],
) -> dict[str, jax.Array]:
    """Searches clipping factors on group ranges, [G, N] or [E, G, N], by the weight's path.

    The result is empty for recipes that clip no ranges.
    """
    if recipe.method is not Method.AWQ:
        return {}
    return {
        path: clipped_ranges(dims[path].matrix(parameters[path]), seen[path], form=recipe.form)
        for path in sorted(quantized)
        if path.split("/")[-2] not in _UNCUT
    }


def _scales(
    group: ScaledInput,
    rounded: list[str],
    parameters: Mapping[str, jax.Array],
    seen: Mapping[str, InputStatistics],
    recipe: QuantizationRecipe,
    dims: Mapping[str, MatrixDims],
) -> jax.Array:
    weights = [dims[path].matrix(parameters[path]) for path in rounded]
    if group.by_expert:
        (w_EKN,), (path,) = weights, rounded
        return awq_scales_by_expert(w_EKN, seen[path], form=recipe.form)
    of_input = seen[group.input]
    if recipe.method is Method.SMOOTH:
        return smooth_scales(weights, of_input.largest_K)
    stats = [seen[path] for path in rounded]
    return awq_scales(weights, stats, of_input.mean_K, form=recipe.form)[0]
