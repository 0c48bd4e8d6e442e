"""The public function of linear attention: validates a call and chooses how to compute it.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.chosen import choose
from pallas_kernels.common.errors import InputError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.linear_attention.chunked import chunked
from pallas_kernels.linear_attention.hopper import gates, in_chunks, in_slots
from pallas_kernels.linear_attention.reference import one_token
from pallas_kernels.linear_attention.selective import selective


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    beta: jax.Array | None = None,
    rates: jax.Array | None = None,
    state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Computes causal linear attention with decay from a state: outputs and the state after them.

    With each token a head's state S decays to S' = exp(log_decay) S. With a ``beta`` (the gated
    delta rule, Yang et al. 2024) it becomes S' + k (beta (v - k^T S'))^T; without one (state
    spaces, Dao and Gu 2024) S' + k v^T. The token's output is q^T S. Memory is linear in T, also of
    the gradient, which exists for all arrays.

    Args:
        q, k: queries and keys, [B, T, N, H] of one floating dtype, not scaled or normalized here.
        v: values, [B, T, M, V] in the dtype of q. Value head m reads key head m N // M.
        log_decay: at most 0; [B, T, M], or [B, T, M, H] for a decay per channel of the keys.
        beta: how far a key's value is replaced, [B, T, M]; None: values are added.
        rates: factors of log_decay [B, T, M] for each channel of the keys, [M, H]; without a beta
            (selective state spaces, Gu and Dao 2023). None: decays are as given.
        state: state before the first token, [B, M, H, V]; None: zeros.
        segment_ids: documents of packed rows, int32 [B, T]. A document after the first of a row
            starts from zeros; the first one goes on from ``state``.
        implementation: "hopper" (Mosaic GPU; a decay per head, or per channel with a beta; bf16,
            keys of 128 channels and values of 64, 128 or 192) or "xla". "auto" takes "hopper" for
            supported calls of 64 tokens or more, else "xla". A kernel runs on one device: call it
            inside ``shard_map``, or name "xla".

    Returns:
        Outputs [B, T, M, V] in v's dtype, and the state [B, M, H, V] in fp32.

    Raises:
        InputError: shapes or dtypes that do not fit together, or an unknown implementation.
        UnsupportedError: the Hopper kernels are named and cannot compute this call.

    Examples:
        >>> q = k = v = jnp.ones((1, 3, 1, 1))
        >>> out, state = pallas_kernels.linear_attention(q, k, v, jnp.zeros((1, 3, 1)))
        >>> out[0, :, 0, 0]
        Array([1., 2., 3.], dtype=float32)
    """
    _check(q, k, v, log_decay, beta, rates)
    batch, length, _, width = q.shape
    shape = (batch, v.shape[2], width, v.shape[3])
    if state is None:
        state = jnp.zeros(shape, jnp.float32)
    if state.shape != shape:
        raise InputError(f"state {state.shape}: a matrix per row and value head; give {shape}")
    is_short = implementation == "auto" and length < gates.CHUNK
    chosen = choose(
        "linear attention", "xla" if is_short else implementation, ("hopper", "xla"),
        lambda: in_chunks.unsupported(q, v, log_decay, beta, rates),
    )  # fmt: skip
    if length == 1 and chosen == "xla":
        log_decay = log_decay if rates is None else log_decay[..., None] * rates[None, None]
        given = (q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], None if beta is None else beta[:, 0])
        out_BMV, state = one_token(state.astype(jnp.float32), *given)
        return out_BMV[:, None].astype(v.dtype), state
    document_BT = jnp.zeros((batch, length), jnp.int32)
    if segment_ids is not None:
        begins_BT = segment_ids[:, 1:] != segment_ids[:, :-1]
        document_BT = document_BT.at[:, 1:].set(jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32))
    if rates is not None:
        out, state = selective(q, k, v, log_decay, rates, state, document_BT)
        return out.astype(v.dtype), state
    if chosen == "hopper" and log_decay.ndim == 4:
        assert beta is not None, "unsupported"
        return in_chunks.by_channel(q, k, v, log_decay, beta, state, document_BT)
    if chosen == "hopper":
        return in_chunks.in_chunks(q, k, v, log_decay, beta, state, document_BT)
    out, state = chunked(q, k, v, log_decay, beta, state, document_BT)
    return out.astype(v.dtype), state


