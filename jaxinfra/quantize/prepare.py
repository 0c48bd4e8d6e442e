"""A layer's weights made ready to be rounded: inputs scaled, ranges of groups cut."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxinfra.config.model import BlockConfig
from jaxinfra.quantize.equivalence import (
    ScaledInput,
    divided_columns,
    divided_norm,
    scaled_inputs,
)
from jaxinfra.quantize.layers import MatrixDims
from jaxinfra.quantize.recipes import Method, QuantizationRecipe
from jaxinfra.quantize.search import (
    awq_scales,
    awq_scales_by_expert,
    clipped_ranges,
    smooth_scales,
)
from jaxinfra.quantize.statistics import InputStatistics

_UNCUT = ("query", "key")
"""Of queries and keys, whose products with one another are what matters, AWQ cuts none."""


def with_scaled_inputs(
    parameters: Mapping[str, jax.Array],
    seen: Mapping[str, InputStatistics],
    block: BlockConfig,
    recipe: QuantizationRecipe,
    dims: Mapping[str, MatrixDims],
    *,
    quantized: frozenset[str],
) -> tuple[dict[str, jax.Array], dict[str, InputStatistics]]:
    """Parameters of a layer that compute the same with scaled inputs, fp32, and what their weights
    are given then, by path in the block.

    Args:
        seen: what each weight was given; nothing for a recipe that needs no text.
        dims: how weights are matrices.
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
    """What the range of each group is multiplied with, [G, N] or [E, G, N], by path in the block;
    empty for recipes that cut none.
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
