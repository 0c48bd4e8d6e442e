"""A chunk of the loss on a Hopper GPU: logits never exist, their exponentials do, once, in bf16.

With the target's logit ``t`` as each row's reference, the kernel writes ``M = exp(l - t)`` and
``S = sum_v M``: nll is ``log S``, and the logits' gradient is ``M`` times one number a row, but for
the target's element. Both matmuls of the backward read ``M`` as it is and take the number on their
narrow side. The target's element, where ``p - 1`` would cancel in bf16 and which carries most of
the gradient, is zeroed in ``M`` and added apart in fp32: one row of the table and one of its
gradient a token. Besides the three matmuls no pass touches [R, V].

Label smoothing adds the same number to the gradients of all of a row's logits: products with the
sum of the table's rows (``ChunkLoss.uniform_ZbC``). Where devices share the vocabulary, all begin
with the target's logit of the one that has it.

Dims: R row (a token), V vocabulary id, D model width.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import device

from .chunked import ChunkLoss, Static, logsumexp, over_shards
from .hopper_exponentials import DEFAULT, ROW_MULTIPLE, WIDTH_MULTIPLE, exponentials

TABLE_MULTIPLE = WIDTH_MULTIPLE
ROW_TILE = DEFAULT.block_r * DEFAULT.cluster  # a chunk of other lengths wastes part of a tile
# A row whose nll passes this many nats gets a higher reference and the chunk a second matmul: its
# exponentials near the end of fp32's range. A trained model's rows stay under 40.
HIGHEST = 60.0
RAISE = 80.0
MOST_RAISES = 32


def unsupported(
    hidden: jax.Array,
    *,
    num_devices: int,
    label_smoothing: float = 0.0,
    logit_soft_cap: float | None = None,
) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"{facts.kind} is not a Hopper GPU (compute capability 9.0)"
    if hidden.dtype != jnp.bfloat16:
        return f"hidden is {hidden.dtype}; exponentials need bfloat16's range"
    if hidden.shape[-1] % WIDTH_MULTIPLE:
        return f"width {hidden.shape[-1]} is not a multiple of {WIDTH_MULTIPLE}"
    if num_devices > 1:
        return f"the call is spread over {num_devices} devices and the kernel runs on one"
    if label_smoothing and logit_soft_cap is not None:
        return (
            f"label_smoothing={label_smoothing} with logit_soft_cap={logit_soft_cap} needs the sum "
            "of the capped logits"
        )
    return None


def chunk_loss(
    static: Static,
    table_VD: jax.Array,
    hidden_ZbCD: jax.Array,
    targets_ZbC: jax.Array,
    weights_ZbC: jax.Array,
    *,
    with_gradient: bool,
) -> ChunkLoss:
    """As ``xla.chunk_loss``, the gradient as a matrix and a scale a row."""
    shape = targets_ZbC.shape
    num_rows = math.prod(shape)
    pad = -num_rows % ROW_MULTIPLE
    x_RD = jnp.pad(hidden_ZbCD.reshape(num_rows, -1), ((0, pad), (0, 0)))
    targets_R, weights_R = (
        jnp.pad(y.reshape(num_rows), (0, pad)) for y in (targets_ZbC, weights_ZbC)
    )
    counted_R = weights_R != 0.0
    here_R = (targets_R >= 0) & (targets_R < static.num_ids)
    target_R, slope_R = _target_logit(
        static, x_RD, table_VD, jnp.clip(targets_R, 0, static.num_ids - 1)
    )
    exists_R = here_R
    if static.vocabulary_axes:
        target_R, exists_R = _of_the_device_that_has_it(static, target_R, here_R)
    matrix, sums_R, reference_R = _in_range(
        static, x_RD, table_VD, jnp.where(counted_R, target_R, jnp.inf), with_gradient
    )

    sums_R = jnp.where(counted_R, sums_R, 1.0)
    reference_R = jnp.where(counted_R, reference_R, 0.0)
    lse_R = reference_R + jnp.log(sums_R)
    if static.vocabulary_axes:
        # References may have risen on some devices and not on others.
        lse_R = logsumexp(lse_R, static.vocabulary_axes)
        sums_R = jnp.exp(lse_R - reference_R)
    nll_R = lse_R - jnp.where(exists_R, target_R, 0.0)
    # A row that does not count adds 0 whatever its nll is.
    nll_R = jnp.where(counted_R, weights_R * nll_R, 0.0)
    smoothing = static.label_smoothing
    smoothed_R = nll_R
    uniform_ZbC = None
    if smoothing:
        # (1 - s) nll + s (lse - mean of the logits); the mean is added where it is known.
        target_or_0_R = jnp.where(exists_R & counted_R, target_R, 0.0)
        smoothed_R = nll_R + smoothing * weights_R * target_or_0_R
        uniform_ZbC = -smoothing / static.num_ids_of_all * weights_ZbC
    penalty_R = static.z_loss * weights_R * lse_R**2

    def by_shard(y_R: jax.Array) -> jax.Array:
        return jnp.sum(y_R[:num_rows].reshape(shape), axis=(1, 2))

    losses = by_shard(smoothed_R + penalty_R), by_shard(nll_R)
    if not with_gradient:
        return ChunkLoss(*losses, uniform_ZbC=uniform_ZbC)

    # d total / d l = weight * (g * M / S - (1 - s) [v = target] - s / V) with g = 1 + 2 z lse.
    g_R = 1.0 + 2.0 * static.z_loss * lse_R
    scale_R = jnp.where(counted_R, weights_R * g_R / sums_R, 0.0)
    counts_R = here_R & counted_R
    probability_R = jnp.exp(jnp.where(counts_R, target_R - lse_R, 0.0))
    at_target_R = weights_R * slope_R * (g_R * probability_R - (1.0 - smoothing))
    coefficient_R = jnp.where(counts_R, at_target_R, 0.0)
    assert matrix is not None
    matrix = matrix.at[
        jnp.arange(matrix.shape[0]), jnp.where(counts_R, targets_R, matrix.shape[1])
    ].set(0, mode="drop", unique_indices=True)

    def unpad(y_R: jax.Array) -> jax.Array:
        return y_R[:num_rows].reshape(*shape, *y_R.shape[1:])

    return ChunkLoss(*losses, unpad(matrix), unpad(scale_R), unpad(coefficient_R), uniform_ZbC)


def _target_logit(
    static: Static, x_RD: jax.Array, table_VD: jax.Array, ids_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The capped logit of one id a row, and the cap's slope there; fp32."""
    rows_RD = jnp.take(table_VD, ids_R, axis=0).astype(jnp.float32)
    logit_R = jnp.sum(x_RD.astype(jnp.float32) * rows_RD, axis=-1)
    if static.logit_soft_cap is None:
        return logit_R, jnp.ones_like(logit_R)
    ratio_R = jnp.tanh(logit_R / static.logit_soft_cap)
    return static.logit_soft_cap * ratio_R, 1.0 - ratio_R**2


