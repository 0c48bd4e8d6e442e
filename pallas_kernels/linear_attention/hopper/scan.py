"""Outputs, or states, of the gated delta rule from chunk to chunk.

With ' for the transpose, T from ``inverse`` and P of the base class, a chunk computes

    R' = V' - entered * (S' K'),   Y' = R' T',   S' <- decay S' + (written * Y') K,
    O' = entered * (S' Q') + Y' P'.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import tile_layout, tiled

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

    def wanted(self, smem, at: ChunkStep, values, held):
        """Computes R' of the chunk, in the operands' dtype, from V' and S' K'."""
        held = self.by_column(smem, at, held, Gate.ENTERED)
        return (values.astype(jnp.float32) - held).astype(self.dtype)

    def wanted_of(self, smem, at: ChunkStep, operand, meanwhile: Callable | None = None):
        """Computes R' of the chunk; ``meanwhile`` is called while a product is computed."""

        def product(acc):
            plgpu.wgmma(acc, operand, smem.k.at[at.slot].transpose((1, 0)))
            values = self.values_of(smem, at)
            if meanwhile is not None:
                meanwhile()
            return self.wanted(smem, at, values, read(acc))

        return pl.run_scoped(product, _square())

    def kept(self, smem, at: ChunkStep, solved):
        """Computes what the chunk's values add to the state at its end."""
        return self.by_column(smem, at, solved, Gate.WRITTEN).astype(self.dtype)


class _Outputs(_Forward):
    """The kernel of outputs."""

    name: ClassVar[str] = "delta_outputs"

    @property
    def is_ahead(self) -> bool:
        """Whether a chunk's product with P waits for the next chunk, as ``ahead`` computes it.

        Two warpgroups have no registers for it, and each computes while the other one waits.
        """
        return self.together == 1

    def begun(self):
        if not self.is_ahead:
            return ()
        empty = plgpu.layout_cast(jnp.zeros((COLUMNS, CHUNK), jnp.float32), tile_layout())
        return empty, empty.astype(self.dtype)

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *waiting):
        if self.is_ahead:
            return self.ahead(gmem, smem, at, before, state, *waiting)
        wanted = self.wanted_of(smem, at, state.astype(self.dtype))

        def solve(solved_acc, read_acc):
            plgpu.wgmma(solved_acc, wanted, smem.inverses.at[at.slot])
            queries = smem.q.at[at.slot].transpose((1, 0))
            plgpu.wgmma(read_acc, state.astype(self.dtype), queries)
            solved = read(solved_acc, wait_n=1)
            kept, solved = self.kept(smem, at, solved), solved.astype(self.dtype)
            return kept, solved, self.by_column(smem, at, read(read_acc), Gate.ENTERED)

        def add(refs):
            state_acc, out_acc = refs
            plgpu.wgmma(state_acc, kept, smem.k.at[at.slot])
            plgpu.wgmma(out_acc, solved, smem.weights.at[at.slot])

        kept, solved, out = pl.run_scoped(solve, _square(), _square())
        decayed = state * self.decay(smem, at)
        plgpu.barrier_wait(smem.weights_full.at[at.slot])
        accs: Any = plgpu.ACC.init(decayed), plgpu.ACC.init(out)
        state, out = pl.run_state(add)(accs)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        self.write(smem, at, out, gmem.out)
        return (state,)

    def ahead(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, out, solved):
        """Computes a step in which the product with P of the chunk before fills a wait."""
        operand, values = state.astype(self.dtype), self.values_of(smem, at)

        def products(refs):
            state_acc, out_acc, out_ref, solved_ref = refs

            def advance(held_acc, solved_acc, read_acc):
                plgpu.wgmma(held_acc, operand, smem.k.at[at.slot].transpose((1, 0)))
                plgpu.wgmma(out_acc, solved_ref[...], smem.weights.at[before.slot])
                wanted = self.wanted(smem, at, values, read(held_acc, wait_n=1))
                plgpu.wgmma(solved_acc, wanted, smem.inverses.at[at.slot])
                self.give(gmem, smem, before, read(out_acc, wait_n=1))
                plgpu.wgmma(read_acc, operand, smem.q.at[at.slot].transpose((1, 0)))
                solved = read(solved_acc, wait_n=1)
                plgpu.wgmma(state_acc, self.kept(smem, at, solved), smem.k.at[at.slot])
                out = self.by_column(smem, at, read(read_acc, wait_n=1), Gate.ENTERED)
                return out, solved.astype(self.dtype)

            out_ref[...], solved_ref[...] = pl.run_scoped(advance, *[_square()] * 3)

        accs: Any = plgpu.ACC.init(state * self.decay(smem, at)), plgpu.ACC.init(out)
        state, _, out, solved = pl.run_state(products)((*accs, out, solved))
        plgpu.barrier_wait(smem.weights_full.at[at.slot])
        return state, out, solved

    def give(self, gmem, smem, before: ChunkStep, out) -> None:
        """Frees the slot of a chunk whose outputs are complete, and writes them."""

        @pl.when(before.it >= 0)
        def _():
            plgpu.barrier_arrive(smem.empty.at[before.slot])
            self.write(smem, before, out, gmem.out)

    def finish(self, gmem, smem, last: ChunkStep, *waiting):
        if not self.is_ahead:
            return
        out, solved = waiting

        def add(acc):
            plgpu.wgmma(acc, solved, smem.weights.at[last.slot])

        start: Any = plgpu.ACC.init(out)
        self.write(smem, last, pl.run_state(add)(start), gmem.out)


class _States(_Forward):
    """The kernel of states, for the backward pass."""

    name: ClassVar[str] = "delta_states"
    has_weights: ClassVar[bool] = False

    def scratch(self) -> dict[str, Any]:
        return {"states": states_buffer(self)} | super().scratch()

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *carry):
        """The copies start while products are computed."""
        operand = state.astype(self.dtype)

        def solve(acc):
            plgpu.wgmma(acc, wanted, smem.inverses.at[at.slot])
            return read(acc)

        def add(acc):
            plgpu.wgmma(acc, kept, smem.k.at[at.slot])
            self.write(smem, at, solved, gmem.out)

        copy = functools.partial(write_state, gmem, smem, at, operand)
        wanted = self.wanted_of(smem, at, operand, copy)
        solved = pl.run_scoped(solve, _square())
        kept = self.kept(smem, at, solved)
        decayed: Any = plgpu.ACC.init(state * self.decay(smem, at))
        state = pl.run_state(add)(decayed)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        return (state,)


def _square() -> Any:
    return plgpu.ACC((COLUMNS, CHUNK), jnp.float32)


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
