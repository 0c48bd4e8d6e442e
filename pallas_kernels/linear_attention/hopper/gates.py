"""Numbers of each token that the Hopper kernels of the gated delta rule read beside q, k and v.

Dims: B batch, T position, M value head, J chunk, i position within a chunk, G gate.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
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
    LEFT = 3  # decay from this token to the chunk's end; 0 if its document ends before
    FIRST = 4  # place in the chunk of the first token of this token's document


def gates(log_decay_BTM: jax.Array, beta_BTM: jax.Array, document_BT: jax.Array) -> jax.Array:
    """Computes fp32 [B, M, J, G, 64]; T must be a multiple of 64.

    Args:
        document_BT: number of each token's document in its row, from 0 on; 0 goes on from the
            given state.
    """

    def cut(x_BT_: jax.Array) -> jax.Array:
        """[B, T, ...] as [B, ..., J, i]."""
        chunks = x_BT_.reshape(len(x_BT_), -1, CHUNK, *x_BT_.shape[2:])
        return jnp.moveaxis(chunks, (1, 2), (-2, -1))

    sum_BMJi = jnp.cumsum(cut(log_decay_BTM.astype(jnp.float32)), axis=-1)
    document_BJi = cut(document_BT)
    last_BJ = document_BJi[..., -1]
    before_BJ1 = jnp.pad(last_BJ[:, :-1], ((0, 0), (1, 0)))[..., None]
    goes_on_B1Ji = (document_BJi == before_BJ1)[:, None]
    is_last_B1Ji = (document_BJi == last_BJ[..., None])[:, None]
    is_earlier_BJij = document_BJi[..., None, :] < document_BJi[..., :, None]
    first_B1Ji = jnp.sum(is_earlier_BJij, axis=-1, dtype=jnp.float32)[:, None]
    rows = {
        Gate.SUM: sum_BMJi * LOG2E,
        Gate.BETA: cut(beta_BTM.astype(jnp.float32)),
        Gate.ENTERED: jnp.exp(jnp.where(goes_on_B1Ji, sum_BMJi, -jnp.inf)),
        Gate.LEFT: jnp.exp(jnp.where(is_last_B1Ji, sum_BMJi[..., -1:] - sum_BMJi, -jnp.inf)),
        Gate.FIRST: jnp.broadcast_to(first_B1Ji, sum_BMJi.shape),
    }
    return jnp.stack([rows[gate] for gate in Gate], axis=-2)


def load_gate(gates, gate: Gate, layout: Any) -> jax.Array:
    """Loads a gate's 64 numbers from a value head's gates in shared memory, [G, 64]."""

    # ``plgpu.load`` would be the same, but Pallas's search for layouts does not end with several.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((CHUNK,), jnp.float32, layout=layout),
    )
    def load(_, gates):
        row = mgpu_utils.memref_slice(gates, (int(gate),))
        return mgpu.FragmentedArray.load_untiled(row, layout=layout.to_mgpu(), optimized=False)

    return load(gates)


def passed(gates, *, is_strict: bool) -> jax.Array:
    """Computes, in a kernel, the decay from each token j (rows) to token i (columns) of a chunk.

    It is 0 where i does not see j: an earlier token of its document or, unless ``is_strict``,
    itself.

    Args:
        gates: a value head's gates of the chunk in shared memory, [G, 64].
    """
    shape, tile = (CHUNK, CHUNK), tile_layout()
    kinds = (row_layout(), column_layout(), column_layout())

    @plgpu.inline_mgpu(
        arg_types=kinds, return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=tile)
    )
    def decay(_, sum_j, sum_i, first_i):
        layout, f32 = tile.to_mgpu(), ir.F32Type.get()
        sum_j = sum_j.broadcast_in_dim(shape, (0,), layout)
        sum_i, first_i = (x.broadcast_in_dim(shape, (1,), layout) for x in (sum_i, first_i))
        row, column = (
            mgpu.FragmentedArray.broadcasted_iota(f32, shape, dim, layout) for dim in (0, 1)
        )
        is_seen = ((row < column) if is_strict else (row <= column)) & (row >= first_i)
        passed = (sum_i - sum_j).exp2(approx=True)
        zero = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), shape, layout)
        return is_seen.select(passed, zero)

    rows = (Gate.SUM, Gate.SUM, Gate.FIRST)
    return decay(*(load_gate(gates, row, k) for row, k in zip(rows, kinds, strict=True)))
