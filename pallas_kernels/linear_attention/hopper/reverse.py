"""Cotangents of the gated delta rule from the last chunk to the first.

With ' for the transpose, T from ``inverse``, P of the base class and dS the cotangent of the state
that leaves a chunk, the chunk computes

    dY' = dO' P + written * (dS' K'),   dR' = dY' T,
    dS' <- decay dS' + (entered * dO') Q - (entered * dR') K,

of which dR is the cotangent of the values.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu

from .chunks import COLUMNS, ChunkKernel, ChunkStep, read
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
    values, gates = operands["values"], operands["gates"]
    _, num_values, value_width, width = operands["start"].shape
    shape = (len(values), num_values, gates.shape[2], value_width, width)
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
        return 3 if self.together == 1 else 2

    def scratch(self) -> dict[str, Any]:
        return {"states": states_buffer(self)} | super().scratch()

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *carry):
        """The copies start while products are computed."""
        k_smem, q_smem = smem.k.at[at.slot], smem.q.at[at.slot]
        operand = state.astype(self.dtype)
        plgpu.barrier_wait(smem.weights_full.at[at.slot])

        def solved(kept_acc, out_acc):
            plgpu.wgmma(kept_acc, operand, k_smem.transpose((1, 0)))
            weights = smem.weights.at[at.slot].transpose((1, 0))
            plgpu.wgmma(out_acc, self.values_of(smem, at), weights)
            write_state(gmem, smem, at, operand)
            kept = self.by_column(smem, at, read(kept_acc, wait_n=1), Gate.WRITTEN)
            return (kept + read(out_acc)).astype(self.dtype)

        def wanted(acc):
            plgpu.wgmma(acc, solved, smem.inverses.at[at.slot].transpose((1, 0)))
            out = self.by_column(
                smem, at, self.values_of(smem, at).astype(jnp.float32), Gate.ENTERED
            )
            return read(acc), out.astype(self.dtype)

        square = plgpu.ACC((COLUMNS, CHUNK), jnp.float32)
        solved = pl.run_scoped(solved, square, square)
        wanted, out = pl.run_scoped(wanted, square)
        held = (-self.by_column(smem, at, wanted, Gate.ENTERED)).astype(self.dtype)

        def add(acc):
            plgpu.wgmma(acc, out, q_smem)
            plgpu.wgmma(acc, held, k_smem)
            self.write(smem, at, wanted, gmem.out)

        decayed: Any = plgpu.ACC.init(state * self.decay(smem, at))
        state = pl.run_state(add)(decayed)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        return (state,)
