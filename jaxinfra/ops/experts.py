"""Routed experts' feed-forward layers, each applied to the tokens that chose it.

Grouped matmuls need plain weights, so quantized ones are dequantized first. A token has one copy
per expert that it chose. With at least as many copies as experts, all experts are dequantized. With
fewer copies, as in a decode step, only the chosen experts are gathered and dequantized. Both
numbers are static, so a program has one form or the other.

Products of 8-bit operands, with x [N, D], rows of it for each expert, weights w [E, D, F] and
cotangents g [M, F]:

    y = x w        x by 1x128 along D, w by 128x128
    dx = g w^T     g by 1x128 along F, the same w
    dw = x^T g     in the compute dtype: blocks of 128 tokens would span tokens of two experts

Tokens are quantized before they are copied for their experts. Weights are quantized once for the
forward and backward pass.

Dims: N token, K choice of a token, M copy of a token for one of its choices, sorted by expert,
E expert, S one of the experts that are dequantized, D width in, F width out or hidden width,
J blocks of 128 columns, I blocks of 128 rows.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxinfra.config.kinds import MlpKind
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.recipe import Fp8Recipe, Recipe
from jaxinfra.ops.activation import activated
from jaxinfra.ops.exact_product import are_kernels
from jaxinfra.ops.fp8 import named
from jaxinfra.ops.quantized import QuantizedWeight
from pallas_kernels import UnsupportedError as KernelUnsupported
from pallas_kernels import combine as combine_rows
from pallas_kernels import (
    grouped_matmul,
    grouped_swiglu,
    grouped_weight_gradient,
    quantize,
    scaled_grouped_matmul,
)
from pallas_kernels.common.dot import ACCUMULATOR
from pallas_kernels.common.scales import BLOCK, Quantized, Scaling
from pallas_kernels.common.varying import vary_alike
from pallas_kernels.fp8.xla import quantize_xla
from pallas_kernels.grouped_matmul import GATE_NAME, UP_NAME


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenCopies:
    """Copies of tokens, one for each choice of an expert, sorted by expert."""

    choice_M: jax.Array  # int32: the choice n K + k of each copy; N K in unused rows
    place_NK: jax.Array  # int32: row of each choice's copy; M if the choice has no copy
    sizes_E: jax.Array  # int32: number of copies for each expert
    left_out: jax.Array  # int32 []: choices without a copy, since all rows are used


def multiply_groups_fp8(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    copies: TokenCopies,
    rows_M: jax.Array | None,
    *,
    recipe: Recipe,
) -> jax.Array:
    """Multiplies each copy of a token with its expert's weights in 8 bits.

    Returns [M, F of all weights] in the compute dtype.

    Args:
        x: copies [M, D], or tokens [N, D], of which row ``rows_M[m]`` is copied to row m.
        weights: [E, D, F] each, concatenated along F; gradients have the weights' dtypes.
    """
    fp8 = recipe.fp8
    assert fp8 is not None
    ends = list(itertools.accumulate(w.shape[-1] for w in weights))
    dtypes = x.dtype, [w.dtype for w in weights]

    @jax.custom_vjp
    def product(x, weights, copies, rows_M):
        return forward(x, weights, copies, rows_M)[0]

    def forward(x, weights, copies, rows_M):
        x = x.astype(recipe.compute)
        rows = _quantized_rows(x, fp8, fp8.forward)
        if rows_M is not None:
            rows = Quantized(rows.values[rows_M], rows.scale[:, rows_M])
        w = named(quantized_weights(weights, recipe))
        across = Quantized(*(jnp.swapaxes(each, 1, 2) for each in w))
        return _multiply(rows, across, copies.sizes_E, recipe), (x, w, copies, rows_M)

    def backward(kept, g_MF):
        x, w, copies, rows_M = kept
        g_MF = g_MF.astype(recipe.compute)
        g = _quantized_rows(g_MF, fp8, fp8.gradient)
        dx = _multiply(g, w, copies.sizes_E, recipe)
        if rows_M is not None:
            ones = jnp.ones(copies.place_NK.shape, ACCUMULATOR)
            dx = combine_rows(dx, copies.place_NK, ones, inverse=copies.choice_M)
        dws = tuple(
            grouped_weight_gradient(x, part_MF, copies.sizes_E, rows=rows_M, out_dtype=dtype)
            for part_MF, dtype in zip(jnp.split(g_MF, ends[:-1], axis=1), dtypes[1], strict=True)
        )
        return dx.astype(dtypes[0]), dws, None, None

    product.defvjp(forward, backward)
    return product(*vary_alike((x, weights, copies, rows_M)))


def _quantized_rows(x_MK: jax.Array, fp8: Fp8Recipe, dtype: jnp.dtype) -> Quantized:
    return quantize(x_MK, Scaling.BLOCK_OF_ROW, dtype=dtype, power_of_two=fp8.power_of_two)


def quantized_weights(weights: tuple[jax.Array, ...], recipe: Recipe) -> Quantized:
    """Quantizes weights by 128x128 blocks, joined on F: values [E, D, F], scales [E, J, I]."""
    fp8 = recipe.fp8
    assert fp8 is not None
    w_EDF = jnp.concatenate([w.astype(recipe.compute) for w in weights], axis=-1)
    num_experts, depth, width = w_EDF.shape
    options = {"dtype": fp8.forward, "power_of_two": fp8.power_of_two}
    if depth % BLOCK:
        return quantize_xla(w_EDF, Scaling.BLOCK, **options)
    # No block has rows of two experts.
    flat = quantize(w_EDF.reshape(-1, width), Scaling.BLOCK, **options)
    scale = flat.scale.reshape(-1, num_experts, depth // BLOCK)
    return Quantized(flat.values.reshape(w_EDF.shape), jnp.moveaxis(scale, 1, 0))


def _multiply(a: Quantized, b: Quantized, sizes_E: jax.Array, recipe: Recipe) -> jax.Array:
    return scaled_grouped_matmul(
        a.values, b.values, a.scale, b.scale, sizes_E, out_dtype=recipe.compute
    )


_HIDDEN = "expert_hidden"
HIDDEN_NAMES = (_HIDDEN, GATE_NAME, UP_NAME)
OUT_NAME = "expert_out"
CHOICE_NAME = "expert_choice"
"""Names, for recomputation policies, of the experts' hidden layers, of their outputs, and of which
expert takes which token. The last is kept whatever is recomputed: scores computed again may round
otherwise, and the backward pass would go to other experts.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Stored weights of a layer's routed experts: of all experts, or of one device's."""

    gate_EDF: jax.Array | QuantizedWeight | None
    up_EDF: jax.Array | QuantizedWeight
    down_EFD: jax.Array | QuantizedWeight
    gate_bias_EF: jax.Array | None = None
    up_bias_EF: jax.Array | None = None
    down_bias_ED: jax.Array | None = None

    @property
    def in_few_bits(self) -> bool:
        """Tells whether some of the weights are quantized."""
        weights = (self.gate_EDF, self.up_EDF, self.down_EFD)
        return any(isinstance(weight, QuantizedWeight) for weight in weights)

    def changed(self, change: Callable[[QuantizedWeight], Any]) -> "ExpertWeights":
        """Returns the weights with ``change`` applied to each quantized one."""
        weights = {name: getattr(self, name) for name in ("gate_EDF", "up_EDF", "down_EFD")}
        few = {name: w for name, w in weights.items() if isinstance(w, QuantizedWeight)}
        return dataclasses.replace(self, **{name: change(w) for name, w in few.items()})


def sorted_copies(expert_NK: Int[Array, "N K"], *, num_experts: int, room: int) -> TokenCopies:
    """Sorts tokens' choices by expert; only the first ``room`` choices of this order get a copy.

    Args:
        expert_NK: each choice's expert; num_experts or above means none.
    """
    expert_I = expert_NK.reshape(-1)
    order_I = jnp.argsort(expert_I, stable=True).astype(jnp.int32)
    place_I = (
        jnp.zeros_like(order_I)
        .at[order_I]
        .set(jnp.arange(order_I.size, dtype=jnp.int32), unique_indices=True)
    )
    # One reduction: a binary search would be a loop of small kernels in every layer.
    is_before_EI = expert_I[None, :] < jnp.arange(num_experts + 1, dtype=jnp.int32)[:, None]
    edges = jnp.sum(is_before_EI, axis=1, dtype=jnp.int32)
    fitting = jnp.minimum(edges, room)
    has_copy_I = (expert_I < num_experts) & (place_I < room)
    return TokenCopies(
        choice_M=jnp.where(
            jnp.arange(room, dtype=jnp.int32) < fitting[-1], order_I[:room], order_I.size
        ),
        place_NK=jnp.where(has_copy_I, place_I, room).reshape(expert_NK.shape),
        sizes_E=jnp.diff(fitting),
        left_out=edges[-1] - fitting[-1],
    )


@jax.custom_vjp
def spread(
    x_ND: Float[Array, "N D"], choice_S: Int[Array, "S"], place_NJ: Int[Array, "N J"]
) -> Float[Array, "S D"]:
    """Copies tokens to slots; empty slots are 0. The gradient sums a token's slots in fixed order.

    Args:
        choice_S: the copy in each slot: token index times J plus copy index; N J for none.
        place_NJ: the inverse: each copy's slot; S for none.
    """
    copies = place_NJ.shape[1]
    rows_SD = x_ND[jnp.minimum(choice_S // copies, x_ND.shape[0] - 1)]
    return jnp.where(choice_S[:, None] < place_NJ.size, rows_SD, jnp.zeros((), x_ND.dtype))


def _spread_backward(kept: tuple[jax.Array, jax.Array], d_SD: jax.Array):
    choice_S, place_NJ = kept
    ones = jnp.ones(place_NJ.shape, ACCUMULATOR)
    return combine_rows(d_SD, place_NJ, ones, inverse=choice_S), None, None


spread.defvjp(
    lambda x, choice, place: (spread(x, choice, place), (choice, place)), _spread_backward
)


def apply_experts(
    x_ND: Float[Array, "N D"],
    expert_NK: Int[Array, "N K"],
    weight_NK: Float[Array, "N K"],
    experts: ExpertWeights,
    *,
    kind: MlpKind,
    recipe: Recipe,
    room: int | None = None,
) -> tuple[Float[Array, "N D"], Int[Array, ""]]:
    """Computes each token's weighted sum of its experts' outputs, in the recipe's compute dtype.

    Also returns the number of choices that ``room`` drops. Nothing is padded: an expert's grouped
    matmul has one row per token that chose it. Sums over a token's experts are in fp32 and in the
    order of its choices.

    Args:
        expert_NK: each choice's expert; num_experts or above means none, which adds nothing.
        weight_NK: weight of each choice, fp32.
        room: maximum number of choices to compute; all by default.
    """
    num_experts, top_k = experts.up_EDF.shape[0], expert_NK.shape[1]
    room = expert_NK.size if room is None else min(room, expert_NK.size)
    with jax.named_scope("sort"):
        copies = sorted_copies(expert_NK, num_experts=num_experts, room=room)
        rows_M = jnp.minimum(copies.choice_M // top_k, x_ND.shape[0] - 1)
        if experts.in_few_bits and room < num_experts:
            experts, copies = _met(experts, copies)
    x_ND = x_ND.astype(recipe.compute)
    try:
        with jax.named_scope("experts"):
            hidden_MF = _hidden(x_ND, rows_M, copies, experts, kind=kind, recipe=recipe)
            hidden_MF = checkpoint_name(hidden_MF, _HIDDEN)
            y_MD = _product(hidden_MF, experts.down_EFD, copies, recipe)
            if experts.down_bias_ED is not None:
                y_MD = y_MD.astype(recipe.accum) + _bias(experts.down_bias_ED, copies, recipe)
            y_MD = checkpoint_name(y_MD.astype(recipe.compute), OUT_NAME)
        with jax.named_scope("combine"):
            y_ND = combine_rows(
                y_MD,
                copies.place_NK,
                weight_NK,
                inverse=copies.choice_M,
                is_pinned=recipe.is_exact,
            )
    except KernelUnsupported as error:
        raise UnsupportedError(str(error)) from error
    return y_ND, copies.left_out


def _met(experts: ExpertWeights, copies: TokenCopies) -> tuple[ExpertWeights, TokenCopies]:
    """Selects as many experts as there are copies: first those with tokens, in their order, then
    others.
    """
    has_none_E = (copies.sizes_E == 0).astype(jnp.int32)
    expert_S = jnp.argsort(has_none_E, stable=True)[: copies.choice_M.size]

    experts = experts.changed(lambda weight: weight.plain)  # whose parts all begin with experts
    experts = jax.tree.map(lambda part: part[expert_S], experts)
    return experts, dataclasses.replace(copies, sizes_E=copies.sizes_E[expert_S])


def _hidden(
    x_ND: jax.Array,
    rows_M: jax.Array,
    copies: TokenCopies,
    experts: ExpertWeights,
    *,
    kind: MlpKind,
    recipe: Recipe,
) -> jax.Array:
    gate_EDF, up_EDF = experts.gate_EDF, experts.up_EDF
    gated, has_bias = gate_EDF is not None, experts.up_bias_EF is not None
    if kind is MlpKind.SWIGLU and gate_EDF is not None and not has_bias and recipe.fp8 is None:
        return grouped_swiglu(
            x_ND,
            _stored(gate_EDF, recipe),
            _stored(up_EDF, recipe),
            copies.sizes_E,
            rows=rows_M,
            positions=copies.place_NK,
            implementation=_implementation(recipe),
        )
    weights = (gate_EDF, up_EDF) if gate_EDF is not None else (up_EDF,)
    biases = [experts.gate_bias_EF] * gated + [experts.up_bias_EF]

    def biased(y_MF: jax.Array, bias_EF: jax.Array | None) -> jax.Array:
        y_MF = y_MF.astype(recipe.accum)
        return y_MF if bias_EF is None else y_MF + _bias(bias_EF, copies, recipe)

    def hidden(products: list[jax.Array]) -> jax.Array:
        y_MF = list(map(biased, products, biases))
        gate_MF = y_MF[0] if gated else None
        return activated(kind, y_MF[-1], gate_MF).astype(recipe.compute)

    if recipe.fp8 is None:
        return hidden([_product(x_ND, w, copies, recipe, rows_M=rows_M) for w in weights])
    stored = tuple(_stored(weight, recipe) for weight in weights)
    y_MF = multiply_groups_fp8(x_ND, stored, copies, rows_M, recipe=recipe)

    @jax.checkpoint  # keeps the products in their format, and nothing of what becomes of them
    def hidden_of_all(y_MF: jax.Array) -> jax.Array:
        return hidden(jnp.split(y_MF, len(weights), axis=1))

    return hidden_of_all(checkpoint_name(y_MF, UP_NAME))


def _product(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    copies: TokenCopies,
    recipe: Recipe,
    *,
    rows_M: jax.Array | None = None,
) -> jax.Array:
    """Each copy, a row of x or one that is named, times its expert's weight."""
    if recipe.fp8 is not None:
        return multiply_groups_fp8(x, (_stored(weight, recipe),), copies, rows_M, recipe=recipe)
    return grouped_matmul(
        x,
        _stored(weight, recipe),
        copies.sizes_E,
        rows=rows_M,
        positions=None if rows_M is None else copies.place_NK,
        implementation=_implementation(recipe),
    )


def _implementation(recipe: Recipe) -> Literal["auto", "hopper", "ordered"]:
    if not recipe.is_exact:
        return "auto"
    return "hopper" if are_kernels() else "ordered"  # whose rows know of no other row either


def _stored(weight: jax.Array | QuantizedWeight, recipe: Recipe) -> jax.Array:
    """The weight in the format that its gradient is handed on in; products are of x's format."""
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize(recipe.compute)
    return weight if recipe.gradient is None else weight.astype(recipe.gradient)


def _bias(bias_E: jax.Array, copies: TokenCopies, recipe: Recipe) -> jax.Array:
    """Each copy's own expert's bias."""
    last = jnp.int32(bias_E.shape[0] - 1)
    m_M = jnp.arange(copies.choice_M.size, dtype=jnp.int32)
    is_behind_ME = jnp.cumsum(copies.sizes_E)[None, :] <= m_M[:, None]
    expert_M = jnp.sum(is_behind_ME, axis=1, dtype=jnp.int32)
    return bias_E[jnp.minimum(expert_M, last)].astype(recipe.accum)
