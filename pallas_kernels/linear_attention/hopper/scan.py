"""Outputs, or states, of the gated delta rule from chunk to chunk.

With ' for the transpose, T from ``inverse`` and P of the base class, a chunk computes

    R' = V' - entered * (S' K'),   Y' = R' T',   S' <- decay S' + (written * Y') K,
    O' = entered * (S' Q') + Y' P'.

Without the delta rule Y is V.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.tile import tile_layout, tiled

from .chunks import COLUMNS, ChunkKernel, ChunkStep, kept_keys, keys_of, queries_of, read
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
    """Computes states that enter the chunks, bf16 [B, M, J, V, H], and Y in the shape of values.

    Args:
        operands: as for ``outputs``, without q.
    """
    values, (_, num_values, value_width, width) = operands["values"], operands["start"].shape
    batch, length = values.shape[:2]
    shape = (batch, num_values, length // CHUNK, value_width, width)
    results = {"states": jax.ShapeDtypeStruct(shape, values.dtype)}
    if "inverses" not in operands:
        return _States.run(operands, **results)["states"], values
    found = _States.run(operands, out=jax.ShapeDtypeStruct(values.shape, values.dtype), **results)
    return found["states"], found["out"]


class _Forward(ChunkKernel):
    """Parts that both forward kernels have."""

    def wanted(self, smem, at: ChunkStep, values, held):
        """Computes R' of the chunk, in the operands' dtype, from V' and S' K'."""
        held = self.by_column(smem, at, held, Gate.ENTERED)
        return (values.astype(jnp.float32) - held).astype(self.dtype)

    def kept(self, smem, at: ChunkStep, solved):
        """Computes what the chunk's values add to the state at its end."""
        return self.by_column(smem, at, solved, Gate.WRITTEN).astype(self.dtype)


