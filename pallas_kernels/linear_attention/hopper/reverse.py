"""Cotangents of the gated delta rule from the last chunk to the first.

With ' for the transpose, T from ``inverse``, P of the base class and dS the cotangent of the state
that leaves a chunk, the chunk computes

    dY' = dO' P + written * (dS' K'),   dR' = dY' T,
    dS' <- decay dS' + (entered * dO') Q - (entered * dR') K,

of which dR is the cotangent of the values. Without the delta rule dR is dY, and nothing is
subtracted.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu

from .chunks import COLUMNS, ChunkKernel, ChunkStep, kept_keys, keys_of, queries_of, read
from .gates import CHUNK, Gate
from .scan import ChunkOperands, states_buffer, write_state


def cotangents(operands: ChunkOperands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes cotangents of states and values.

    Args:
        operands: as of ``ChunkKernel``: values are the outputs' cotangent, and "start" is that of
            the last state.

    Returns:
        Cotangents of the states that leave the chunks, bf16 [B, M, J, V, H], of the values, bf16
        [B, T, M, V], and of the first state, fp32 [B, M, V, H].
    """
    values, (_, num_values, value_width, width) = operands["values"], operands["start"].shape
    batch, length = values.shape[:2]
    shape = (batch, num_values, length // CHUNK, value_width, width)
    found = _Cotangents.run(
        operands,
        out=jax.ShapeDtypeStruct(values.shape, values.dtype),
        states=jax.ShapeDtypeStruct(shape, values.dtype),
    )
    return found["states"], found["out"], found["end"]


class _Cotangents(ChunkKernel):
    """The kernel of cotangents."""

    name: ClassVar[str] = "delta_cotangents"
    is_reversed: ClassVar[bool] = True

    @property
    def num_stages(self) -> int:
        return 3 if self.together == 1 and not self.by_channel else 2

    def scratch(self) -> dict[str, Any]:
        return {"states": states_buffer(self)} | super().scratch()

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *carry):
        """The copies start while products are computed."""
        is_early = self.together == 1  # two warpgroups have no registers for it
        k_smem, q_smem = keys_of(smem, at.slot), queries_of(smem, at.slot)
        operand = state.astype(self.dtype)
        self.await_weights(smem, at)

        def solved(state_acc, kept_acc, out_acc):
            plgpu.wgmma(kept_acc, operand, kept_keys(smem, at.slot).transpose((1, 0)))
            plgpu.wgmma(
                out_acc, self.values_of(smem, at), smem.weights.at[at.slot].transpose((1, 0))
            )
            if is_early:
                plgpu.wgmma(state_acc, self.read_out(smem, at), q_smem)
            write_state(gmem, smem, at, operand)
            kept = self.by_column(smem, at, read(kept_acc, wait_n=1 + is_early), Gate.WRITTEN)
            return (kept + read(out_acc, wait_n=int(is_early))).astype(self.dtype)

        def wanted(acc, solved):
            plgpu.wgmma(acc, solved, smem.inverses.at[at.slot].transpose((1, 0)))
            return read(acc)

        square = plgpu.ACC((COLUMNS, CHUNK), jnp.float32)

        def advance(state_acc):
            d_y = pl.run_scoped(functools.partial(solved, state_acc), square, square)
            d_values = d_y
            if self.has_delta:
                d_values = pl.run_scoped(functools.partial(wanted, solved=d_y), square)
            if not is_early:
                plgpu.wgmma(state_acc, self.read_out(smem, at), q_smem)
            if self.has_delta:
                held = -self.by_column(smem, at, d_values, Gate.ENTERED)
                plgpu.wgmma(state_acc, held.astype(self.dtype), k_smem)
            self.write(smem, at, d_values, gmem.out)

        decayed: Any = plgpu.ACC.init(self.decayed(smem, at, state))
        state = pl.run_state(advance)(decayed)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        return (state,)

    def read_out(self, smem, at: ChunkStep) -> jax.Array:
        """Computes ``entered * dO'``, in the operands' dtype."""
        d_out = self.values_of(smem, at).astype(jnp.float32)
        return self.by_column(smem, at, d_out, Gate.ENTERED).astype(self.dtype)