def _of_the_device_that_has_it(
    static: Static, logit_R: jax.Array, here_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The target's logit, and whether any device has it.

    Where none has, the mean of a logit of each: no higher than the logsumexp, so not all sums
    vanish.
    """
    at_target_R, found_R, any_R = over_shards(
        static,
        jnp.stack([jnp.where(here_R, logit_R, 0.0), here_R.astype(jnp.float32), logit_R]),
        lax.psum,
    )
    exists_R = found_R > 0.0
    mean_R = any_R / static.num_vocabulary_shards
    return jnp.where(exists_R, at_target_R, mean_R), exists_R


def _in_range(
    static: Static, x_RD: jax.Array, table_VD: jax.Array, reference_R: jax.Array, with_matrix: bool
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Exponentials, sums and the references with which no row's sum is too large.

    References rise as often as it takes, in practice never. A sum that stays infinite is one of
    infinite logits.
    """

    def compute(reference_R):
        return exponentials(
            x_RD, table_VD, reference_R, num_ids=static.num_ids,
            logit_soft_cap=static.logit_soft_cap, with_matrix=with_matrix,
        )  # fmt: skip

    def too_large(sums_R):
        return sums_R > math.exp(HIGHEST)

    def go_on(state):
        _, sums_R, _, raises = state
        return jnp.any(too_large(sums_R)) & (raises < MOST_RAISES)

    def again(state):
        _, sums_R, reference_R, raises = state
        reference_R = jnp.where(too_large(sums_R), reference_R + RAISE, reference_R)
        return *compute(reference_R), reference_R, raises + 1

    state = (*compute(reference_R), reference_R, jnp.int32(0))
    return lax.while_loop(go_on, again, state)[:3]
