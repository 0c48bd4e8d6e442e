"""Linear attention in chunks of positions, by matmuls that any backend has, with linear memory.

Within a chunk the delta rule is a triangular system (the WY form: Yang et al. 2024, "Parallelizing
linear transformers with the delta rule over sequence length"). Its solution for all chunks comes
first, side by side; then a scan hands the state from chunk to chunk. Both are computed again in
the backward pass, so that one state per chunk is kept and nothing of a chunk's width squared.

Dims: B batch, J chunk, i and j positions within a chunk, N key heads, G value heads of a key head,
H key width, V value width, X 1 or H: a decay for all of a key's channels, or for each.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.dot import einsum_f32

CHUNK = 64
"""Most positions of a chunk; a chunk's own work grows with it, and the number of states shrinks."""
_NEAR = 8
"""Most positions of a block whose pairs have a factor for each channel."""
_TOGETHER = 8
"""Number of chunks whose near pairs' factors take room at a time."""


class _Chunk(NamedTuple):
    """Arrays of one chunk that the scan needs besides the state that enters the chunk."""

    read_BiNGH: jax.Array  # queries, decayed from the chunk's beginning
    weights_BNGij: jax.Array  # of this chunk's own values in its outputs
    values_BiNGV: jax.Array  # that the chunk adds if it starts from a state of zeros
    removed_BiNGH: jax.Array | None  # keys of what the entering state takes from the values
    written_BiNGH: jax.Array  # keys, decayed to the chunk's end
    decay_BNGX: jax.Array  # of the entering state over the whole chunk


