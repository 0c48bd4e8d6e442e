"""Outputs, or states, of the gated delta rule from chunk to chunk.

With ' for the transpose, T from ``inverse`` and P of the base class, a chunk computes

    R' = V' - entered * (S' K'),   Y' = R' T',   S' <- decay S' + (written * Y') K,
    O' = entered * (S' Q') + Y' P'.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import tiled

from .chunks import COLUMNS, ChunkKernel, ChunkStep, read
from .gates import CHUNK, Gate

type ChunkOperands = dict[str, jax.Array]


def outputs(operands: ChunkOperands) -> tuple[jax.Array, jax.Array]:
    """Computes outputs [B, T, M, V] in v's dtype, and the last state, fp32 [B, M, V, H].

    Args:
        operands: as of ``ChunkKernel``; T a multiple of 64, H 128, V a multiple of 64.
    """
    values = operands["values"]
    found = _Outputs.run(operands, out=jax.ShapeDtypeStruct(values.shape, values.dtype))
    return found["out"], found["end"]


def states(operands: ChunkOperands) -> tuple[jax.Array, jax.Array]:
    """Computes the states that enter the chunks, bf16 [B, M, J, V, H], and Y, bf16 [B, T, M, V].

    Args:
        operands: as for ``outputs``, without q.
    """
    values, gates = operands["values"], operands["gates"]
    _, num_values, value_width, width = operands["start"].shape
    shape = (len(values), num_values, gates.shape[2], value_width, width)
    found = _States.run(
        operands,
        out=jax.ShapeDtypeStruct(values.shape, values.dtype),
        states=jax.ShapeDtypeStruct(shape, values.dtype),
    )
    return found["states"], found["out"]


class _Forward(ChunkKernel):
    """Parts that both forward kernels have."""

    def wanted(self, smem, at: ChunkStep, operand):
        """Computes R' of the chunk, in the operands' dtype."""

        def product(acc):
            plgpu.wgmma(acc, operand, smem.k.at[at.slot].transpose((1, 0)))
            values = self.values_of(smem, at)
            held = self.by_column(smem, at, read(acc), Gate.ENTERED)
            return (values.astype(jnp.float32) - held).astype(self.dtype)

        return pl.run_scoped(product, plgpu.ACC((COLUMNS, CHUNK), jnp.float32))

    def kept(self, smem, at: ChunkStep, solved):
        """Computes what the chunk's values add to the state at its end."""
        return self.by_column(smem, at, solved, Gate.WRITTEN).astype(self.dtype)


class _Outputs(_Forward):
    """The kernel of outputs."""

    name: ClassVar[str] = "delta_outputs"

    def step(self, gmem, smem, at: ChunkStep, state):
        k_smem, q_smem = smem.k.at[at.slot], smem.q.at[at.slot]
        wanted = self.wanted(smem, at, state.astype(self.dtype))

        def solve(solved_acc, read_acc):
            plgpu.wgmma(solved_acc, wanted, smem.inverses.at[at.slot])
            plgpu.wgmma(read_acc, state.astype(self.dtype), q_smem.transpose((1, 0)))
            solved = read(solved_acc, wait_n=1)
            kept, solved = self.kept(smem, at, solved), solved.astype(self.dtype)
            return kept, solved, self.by_column(smem, at, read(read_acc), Gate.ENTERED)

        def add(refs):
            state_acc, out_acc = refs
            plgpu.wgmma(state_acc, kept, k_smem)
            plgpu.wgmma(out_acc, solved, smem.weights.at[at.slot])

        square = plgpu.ACC((COLUMNS, CHUNK), jnp.float32)
        kept, solved, out = pl.run_scoped(solve, square, square)
        decayed = state * self.decay(smem, at)
        plgpu.barrier_wait(smem.weights_full.at[at.slot])
        accs: Any = plgpu.ACC.init(decayed), plgpu.ACC.init(out)
        state, out = pl.run_state(add)(accs)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        self.write(smem, at, out, gmem.out)
        return state


class _States(_Forward):
    """The kernel of states, for the backward pass."""

    name: ClassVar[str] = "delta_states"
    has_weights: ClassVar[bool] = False

    def scratch(self) -> dict[str, Any]:
        return {"states": states_buffer(self)} | super().scratch()

    def step(self, gmem, smem, at: ChunkStep, state):
        operand = state.astype(self.dtype)
        write_state(gmem, smem, at, operand)
        wanted = self.wanted(smem, at, operand)

        def solve(acc):
            plgpu.wgmma(acc, wanted, smem.inverses.at[at.slot])
            return read(acc)

        solved = pl.run_scoped(solve, plgpu.ACC((COLUMNS, CHUNK), jnp.float32))
        kept = self.kept(smem, at, solved)

        def add(acc):
            plgpu.wgmma(acc, kept, smem.k.at[at.slot])

        decayed: Any = plgpu.ACC.init(state * self.decay(smem, at))
        state = pl.run_state(add)(decayed)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        self.write(smem, at, solved, gmem.out)
        return state


def states_buffer(kernel: ChunkKernel) -> Any:
    """Returns the shared memory buffer of ``write_state``."""
    shape = (kernel.together, COLUMNS, kernel.width)
    return plgpu.SMEM(shape, kernel.dtype, transforms=tiled(128))


def write_state(gmem, smem, at: ChunkStep, state) -> None:
    """Starts the copy of a chunk's state, [64, H], to ``gmem.states``."""
    b, _, m, columns = at.place
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.states[at.wg] = state
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.states.at[at.wg], gmem.states.at[b, m, at.chunk, columns])
