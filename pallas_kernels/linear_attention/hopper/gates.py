"""Numbers of each token that the Hopper kernels of the gated delta rule read beside q, k and v.

Dims: B batch, T position, M value head, J chunk, i position within a chunk, G gate.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import mgpu, mgpu_utils, plgpu
from pallas_kernels.hopper.tile import LOG2E, column_layout, row_layout, tile_layout

CHUNK = 64
"""Positions of a chunk: the rows of a WGMMA tile."""


class Gate(enum.IntEnum):
    """Rows of ``gates``."""

    SUM = 0  # logarithms of decay, base 2, summed from the chunk's first token to this one
    BETA = 1
    ENTERED = 2  # decay from the state that enters the chunk to this token; 0 in a new document
    FIRST = 3  # place in the chunk of the first token of this token's document
    WRITTEN = 4  # beta times decay to the chunk's end; 0 if the document ends before


def by_chunks(x_BT_: jax.Array) -> jax.Array:
    """Reshapes [B, T, ...] to [B, ..., J, i]; T must be a multiple of 64."""
    chunks = x_BT_.reshape(len(x_BT_), -1, CHUNK, *x_BT_.shape[2:])
    return jnp.moveaxis(chunks, (1, 2), (-2, -1))


_LEAST_BETA = 2.0**-100
"""Stands for a beta of 0, by which the backward pass divides: it adds less than rounding does."""


def gates(
    log_decay_BTM: jax.Array | None, beta_BTM: jax.Array | None, document_BT: jax.Array
) -> jax.Array:
    """Computes fp32 [B, M, J, G, 64]; T must be a multiple of 64.

    Args:
        log_decay_BTM: None: heads have no decay.
        beta_BTM: None: all are 1. Not both may be None.
        document_BT: number of each token's document in its row, from 0 on; 0 goes on from the
            given state.
    """

    sum_BMJi = beta_BMJi = None
    if log_decay_BTM is not None:
        sum_BMJi = jnp.cumsum(by_chunks(log_decay_BTM.astype(jnp.float32)), axis=-1)
    if beta_BTM is not None:
        beta_BMJi = jnp.maximum(by_chunks(beta_BTM.astype(jnp.float32)), _LEAST_BETA)
    # Else XLA would transpose once per gate, and element by element.
    sum_BMJi, beta_BMJi = lax.optimization_barrier((sum_BMJi, beta_BMJi))
    sum_BMJi = jnp.zeros_like(beta_BMJi) if sum_BMJi is None else sum_BMJi
    beta_BMJi = jnp.ones_like(sum_BMJi) if beta_BMJi is None else beta_BMJi
    document_BJi = by_chunks(document_BT)
    last_BJ = document_BJi[..., -1]
    before_BJ1 = jnp.pad(last_BJ[:, :-1], ((0, 0), (1, 0)))[..., None]
    goes_on_B1Ji = (document_BJi == before_BJ1)[:, None]
    is_last_B1Ji = (document_BJi == last_BJ[..., None])[:, None]
    is_earlier_BJij = document_BJi[..., None, :] < document_BJi[..., :, None]
    first_B1Ji = jnp.sum(is_earlier_BJij, axis=-1, dtype=jnp.float32)[:, None]
    left_BMJi = jnp.exp(jnp.where(is_last_B1Ji, sum_BMJi[..., -1:] - sum_BMJi, -jnp.inf))
    rows = {
        Gate.SUM: sum_BMJi * LOG2E,
        Gate.BETA: beta_BMJi,
        Gate.ENTERED: jnp.exp(jnp.where(goes_on_B1Ji, sum_BMJi, -jnp.inf)),
        Gate.FIRST: jnp.broadcast_to(first_B1Ji, sum_BMJi.shape),
        Gate.WRITTEN: beta_BMJi * left_BMJi,
    }
    return jnp.stack([rows[gate] for gate in Gate], axis=-2)


def load_gate(gates, gate: Gate, layout: Any) -> jax.Array:
    """Loads a gate's 64 numbers from a value head's gates in shared memory, [G, 64]."""
    return load_numbers(gates, CHUNK, layout, row=int(gate))


def load_numbers(numbers, count: int, layout: Any, *, row: int | None = None) -> jax.Array:
    """Loads fp32 numbers, or a row of them, from shared memory."""

    # ``plgpu.load`` would be the same, but Pallas's search for layouts does not end with several.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=layout),
    )
    def load(_, numbers):
        if row is not None:
            numbers = mgpu_utils.memref_slice(numbers, (row,))
        return mgpu.FragmentedArray.load_untiled(numbers, layout=layout.to_mgpu(), optimized=False)

    return load(numbers)


def passed(gates, *, is_strict: bool, by_reader: bool = False) -> jax.Array:
    """Computes, in a kernel, the decay from each token j (rows) to token i (columns) of a chunk.

    It is 0 where i does not see j: an earlier token of its document or, unless ``is_strict``,
    itself.

    Args:
        gates: a value head's gates of the chunk in shared memory, [G, 64].
        by_reader: transposes the result: i in rows.
    """
    shape, tile = (CHUNK, CHUNK), tile_layout()
    of_j, of_i = (row_layout(), column_layout())[:: -1 if by_reader else 1]
    kinds = (of_j, of_i, of_i)
    j, i = (1, 0) if by_reader else (0, 1)

    @plgpu.inline_mgpu(
        arg_types=kinds, return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=tile)
    )
    def decay(_, sum_j, sum_i, first_i):
        layout, f32 = tile.to_mgpu(), ir.F32Type.get()
        sum_j = sum_j.broadcast_in_dim(shape, (j,), layout)
        sum_i, first_i = (x.broadcast_in_dim(shape, (i,), layout) for x in (sum_i, first_i))
        place_j, place_i = (
            mgpu.FragmentedArray.broadcasted_iota(f32, shape, dim, layout) for dim in (j, i)
        )
        is_earlier = place_j < place_i if is_strict else place_j <= place_i
        is_seen = is_earlier & (place_j >= first_i)
        passed = (sum_i - sum_j).exp2(approx=True)
        zero = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, layout)
        return is_seen.select(passed, zero)

    rows = (Gate.SUM, Gate.SUM, Gate.FIRST)
    return decay(*(load_gate(gates, row, k) for row, k in zip(rows, kinds, strict=True)))
