"""Base class of the kernels that go from chunk to chunk with a state in registers.

A block goes through the chunks of one value head, or of 64 of its value columns. A warpgroup keeps
the state of 64 columns, transposed, in registers: [64, H]. All products are transposed, too: then
each product's result is the next one's left operand without leaving its thread's registers.
Another warpgroup copies operands a chunk or two ahead, and computes the weights of values in
outputs, P [j, i] = decay(i, j) beta_j q_i . k_j.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import column_layout, row_layout, tile_layout, tiled

from .gates import CHUNK, Gate, load_gate, load_numbers, passed

COLUMNS = 64  # value columns of a warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkKernel:
    """Kernel of one call; a subclass computes a chunk.

    Operands by name are q and k [B, T, N, H], values [B, T, M, V], and gates. With the delta rule
    there are inverses. "start" is the first state, fp32 [B, M, V, H]; without it, that is zeros.
    The last state is the result "end". Where channels have decays of their own, q and k are per
    value head. "kept", "weights" and "decays" are operands instead of gates then, all as of
    ``channels.prepared``.
    """

    name: ClassVar[str]  # in profiler traces
    has_weights: ClassVar[bool] = True  # whether chunks need queries and P
    is_reversed: ClassVar[bool] = False  # from the last chunk to the first

    num_keys: int
    num_values: int
    num_chunks: int
    width: int
    value_width: int
    together: int  # warpgroups of a block, with 64 columns each
    spans: int  # rows of operands per row of the call; of several, all but the last are computed
    has_delta: bool  # whether values are replaced by the delta rule; else they are added
    by_channel: bool  # whether tokens are decayed, and P computed, before
    dtype: jnp.dtype

    @classmethod
    def run(
        cls, operands: dict[str, jax.Array], *, spans: int = 1, **results: Any
    ) -> dict[str, jax.Array]:
        """Launches the kernel; returns its results by name."""
        num_rows, _, num_values, value_width = operands["values"].shape
        rows = num_rows if spans == 1 else num_rows - num_rows // spans
        num_keys, width = operands["k"].shape[2:]
        columns = rows * num_values * value_width // COLUMNS
        # Together columns of a head share copies; apart they fill more processors.
        is_full = columns > NUM_PROCESSORS
        together = 2 if is_full and value_width % (2 * COLUMNS) == 0 else 1
        kernel = cls(
            num_keys=num_keys, num_values=num_values, value_width=value_width,
            num_chunks=operands["k"].shape[1] // CHUNK, width=width,
            together=together, spans=spans, has_delta="inverses" in operands,
            by_channel="kept" in operands, dtype=operands["k"].dtype,
        )  # fmt: skip
        end = (rows, num_values, value_width, width)
        return launch(
            kernel.block,
            name=cls.name,
            operands=operands,
            results=results | {"end": jax.ShapeDtypeStruct(end, jnp.float32)},
            scratch=kernel.scratch(),
            grid=(columns // together,),
            grid_names=("block",),
            num_threads=together + 1,
        )

    @property
    def num_stages(self) -> int:
        """Number of chunks whose operands shared memory holds."""
        return 2 if self.by_channel and self.together > 1 else 3

    @property
    def parts(self) -> int:
        """Number of blocks per head."""
        return self.value_width // (COLUMNS * self.together)

    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and barriers, by name."""
        tile, stages = tiled(128), self.num_stages
        tokens, square = CHUNK * (1 + self.has_weights), (stages, CHUNK, CHUNK)
        values = (self.together, CHUNK, COLUMNS)
        copies = 2 + self.together + self.has_weights + self.has_delta
        if self.by_channel:
            copies += 1 + self.has_weights
        buffers = {
            # Keys, and behind them queries, so that one product can read both.
            "keys": plgpu.SMEM((stages, tokens, self.width), self.dtype, transforms=tile),
            "values": plgpu.SMEM((stages, *values), self.dtype, transforms=tile),
            "out": plgpu.SMEM(values, self.dtype, transforms=tile),
        }
        if self.has_delta:
            buffers["inverses"] = plgpu.SMEM(square, self.dtype, transforms=tile)
        if self.has_weights:
            buffers["weights"] = plgpu.SMEM(square, self.dtype, transforms=tile)
        if self.by_channel:
            kept = (stages, CHUNK, self.width)
            buffers["kept"] = plgpu.SMEM(kept, self.dtype, transforms=tile)
            buffers["decays"] = plgpu.SMEM((stages, self.width), jnp.float32)
        else:
            buffers["gates"] = plgpu.SMEM((stages, len(Gate), CHUNK), jnp.float32)
        return buffers | {
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            "weights_full": plgpu.Barrier(num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=self.together, num_barriers=stages),
        }

    def block(self, gmem, smem) -> None:
        """Runs one block: a role for each warpgroup."""
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        part, rest = lax.rem(block, self.parts), lax.div(block, self.parts)
        m, b = lax.rem(rest, self.num_values), lax.div(rest, self.num_values)

        @pl.when(wg < self.together)
        def _():
            if self.together > 1:
                plgpu.set_max_registers(208, action="increase")
            for slot in range(self.num_stages):
                plgpu.barrier_arrive(smem.empty.at[slot])
            self.advance(gmem, smem, wg, b, m, part * self.together + wg)

        @pl.when(wg == self.together)
        def _():
            if self.together > 1:
                plgpu.set_max_registers(88, action="decrease")
            self.prepare(gmem, smem, self.row_of(b), m, part)

    def row_of(self, b):
        """Returns the row of operands that row ``b`` of the results is computed from."""
        if self.spans == 1:
            return b
        done = self.spans - 1
        return lax.div(b, done) * self.spans + lax.rem(b, done) + int(self.is_reversed)

    def chunk_of(self, it):
        """Returns the chunk of a block's step ``it``."""
        return self.num_chunks - 1 - it if self.is_reversed else it

    def prepare(self, gmem, smem, b, m, part) -> None:
        """Computes P of each chunk in turn, and copies operands of the chunks ahead."""
        load = functools.partial(self.load, gmem, smem, b, m, part)
        ahead = self.num_stages - 1
        for it in range(min(ahead, self.num_chunks)):
            load(jnp.int32(it))

        def step(it, _):
            if self.has_weights and not self.by_channel:
                self.weigh(smem, lax.rem(it, self.num_stages))
            pl.when(it + ahead < self.num_chunks)(lambda: load(it + ahead))

        lax.fori_loop(0, self.num_chunks, step, None)

    def load(self, gmem, smem, b, m, part, it) -> None:
        """Copies the operands of step ``it`` to shared memory."""
        chunk, n = self.chunk_of(it), lax.div(m, self.num_values // self.num_keys)
        slot, rows = lax.rem(it, self.num_stages), pl.ds(chunk * CHUNK, CHUNK)
        full = smem.full.at[slot]
        plgpu.barrier_wait(smem.empty.at[slot])
        plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, n], keys_of(smem, slot), full)
        if self.has_weights:
            plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], queries_of(smem, slot), full)
        for w in range(self.together):
            columns = pl.ds((part * self.together + w) * COLUMNS, COLUMNS)
            source = gmem.values.at[b, rows, m, columns]
            plgpu.copy_gmem_to_smem(source, smem.values.at[slot, w], full)
        if self.has_delta:
            plgpu.copy_gmem_to_smem(gmem.inverses.at[b, m, chunk], smem.inverses.at[slot], full)
        numbers = ["kept", "decays"] if self.by_channel else ["gates"]
        if self.by_channel and self.has_weights:
            numbers.append("weights")
        for name in numbers:
            place = (b, rows, m) if name == "kept" else (b, m, chunk)
            plgpu.copy_gmem_to_smem(
                getattr(gmem, name).at[place], getattr(smem, name).at[slot], full
            )

    def weigh(self, smem, slot) -> None:
        """Computes P of the slot's chunk: rows j, columns i."""
        plgpu.barrier_wait(smem.full.at[slot])
        gates = smem.gates.at[slot]

        def product(acc):
            plgpu.wgmma(acc, keys_of(smem, slot), queries_of(smem, slot).transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc)

        weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
        beta = load_gate(gates, Gate.BETA, row_layout())
        weights *= lax.broadcast_in_dim(beta, weights.shape, [0])
        smem.weights[slot] = (weights * passed(gates, is_strict=False)).astype(self.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.weights_full.at[slot])

    def advance(self, gmem, smem, wg, b, m, part) -> None:
        """Goes through the chunks with the state of a warpgroup's 64 columns."""
        columns = pl.ds(part * COLUMNS, COLUMNS)
        if hasattr(gmem, "start"):
            state = plgpu.load(gmem.start.at[b, m, columns], layout=tile_layout(), optimized=False)
        else:
            empty = jnp.zeros((COLUMNS, self.width), jnp.float32)
            state = plgpu.layout_cast(empty, tile_layout())

        def at(it):
            slot = lax.rem(it + self.num_stages, self.num_stages)
            chunk = self.chunk_of(it)
            place = (self.row_of(b), pl.ds(chunk * CHUNK, CHUNK), m, columns)
            return ChunkStep(wg, it, slot, chunk, place)

        def step(it, carry):
            plgpu.barrier_wait(smem.full.at[at(it).slot])
            return self.step(gmem, smem, at(it), at(it - 1), *carry)

        carry = (state, *self.begun())
        state, *carry = lax.fori_loop(0, self.num_chunks, step, carry)
        self.finish(gmem, smem, at(jnp.int32(self.num_chunks - 1)), *carry)
        write_registers(state, gmem.end.at[b, m, columns])
        plgpu.wait_smem_to_gmem(0)

    def step(self, gmem, smem, at: "ChunkStep", before: "ChunkStep", state, *carry):
        """Computes a chunk's results; returns the state after it, and what ``finish`` takes."""
        raise NotImplementedError

    def begun(self) -> tuple[jax.Array, ...]:
        """Returns what a block's first step takes besides the state."""
        return ()

    def finish(self, gmem, smem, last: "ChunkStep", *carry) -> None:
        """Computes what is left of the last chunk's results."""

    def values_of(self, smem, at: "ChunkStep") -> jax.Array:
        """Loads the chunk's values, transposed: [64, 64] in the operands' dtype."""
        tile = smem.values.at[at.slot, at.wg].transpose((1, 0))
        return plgpu.load(tile, layout=tile_layout())

    def by_column(self, smem, at: "ChunkStep", x: jax.Array, gate: Gate) -> jax.Array:
        """Multiplies the columns of a transposed tile, which are tokens, by a gate."""
        if self.by_channel:
            return x  # what it was multiplied with has the decay
        numbers = load_gate(smem.gates.at[at.slot], gate, column_layout())
        return x * lax.broadcast_in_dim(numbers, x.shape, [1])

    def decayed(self, smem, at: "ChunkStep", state: jax.Array) -> jax.Array:
        """Computes what the whole chunk's decay leaves of the state."""
        if not self.by_channel:
            return state * smem.gates[at.slot, Gate.ENTERED, CHUNK - 1]
        decays = load_numbers(smem.decays.at[at.slot], self.width, column_layout())
        return state * lax.broadcast_in_dim(decays, state.shape, [1])

    def await_weights(self, smem, at: "ChunkStep") -> None:
        """Waits for P of the chunk."""
        if not self.by_channel:
            plgpu.barrier_wait(smem.weights_full.at[at.slot])

    def write(self, smem, at: "ChunkStep", tile: jax.Array, sink) -> None:
        """Starts the copy of a transposed tile [64, 64] to tokens' values in global memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[at.wg].transpose((1, 0))[...] = tile.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.out.at[at.wg], sink.at[at.place])


def keys_of(smem, slot) -> Any:
    """A chunk's keys in shared memory, [64, H]."""
    return smem.keys.at[slot, pl.ds(0, CHUNK)]


def queries_of(smem, slot) -> Any:
    """A chunk's queries in shared memory, [64, H]."""
    return smem.keys.at[slot, pl.ds(CHUNK, CHUNK)]


def kept_keys(smem, slot) -> Any:
    """Keys that a chunk's values are multiplied with for the state after it, [64, H]."""
    return smem.kept.at[slot] if hasattr(smem, "kept") else keys_of(smem, slot)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkStep:
    """A warpgroup's place in its loop, and in arrays [B, T, M, V]."""

    wg: Any
    it: Any
    slot: Any
    chunk: Any
    place: tuple[Any, Any, Any, Any]


def read(acc, wait_n: int = 0) -> jax.Array:
    """Waits for a product and returns it; LLVM would move its readers ahead of the wait."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=wait_n))