class _Outputs(_Forward):
    """The kernel of outputs."""

    name: ClassVar[str] = "delta_outputs"

    @property
    def is_ahead(self) -> bool:
        """Whether a chunk's product with P waits for the next chunk's first products.

        Their results are awaited meanwhile. Two warpgroups have no registers for it, and need it
        less, as each computes while the other one waits.
        """
        return self.together == 1 and not self.by_channel

    def begun(self):
        if not self.is_ahead:
            return ()
        return _empty(), _empty().astype(self.dtype)

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *waiting):
        if not self.has_delta and not waiting:
            return self.add(gmem, smem, at, state)
        operand = state.astype(self.dtype)
        decayed: Any = plgpu.ACC.init(self.decayed(smem, at, state))

        def advance(state_acc, meanwhile: Callable, give: Callable):
            """Computes a chunk's outputs without P, and Y'; ``meanwhile`` issues a product."""

            def from_state(acc):
                plgpu.wgmma(acc, operand, smem.keys.at[at.slot].transpose((1, 0)))
                meanwhile()
                values, both = self.values_of(smem, at), read(acc, wait_n=len(waiting) // 2)
                held, out = (
                    lax.slice(both, (0, start), (COLUMNS, start + CHUNK)) for start in (0, CHUNK)
                )
                out = self.by_column(smem, at, out, Gate.ENTERED)
                return self.wanted(smem, at, values, held), out

            def solve(acc):
                plgpu.wgmma(acc, wanted, smem.inverses.at[at.slot])
                give()
                return read(acc)

            def read_state(acc):
                plgpu.wgmma(acc, operand, queries_of(smem, at.slot).transpose((1, 0)))
                meanwhile()
                values = self.values_of(smem, at).astype(jnp.float32)
                out = read(acc, wait_n=len(waiting) // 2)
                return values, self.by_column(smem, at, out, Gate.ENTERED)

            if self.has_delta:
                both = plgpu.ACC((COLUMNS, 2 * CHUNK), jnp.float32)
                wanted, out = pl.run_scoped(from_state, both)
                solved = pl.run_scoped(solve, _square())
            else:
                solved, out = pl.run_scoped(read_state, _square())
            plgpu.wgmma(state_acc, self.kept(smem, at, solved), kept_keys(smem, at.slot))
            if not self.has_delta:
                give()
            return out, solved.astype(self.dtype)

        if waiting:

            def products(refs):
                state_acc, out_acc, out_ref, solved_ref = refs

                def weigh():
                    plgpu.wgmma(out_acc, solved_ref[...], smem.weights.at[before.slot])

                def give():
                    # The product after it, of Y or of the state, may go on.
                    self.give(gmem, smem, before, read(out_acc, wait_n=1))

                out_ref[...], solved_ref[...] = advance(state_acc, weigh, give)

            out, solved = waiting
            accs: Any = decayed, plgpu.ACC.init(out)
            state, _, out, solved = pl.run_state(products)((*accs, out, solved))
            self.await_weights(smem, at)
            return state, out, solved

        def all_products(refs):
            state_acc, out_ref = refs
            out, solved = advance(state_acc, lambda: None, lambda: None)
            self.await_weights(smem, at)
            out_ref[...] = self.weighed(smem, at, out, solved)

        state, out = pl.run_state(all_products)((decayed, _empty()))
        self.give(gmem, smem, at, out)
        return (state,)

    def add(self, gmem, smem, at: ChunkStep, state):
        """Computes a step without the delta rule, of which both products of the state overlap."""
        operand, values = state.astype(self.dtype), self.values_of(smem, at)
        kept = self.kept(smem, at, values.astype(jnp.float32))
        decayed: Any = plgpu.ACC.init(self.decayed(smem, at, state))

        def products(refs):
            state_acc, out_ref = refs

            def from_state(acc):
                plgpu.wgmma(acc, operand, queries_of(smem, at.slot).transpose((1, 0)))
                plgpu.wgmma(state_acc, kept, keys_of(smem, at.slot))
                return self.by_column(smem, at, read(acc, wait_n=1), Gate.ENTERED)

            out_ref[...] = pl.run_scoped(from_state, _square())

        def weigh(acc):
            values = smem.values.at[at.slot, at.wg].transpose((1, 0))
            plgpu.wgmma(acc, values, smem.weights.at[at.slot])

        state, out = pl.run_state(products)((decayed, _empty()))
        self.await_weights(smem, at)
        start: Any = plgpu.ACC.init(out)
        self.give(gmem, smem, at, pl.run_state(weigh)(start))
        return (state,)

    def weighed(self, smem, at: ChunkStep, out, solved) -> jax.Array:
        """Adds the product with P to a chunk's outputs."""

        def add(acc):
            plgpu.wgmma(acc, solved, smem.weights.at[at.slot])

        def added(acc):
            add(acc)
            return out + read(acc)

        if self.by_channel:
            # Going on from a part of another product's accumulator would serialize all products.
            return pl.run_scoped(added, _square())
        start: Any = plgpu.ACC.init(out)
        return pl.run_state(add)(start)

    def give(self, gmem, smem, at: ChunkStep, out) -> None:
        """Frees the slot of a chunk whose outputs are complete, and writes them."""

        @pl.when(at.it >= 0)
        def _():
            plgpu.barrier_arrive(smem.empty.at[at.slot])
            self.write(smem, at, out, gmem.out)

    def finish(self, gmem, smem, last: ChunkStep, *waiting):
        if waiting:
            self.write(smem, last, self.weighed(smem, last, *waiting), gmem.out)


class _States(_Forward):
    """The kernel of states, for the backward pass."""

    name: ClassVar[str] = "delta_states"
    has_weights: ClassVar[bool] = False

    def scratch(self) -> dict[str, Any]:
        return {"states": states_buffer(self)} | super().scratch()

    def step(self, gmem, smem, at: ChunkStep, before: ChunkStep, state, *carry):
        """The copies start while products are computed."""
        operand, values = state.astype(self.dtype), self.values_of(smem, at)

        def want(acc):
            plgpu.wgmma(acc, operand, keys_of(smem, at.slot).transpose((1, 0)))
            write_state(gmem, smem, at, operand)
            return self.wanted(smem, at, values, read(acc))

        def solve(acc):
            plgpu.wgmma(acc, wanted, smem.inverses.at[at.slot])
            return read(acc)

        def add(acc):
            plgpu.wgmma(acc, kept, kept_keys(smem, at.slot))
            if self.has_delta:
                self.write(smem, at, solved, gmem.out)
            else:
                write_state(gmem, smem, at, operand)

        if self.has_delta:
            wanted = pl.run_scoped(want, _square())
            solved = pl.run_scoped(solve, _square())
        else:
            solved = values.astype(jnp.float32)
        kept = self.kept(smem, at, solved)
        decayed: Any = plgpu.ACC.init(self.decayed(smem, at, state))
        state = pl.run_state(add)(decayed)
        plgpu.barrier_arrive(smem.empty.at[at.slot])
        return (state,)


def _empty() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((COLUMNS, CHUNK), jnp.float32), tile_layout())


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