def chunked(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    log_decay: jax.Array,
    beta_BTM: jax.Array | None,
    state_BMHV: jax.Array,
    document_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``reference`` in chunks: fp32 outputs [B, T, M, V] and the state after the last.

    Operands of matmuls are rounded to the dtype of q, sums are fp32; the triangular systems are
    solved in fp32.
    """
    batch, length, num_keys, width = q_BTNH.shape
    size = min(CHUNK, length)
    num_chunks = -(-length // size)
    padding = num_chunks * size - length

    def cut(x: jax.Array, *dims: int, mode: str = "constant") -> jax.Array:
        """The chunks in front, [J, B, i, ...]; of padding zeros, which add nothing to a state."""
        ends = ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2))
        x = jnp.pad(x, ends, mode=mode).reshape(batch, num_chunks, size, *dims)
        return jnp.moveaxis(x, 1, 0)

    heads = (num_keys, v_BTMV.shape[2] // num_keys)
    q, k, v = cut(q_BTNH, num_keys, width), cut(k_BTNH, num_keys, width), cut(v_BTMV, *heads, -1)
    log = cut(log_decay.astype(jnp.float32), *heads, -1)
    beta = None if beta_BTM is None else cut(beta_BTM.astype(jnp.float32), *heads)
    document = cut(document_BT, mode="edge")
    before_JB = jnp.concatenate([jnp.zeros_like(document[:1, :, -1]), document[:-1, :, -1]])
    prepare = jax.checkpoint(_prepared)
    arrays = (q, k, v, log, beta, document, before_JB)
    if log.shape[-1] == 1:
        chunks = jax.vmap(prepare)(*arrays)
    else:
        # Near pairs of positions have a factor per channel: only a few chunks' may take room.
        chunks = jax.lax.map(lambda each: prepare(*each), arrays, batch_size=_TOGETHER)
    state_BNGHV = state_BMHV.astype(jnp.float32).reshape(batch, *heads, width, -1)
    step = jax.checkpoint(functools.partial(_step, dtype=q_BTNH.dtype))
    state_BNGHV, out = jax.lax.scan(step, state_BNGHV, chunks)
    out_BTMV = jnp.moveaxis(out, 0, 1).reshape(batch, num_chunks * size, *v_BTMV.shape[2:])
    return out_BTMV[:, :length], state_BNGHV.reshape(state_BMHV.shape)


def _prepared(
    q_BiNH: jax.Array,
    k_BiNH: jax.Array,
    v_BiNGV: jax.Array,
    log_BiNGX: jax.Array,
    beta_BiNG: jax.Array | None,
    document_Bi: jax.Array,
    before_B: jax.Array,
) -> _Chunk:
    """Computes what of a chunk does not depend on the state that enters it.

    Args:
        before_B: document of the token before the chunk.
    """
    size = q_BiNH.shape[1]
    sum_BiNGX = jnp.cumsum(log_BiNGX, axis=1)
    is_same_Bij = document_Bi[:, :, None] == document_Bi[:, None, :]
    visible_B11ij = (is_same_Bij & jnp.tri(size, dtype=bool)[None])[:, None, None]
    weights_BNGij = _decayed_products(q_BiNH, k_BiNH, sum_BiNGX, visible_B11ij)
    goes_on = (document_Bi == before_B[:, None])[:, :, None, None, None]
    is_last = (document_Bi == document_Bi[:, -1:])[:, :, None, None, None]
    entered_BiNGX = jnp.exp(jnp.where(goes_on, sum_BiNGX, -jnp.inf))
    left_BiNGX = jnp.exp(jnp.where(is_last, sum_BiNGX[:, -1:] - sum_BiNGX, -jnp.inf))
    k_BiNGH, q_BiNGH = (x.astype(jnp.float32)[:, :, :, None] for x in (k_BiNH, q_BiNH))
    values_BiNGV, removed_BiNGH = v_BiNGV.astype(jnp.float32), None
    if beta_BiNG is not None:
        keys_BNGij = _decayed_products(k_BiNH, k_BiNH, sum_BiNGX, visible_B11ij)
        beta_BNGi1 = jnp.moveaxis(beta_BiNG, 1, -1)[..., None]
        # The solver takes the diagonal for ones, and does not read what is above it.
        wanted = jnp.concatenate([values_BiNGV, entered_BiNGX * k_BiNGH], axis=-1)
        solved = jax.scipy.linalg.solve_triangular(
            beta_BNGi1 * keys_BNGij,
            beta_BNGi1 * jnp.moveaxis(wanted, 1, -2),
            lower=True,
            unit_diagonal=True,
        )
        solved = jnp.moveaxis(solved, -2, 1)
        values_BiNGV, removed_BiNGH = jnp.split(solved, [v_BiNGV.shape[-1]], axis=-1)
    return _Chunk(
        read_BiNGH=entered_BiNGX * q_BiNGH,
        weights_BNGij=weights_BNGij,
        values_BiNGV=values_BiNGV,
        removed_BiNGH=removed_BiNGH,
        written_BiNGH=left_BiNGX * k_BiNGH,
        decay_BNGX=entered_BiNGX[:, -1],
    )


def _decayed_products(
    a_BiNH: jax.Array, b_BjNH: jax.Array, sum_BiNGX: jax.Array, visible_B11ij: jax.Array
) -> jax.Array:
    """Products of visible pairs, decayed from j to i: fp32 [B, N, G, i, j], else 0."""
    sum_BNGiX = jnp.moveaxis(sum_BiNGX, 1, -2)
    if sum_BNGiX.shape[-1] == 1:
        # The differences first: exp of either sum alone may overflow.
        passed_BNGij = sum_BNGiX - jnp.swapaxes(sum_BNGiX, -2, -1)
        decay_BNGij = jnp.exp(jnp.where(visible_B11ij, passed_BNGij, -jnp.inf))
        return einsum_f32("BiNH,BjNH->BNij", a_BiNH, b_BjNH)[:, :, None] * decay_BNGij
    a_BNGiH, b_BNGjH = (jnp.moveaxis(x, 1, 2)[:, :, None] for x in (a_BiNH, b_BjNH))
    return jnp.where(visible_B11ij, _of_channels(a_BNGiH, b_BNGjH, sum_BNGiX), 0.0)


def _of_channels(a_BNGiH: jax.Array, b_BNGjH: jax.Array, sum_BNGiH: jax.Array) -> jax.Array:
    """Products of pairs j <= i whose channels decay from j to i, fp32 [B, N, G, i, j]; others 0.

    Pairs of the block's two halves are a matmul: from the sum between the halves, the decays of
    both operands are at most 1. Pairs within a half are found alike, those of few positions one by
    one, as their factors from one place could be out of range.
    """
    size = sum_BNGiH.shape[-2]
    if size <= _NEAR:
        passed_BNGijH = sum_BNGiH[..., :, None, :] - sum_BNGiH[..., None, :, :]
        is_before_ij1 = jnp.tri(size, dtype=bool)[:, :, None]
        decay_BNGijH = jnp.exp(jnp.where(is_before_ij1, passed_BNGijH, -jnp.inf))
        a, b = (x.astype(jnp.float32) for x in (a_BNGiH, b_BNGjH))
        return jnp.sum(a[..., :, None, :] * b[..., None, :, :] * decay_BNGijH, axis=-1)
    half, dtype = size // 2, a_BNGiH.dtype
    between = sum_BNGiH[..., half - 1 : half, :]
    (first_a, last_a), (first_b, last_b), (first_sum, last_sum) = (
        (x[..., :half, :], x[..., half:, :]) for x in (a_BNGiH, b_BNGjH, sum_BNGiH)
    )
    read = (last_a.astype(jnp.float32) * jnp.exp(last_sum - between)).astype(dtype)
    written = (first_b.astype(jnp.float32) * jnp.exp(between - first_sum)).astype(dtype)
    across = einsum_f32("BNGiH,BNGjH->BNGij", read, written)
    first = _of_channels(first_a, first_b, first_sum)
    last = _of_channels(last_a, last_b, last_sum)
    before = jnp.pad(first, [(0, 0)] * (first.ndim - 1) + [(0, size - half)])
    return jnp.concatenate([before, jnp.concatenate([across, last], axis=-1)], axis=-2)


def _step(
    state_BNGHV: jax.Array, chunk: _Chunk, *, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns the state after a chunk, and the chunk's outputs [B, i, N, G, V]."""

    def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return einsum_f32(spec, a.astype(dtype), b.astype(dtype))

    values_BiNGV = chunk.values_BiNGV
    if chunk.removed_BiNGH is not None:
        values_BiNGV -= dot("BiNGH,BNGHV->BiNGV", chunk.removed_BiNGH, state_BNGHV)
    out_BiNGV = dot("BiNGH,BNGHV->BiNGV", chunk.read_BiNGH, state_BNGHV)
    out_BiNGV += dot("BNGij,BjNGV->BiNGV", chunk.weights_BNGij, values_BiNGV)
    state_BNGHV = state_BNGHV * chunk.decay_BNGX[..., None]
    state_BNGHV += dot("BjNGH,BjNGV->BNGHV", chunk.written_BiNGH, values_BiNGV)
    return state_BNGHV, out_BiNGV