def linear_attention_in_slots(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    beta: jax.Array | None = None,
    rates: jax.Array | None = None,
    states: jax.Array,
    read: jax.Array,
    written: jax.Array | None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Computes ``linear_attention`` of rows whose states are in slots of one array.

    It has no gradient.

    Args:
        q, k, v, log_decay, beta, rates: as of ``linear_attention``.
        states: states of all slots, [S, M, H, V].
        read: slot that each row's state is read from, int32 [B].
        written: slot that the state after the tokens is written to, int32 [B]; a number of S or
            more writes nothing. None: no row writes. No row may write a slot that another one reads
            or writes.
        implementation: "hopper" (Mosaic GPU; up to 16 tokens, fp32 or bf16 states; reads and
            writes each state once, in place if the caller donates the array) or "xla" (which reads
            and writes copies of the states). "auto" takes "hopper" for supported calls. Rows of
            more tokens are computed as ``linear_attention`` computes them.

    Returns:
        Outputs [B, T, M, V] in v's dtype, and the states of all slots.

    Raises:
        InputError: shapes or dtypes that do not fit together, or an unknown implementation.
        UnsupportedError: the Hopper kernel is named and cannot compute this call.

    Examples:
        >>> q = k = v = jnp.ones((1, 1, 1, 1))
        >>> states, slot = jnp.zeros((2, 1, 1, 1)), jnp.ones(1, jnp.int32)
        >>> out, states = pallas_kernels.linear_attention_in_slots(
        ...     q, k, v, jnp.zeros((1, 1, 1)), states=states, read=slot, written=slot
        ... )
        >>> states.ravel()
        Array([0., 1.], dtype=float32)
    """
    _check(q, k, v, log_decay, beta, rates)
    _check_slots(q, v, states, (read,) if written is None else (read, written))
    chosen = choose(
        "linear attention in slots", implementation, ("hopper", "xla"),
        lambda: in_slots.unsupported(q, v, states, rates),
    )  # fmt: skip
    if chosen == "hopper":
        found = in_slots.in_slots(q, k, v, log_decay, beta, states, read, written)
        return without_gradient(found, _NO_GRADIENT)
    given = {"beta": beta, "rates": rates, "state": states[read]}
    out, state = linear_attention(q, k, v, log_decay, **given, implementation=implementation)
    if written is not None:
        states = states.at[written].set(state.astype(states.dtype), mode="drop")
    return without_gradient((out, states), _NO_GRADIENT)


def _check_slots(
    q: jax.Array, v: jax.Array, states: jax.Array, slots: tuple[jax.Array, ...]
) -> None:
    """Raises InputError for states or slots that do not fit the rows."""
    shape = (v.shape[2], q.shape[3], v.shape[3])
    if states.shape[1:] != shape:
        raise InputError(f"states {states.shape}: a matrix per slot and value head, [S, *{shape}]")
    if any(each.shape != q.shape[:1] for each in slots):
        raise InputError(f"slots of {[each.shape for each in slots]}: one per row, {q.shape[:1]}")


_NO_GRADIENT = "linear_attention_in_slots has no gradient; linear_attention has"


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    rates: jax.Array | None,
) -> None:
    """Raises InputError for arrays that do not fit together."""
    if q.ndim != 4 or q.shape != k.shape or v.ndim != 4 or q.shape[:2] != v.shape[:2]:
        raise InputError(
            f"q {q.shape}, k {k.shape} and v {v.shape}: q and k are [B, T, N, H] alike, v is "
            "[B, T, M, V] of the same tokens"
        )
    if not q.shape[1] or v.shape[2] % q.shape[2]:
        raise InputError(
            f"q {q.shape} and v {v.shape}: at least one token, and equally many value heads of "
            "each key head"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise InputError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give one floating dtype"
        )
    heads = v.shape[:3]
    if log_decay.shape not in (heads, (*heads, q.shape[3])):
        raise InputError(
            f"log_decay {log_decay.shape}: one per value head, {heads}, or one per channel of its "
            f"keys, {(*heads, q.shape[3])}"
        )
    if beta is not None and beta.shape != heads:
        raise InputError(f"beta {beta.shape}: one per value head; give {heads}")
    if rates is not None and (
        rates.shape != (v.shape[2], q.shape[3]) or log_decay.ndim != 3 or beta is not None
    ):
        raise InputError(
            f"rates {rates.shape}: one per channel of each value head's keys; give "
            f"{(v.shape[2], q.shape[3])}, a log_decay of {heads} and no beta"
        )
