"""The operands of the backward kernels, and their base class.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.spec import BackwardOperands
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.odd_tiles import GROUP
from pallas_kernels.hopper.tile import LOG2E

from .kernel import AttentionKernel
from .tiles import Geometry, TileRange, geometry_of, key_tile_of, pad_rows, query_tiles, token_ids

LEAST_BLOCKS = 3 * NUM_PROCESSORS


def kernel_operands(
    o: BackwardOperands, *, q_tile: int, kv_tile: int, padded: bool
) -> dict[str, Any]:
    """Returns a backward kernel's operands by name, with ids and tile ranges if tokens have ids.

    The operand ``ranges`` lists, for each key tile, the query tiles that its block visits.

    Args:
        o: the backward pass's operands.
        q_tile, kv_tile: lengths of the kernel's tiles.
        padded: whether to pad lengths to multiples of 8.
    """
    g = geometry_of(o.q, o.v)
    lse2, delta = row_statistics(o, -(-g.T // q_tile) * q_tile)
    q, k, v, d_out = (pad_rows(x) if padded else x for x in (o.q, o.k, o.v, o.d_out))
    operands = {"q": q, "k": k, "v": v, "do": d_out, "lse": lse2, "delta": delta}
    return operands | token_ids(o.masks, g, q_tile=q_tile, kv_tile=kv_tile, by_keys=True)


def row_statistics(o: BackwardOperands, padded: int) -> tuple[jax.Array, jax.Array]:
    """Returns two statistics per query [B, N, padded]: logsumexp in log2 units, and delta.

    delta = dO . O - d_lse; with P = exp(S - lse) and dP = dO V', dS = P * (dP - delta).
    """
    delta = jnp.einsum("btnh,btnh->bnt", o.out.astype(jnp.float32), o.d_out.astype(jnp.float32))
    if o.d_lse is not None:
        delta = delta - o.d_lse.swapaxes(1, 2)
    # exp2(s - inf) = 0: rows without keys and rows past the end have no probabilities. Nor may the
    # cotangent of their logsumexp of -inf matter, which can be NaN.
    empty = jnp.isneginf(o.lse).swapaxes(1, 2)
    delta = jnp.where(empty, 0.0, delta)
    lse2 = jnp.where(empty, jnp.inf, o.lse.swapaxes(1, 2) * LOG2E)
    pad = ((0, 0), (0, 0), (0, padded - lse2.shape[2]))
    return jnp.pad(lse2, pad, constant_values=jnp.inf), jnp.pad(delta, pad)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardKernel(AttentionKernel):
    """Backward kernel whose blocks own key tiles and add to dQ in global memory.

    The query heads of a key/value head may be split into parts with blocks of their own
    (``split_heads``); ``g.K`` then counts the head once per part.
    """

    parts: int = 1

    def shared(self, kv_head: jax.Array) -> jax.Array:
        """Returns the head of k and v for ``kv_head``, which counts each head once per part."""
        return lax.div(kv_head, self.parts) if self.parts > 1 else kv_head

    def place(self, gmem) -> tuple[jax.Array, jax.Array, jax.Array, TileRange]:
        """Returns this block's batch entry, key/value head, key tile and range of query tiles."""
        b, kv_head, k_tile = key_tile_of(lax.axis_index("tile"), self.g, self.num_k_tiles)
        queries = query_tiles(self.spec, self.g, k_tile * self.kv_tile, self.kv_tile, self.q_tile)
        if self.segmented:
            queries = queries.meet(gmem.ranges, b, k_tile)
        return b, kv_head, k_tile, queries.ordered(at_least_one=False)

    def load_keys(self, gmem, smem, b, kv_head, key0, which: int) -> None:
        """Starts the copies of the block's keys and values; ``which`` is the keys' barrier."""
        place = (b, key0, self.shared(kv_head))
        self.load_tile(smem, self.odd_keys, gmem.k, place, smem.k.at[0], smem.kv_full, which)
        self.load_tile(smem, self.odd_keys, gmem.v, place, smem.v.at[0], smem.kv_full, which + 1)

    def wait_keys(self, smem, which: int) -> None:
        """Waits until the block's keys and values are in shared memory."""
        plgpu.barrier_wait(smem.kv_full)
        for i in range(2):
            self.wait_tile(smem, self.odd_keys, which + i, 0)

    def send_dq(self, buffer, gmem, k_tile, index: tuple) -> None:
        """Adds a buffer to float32 dQ in global memory; the interpreter has a dQ per key tile."""
        if self.interpretable:
            plgpu.copy_smem_to_gmem(buffer, gmem.dq.at[k_tile, *index])
        else:
            plgpu.copy_smem_to_gmem(buffer, gmem.dq.at[index], reduction_op="add")

    def gradients(
        self, operands: dict[str, Any], *, num_threads: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes dQ, dK and dV in the operands' dtype.

        An interpretable kernel cannot add to global memory: it writes a dQ for each key tile.
        """
        g, q, k, v = self.g, operands["q"], operands["k"], operands["v"]
        rows = -(-g.T // GROUP) * GROUP
        copies = (self.num_k_tiles,) if self.interpretable else ()
        # Zeros that wait for this call's operands: XLA would fill those of all unrolled layers in
        # one fusion before the first, 2 GiB at once in a step of 16 layers.
        zero, _ = jax.lax.optimization_barrier((jnp.float32(0.0), operands["do"]))
        dq = jax.new_ref(jnp.full((*copies, g.B, rows, g.N, g.H), zero, jnp.float32))
        found = self.launch(
            {**operands, "dq": dq},
            {"dk": self.of_parts(k), "dv": self.of_parts(v)},
            num_tiles=self.num_k_tiles * g.B * g.K,
            num_threads=num_threads,
        )
        total = dq[...].sum(axis=0) if self.interpretable else dq[...]
        return (
            (total[:, : g.T] * self.spec.scale).astype(q.dtype),
            self.summed(found["dk"][:, : g.S]),
            self.summed(found["dv"][:, : g.S]),
        )

    def of_parts(self, x: jax.Array) -> jax.core.ShapedArray:
        """Returns shape and dtype of the gradient of keys or values before its sum over parts."""
        like = jax.typeof(x)
        return like.update(shape=(*x.shape[:2], self.g.K, x.shape[3]))

    def summed(self, gradient: jax.Array) -> jax.Array:
        """Sums a gradient over the parts of heads: [B, S, K parts, H] to [B, S, K, H]."""
        if self.parts == 1:
            return gradient
        B, S, _, width = gradient.shape
        whole = gradient.reshape(B, S, -1, self.parts, width).astype(jnp.float32).sum(axis=3)
        return whole.astype(self.dtype)


def split_heads(g: Geometry, kv_tile: int) -> tuple[Geometry, int]:
    """Splits a kv head's query heads into parts with own blocks: (geometry, number of parts).

    With few key tiles, some SMs would otherwise be idle, or under a causal mask have a long block.
    """
    blocks = g.B * g.K * -(-g.S // kv_tile)
    divisors = [n for n in range(1, g.group + 1) if g.group % n == 0]
    parts = next((n for n in divisors if n * blocks >= LEAST_BLOCKS), g.group)
    return dataclasses.replace(g, K=g.K * parts), parts
