"""The prefix of the most likely tokens that top-k and top-p keep, found without a sort.

Tokens are ordered by logit, lower ids first among equals. A prefix of that order is a least logit
and a number of tokens that have exactly it, and both are found by search: logits become integers
of the same order, of which each pass over the vocabulary settles three bits.

Dims: B batch, V vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_BITS = 3  # of the searched number that a round settles


def kept_tokens(
    scaled_BV: Float[Array, "B V"], top_k_B: Int[Array, "B"], top_p_B: Float[Array, "B"]
) -> Bool[Array, "B V"]:
    """Which tokens top-k keeps, and top-p among those: exactly as many, whatever ties there are.

    Top-p keeps the fewest tokens whose probabilities, of what top-k left, sum to p or more.
    Probabilities are summed in fp32.

    Args:
        scaled_BV: fp32 logits over the temperature, at most 0, the largest of a row 0.
        top_k_B: 0 keeps all.
        top_p_B: 1 or more keeps all that top-k left.
    """
    batch, num_ids = scaled_BV.shape
    order_BV = _ordered(scaled_BV)
    weight_BV = jnp.exp(scaled_BV)
    k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, num_ids), num_ids)

    def counts(bounds: list[jax.Array]) -> list[jax.Array]:
        """Of the tokens from each of these logits on."""
        return _row_sums([(order_BV >= each[:, None]).astype(jnp.int32) for each in bounds])

    def reach_k(bounds: list[jax.Array]) -> list[jax.Array]:
        return [count_B >= k_B for count_B in counts(bounds)]

    least_k_B = _largest(reach_k, batch=batch, num_bits=32)
    (above_k_B,) = counts([least_k_B + 1])
    ties_k_B = k_B - above_k_B
    tied_B = jnp.max(jnp.where(order_BV == least_k_B[:, None], weight_BV, 0), axis=1)
    tied_B = tied_B * ties_k_B.astype(tied_B.dtype)

    def masses(bounds: list[jax.Array]) -> list[jax.Array]:
        """Of the tokens from each of these logits on that top-k left."""
        above = [jnp.maximum(each, least_k_B + 1)[:, None] for each in bounds]
        sums = _row_sums([jnp.where(order_BV >= each, weight_BV, 0) for each in above])
        with_ties = [jnp.where(each <= least_k_B, tied_B, 0) for each in bounds]
        return [sum_B + ties_B for sum_B, ties_B in zip(sums, with_ties, strict=True)]

    (whole_B,) = masses([jnp.zeros_like(least_k_B)])
    target_B = top_p_B * whole_B

    def reach_p(bounds: list[jax.Array]) -> list[jax.Array]:
        return [mass_B >= target_B for mass_B in masses(bounds)]

    # Not below top-k's: from there down nothing is added.
    least_p_B = _largest(reach_p, batch=batch, num_bits=32)
    weight_B = jnp.max(jnp.where(order_BV == least_p_B[:, None], weight_BV, 0), axis=1)
    (above_p_B,) = masses([least_p_B + 1])
    ties_p_B = jnp.maximum(jnp.ceil((target_B - above_p_B) / weight_B), 1).astype(jnp.int32)
    # A quotient may round up beyond what top-k left.
    ties_p_B = jnp.where(least_p_B == least_k_B, jnp.minimum(ties_p_B, ties_k_B), ties_p_B)
    is_all_B = top_p_B >= 1
    return _prefix(
        order_BV,
        jnp.where(is_all_B, least_k_B, least_p_B),
        jnp.where(is_all_B, ties_k_B, ties_p_B),
    )


def _ordered(scaled_BV: jax.Array) -> UInt32[Array, "B V"]:
    """Integers of the same order as these numbers, equal for equal ones; below the largest."""
    # 0 has two signs.
    scaled_BV = jnp.where(scaled_BV == 0, 0, scaled_BV)
    bits_BV = jax.lax.bitcast_convert_type(scaled_BV, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits_BV >= sign, ~bits_BV, bits_BV | sign)


def _prefix(order_BV: jax.Array, least_B: jax.Array, ties_B: jax.Array) -> Bool[Array, "B V"]:
    """What lies above a number, and the first few that equal it."""
    batch, num_ids = order_BV.shape
    ids_V = jnp.arange(num_ids, dtype=jnp.uint32)[None]
    is_tied_BV = order_BV == least_B[:, None]

    def fit(ends: list[jax.Array]) -> list[jax.Array]:
        """Whether no more than asked for lie before these ids."""
        before = [is_tied_BV & (ids_V < end_B[:, None]) for end_B in ends]
        return [n_B <= ties_B for n_B in _row_sums([each.astype(jnp.int32) for each in before])]

    end_B = _largest(fit, batch=batch, num_bits=num_ids.bit_length())
    return (order_BV > least_B[:, None]) | (is_tied_BV & (ids_V < end_B[:, None]))


def _largest(
    hold: Callable[[list[jax.Array]], list[jax.Array]], *, batch: int, num_bits: int
) -> UInt32[Array, "B"]:
    """The largest number of so many bits for which a condition holds, of every row.

    Args:
        hold: several uint32 [B] -> bool [B] of each; true for 0, and false from some number on.
    """
    num_rounds = -(-num_bits // _BITS)

    def settle(i: jax.Array, found_B: jax.Array) -> jax.Array:
        shift = (_BITS * (num_rounds - 1 - i)).astype(jnp.uint32)
        steps = [jnp.uint32(j) << shift for j in range(1, 1 << _BITS)]
        held = hold([found_B + step for step in steps])
        # The first round may try numbers of more than 32 bits.
        fits = [step >> shift == j for j, step in enumerate(steps, start=1)]
        passed = [(each & fit).astype(jnp.uint32) for each, fit in zip(held, fits, strict=True)]
        return found_B + (sum(passed[1:], passed[0]) << shift)

    return jax.lax.fori_loop(0, num_rounds, settle, jnp.zeros(batch, jnp.uint32))


def _row_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """The sum over the last dim of each of these [B, V] arrays, in one pass over all of them.

    As reductions of their own they are two kernels each on a GPU.
    """
    zeros = [jnp.zeros((), each.dtype) for each in arrays]

    def add(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(a + b for a, b in zip(first, second, strict=True))

    return [*jax.lax.reduce(tuple(arrays), tuple(zeros), add, (1,))]
