"""Outputs and states of the gated delta rule, from chunk to chunk.

A block goes through the chunks of one value head, or of 64 of its value columns. A warpgroup keeps
the state of 64 columns, transposed, in registers: [64, H]. All products are transposed, too: then
each product's result is the next one's left operand without leaving its thread's registers,

    R' = V' - entered * (S' K'),   W' = R' U,   S' <- decay S' + (left * W') K,
    O' = entered * (S' Q') + W' P,

with ' for the transpose, U from ``inverse`` and P [j, i] = decay(i, j) q_i . k_j. Another warpgroup
computes P and copies operands, a chunk or two ahead.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import column_layout, tile_layout, tiled

from .gates import CHUNK, Gate, load_gate, passed

COLUMNS = 64  # value columns of a warpgroup
_NUM_STAGES = 3


def scan(
    q_BTNH: jax.Array,
    k_BTNH: jax.Array,
    v_BTMV: jax.Array,
    gates: jax.Array,
    inverses: jax.Array,
    state_BMVH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes outputs [B, T, M, V] in v's dtype, and the last state, fp32 [B, M, V, H].

    Args:
        q_BTNH, k_BTNH: bf16, T a multiple of 64, H 128.
        v_BTMV: bf16, V a multiple of 64.
        gates: of ``gates.gates``.
        inverses: of ``inverse.inverses``.
        state_BMVH: the state before the first token, transposed, fp32.
    """
    batch, _, num_values, value_width = v_BTMV.shape
    heads = batch * num_values
    # Together columns of a head share copies; apart they fill more processors.
    is_full = heads * value_width // COLUMNS > NUM_PROCESSORS
    together = 2 if is_full and value_width % (2 * COLUMNS) == 0 else 1
    kernel = _Scan(
        num_keys=k_BTNH.shape[2], num_values=num_values, num_chunks=gates.shape[2],
        width=k_BTNH.shape[3], value_width=value_width, together=together, dtype=v_BTMV.dtype,
    )  # fmt: skip
    found = launch(
        kernel.run,
        name="delta_scan",
        operands={
            "q": q_BTNH,
            "k": k_BTNH,
            "v": v_BTMV,
            "gates": gates,
            "inverses": inverses,
            "start": state_BMVH,
        },
        results={
            "out": jax.ShapeDtypeStruct(v_BTMV.shape, v_BTMV.dtype),
            "end": jax.ShapeDtypeStruct(state_BMVH.shape, jnp.float32),
        },
        scratch=kernel.scratch(),
        grid=(heads * kernel.parts,),
        grid_names=("block",),
        num_threads=together + 1,
    )
    return found["out"], found["end"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Scan:
    """The kernel of one call."""

    num_keys: int
    num_values: int
    num_chunks: int
    width: int
    value_width: int
    together: int  # warpgroups with 64 columns each
    dtype: jnp.dtype

    @property
    def parts(self) -> int:
        """Number of blocks per head."""
        return self.value_width // (COLUMNS * self.together)

    def scratch(self) -> dict[str, Any]:
        tile, stages = tiled(128), _NUM_STAGES
        keys = (stages, CHUNK, self.width)
        values = (self.together, CHUNK, COLUMNS)
        return {
            "k": plgpu.SMEM(keys, self.dtype, transforms=tile),
            "q": plgpu.SMEM(keys, self.dtype, transforms=tile),
            "v": plgpu.SMEM((stages, *values), self.dtype, transforms=tile),
            "u": plgpu.SMEM((stages, CHUNK, CHUNK), self.dtype, transforms=tile),
            "p": plgpu.SMEM((stages, CHUNK, CHUNK), self.dtype, transforms=tile),
            "out": plgpu.SMEM(values, self.dtype, transforms=tile),
            "gates": plgpu.SMEM((stages, len(Gate), CHUNK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=4 + self.together, num_barriers=stages),
            "weights_full": plgpu.Barrier(num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=self.together, num_barriers=stages),
        }

    def run(self, gmem, smem) -> None:
        """Runs one block: a role for each warpgroup."""
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        part, rest = lax.rem(block, self.parts), lax.div(block, self.parts)
        m, b = lax.rem(rest, self.num_values), lax.div(rest, self.num_values)

        @pl.when(wg < self.together)
        def _():
            if self.together > 1:
                plgpu.set_max_registers(208, action="increase")
            for slot in range(_NUM_STAGES):
                plgpu.barrier_arrive(smem.empty.at[slot])
            self.advance(gmem, smem, wg, b, m, part * self.together + wg)

        @pl.when(wg == self.together)
        def _():
            if self.together > 1:
                plgpu.set_max_registers(88, action="decrease")
            self.prepare(gmem, smem, b, m, part)

    def prepare(self, gmem, smem, b, m, part) -> None:
        """Computes P of each chunk in turn, and copies operands of the chunks ahead."""
        load = functools.partial(self.load, gmem, smem, b, m, part)
        ahead = _NUM_STAGES - 1
        for chunk in range(min(ahead, self.num_chunks)):
            load(jnp.int32(chunk))

        def step(chunk, _):
            self.weigh(smem, lax.rem(chunk, _NUM_STAGES))
            pl.when(chunk + ahead < self.num_chunks)(lambda: load(chunk + ahead))

        lax.fori_loop(0, self.num_chunks, step, None)

    def load(self, gmem, smem, b, m, part, chunk) -> None:
        """Copies a chunk's operands to shared memory."""
        n = lax.div(m, self.num_values // self.num_keys)
        slot, rows = lax.rem(chunk, _NUM_STAGES), pl.ds(chunk * CHUNK, CHUNK)
        full = smem.full.at[slot]
        plgpu.barrier_wait(smem.empty.at[slot])
        plgpu.copy_gmem_to_smem(gmem.k.at[b, rows, n], smem.k.at[slot], full)
        plgpu.copy_gmem_to_smem(gmem.q.at[b, rows, n], smem.q.at[slot], full)
        for w in range(self.together):
            columns = pl.ds((part * self.together + w) * COLUMNS, COLUMNS)
            v_gmem = gmem.v.at[b, rows, m, columns]
            plgpu.copy_gmem_to_smem(v_gmem, smem.v.at[slot, w], full)
        plgpu.copy_gmem_to_smem(gmem.inverses.at[b, m, chunk], smem.u.at[slot], full)
        plgpu.copy_gmem_to_smem(gmem.gates.at[b, m, chunk], smem.gates.at[slot], full)

    def weigh(self, smem, slot) -> None:
        """Computes P of the slot's chunk: rows j, columns i."""
        plgpu.barrier_wait(smem.full.at[slot])

        def product(acc):
            plgpu.wgmma(acc, smem.k.at[slot], smem.q.at[slot].transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc)

        weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
        weights *= passed(smem.gates.at[slot], is_strict=False)
        smem.p[slot] = weights.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.weights_full.at[slot])

    def advance(self, gmem, smem, wg, b, m, part) -> None:
        """Computes outputs and states of a warpgroup's 64 columns."""
        columns = pl.ds(part * COLUMNS, COLUMNS)
        state = plgpu.load(gmem.start.at[b, m, columns], layout=tile_layout(), optimized=False)
        step = functools.partial(self.step, gmem, smem, wg, b, m, columns)
        state = lax.fori_loop(0, self.num_chunks, step, state)
        write_registers(state, gmem.end.at[b, m, columns])
        plgpu.wait_smem_to_gmem(0)

    def step(self, gmem, smem, wg, b, m, columns, chunk, state):
        """Computes a chunk's outputs, and returns the state after it."""
        slot = lax.rem(chunk, _NUM_STAGES)
        plgpu.barrier_wait(smem.full.at[slot])
        k_smem, q_smem = smem.k.at[slot], smem.q.at[slot]

        def by_column(x, gate):
            numbers = load_gate(smem.gates.at[slot], gate, column_layout())
            return x * lax.broadcast_in_dim(numbers, x.shape, [1])

        def wanted(acc):
            plgpu.wgmma(acc, state.astype(self.dtype), k_smem.transpose((1, 0)))
            v_smem = smem.v.at[slot, wg].transpose((1, 0))
            values = plgpu.load(v_smem, layout=tile_layout())
            held = _apart(plgpu.wgmma_accumulator_load(acc, wait_n=0))
            wanted = values.astype(jnp.float32) - by_column(held, Gate.ENTERED)
            return wanted.astype(self.dtype)

        def written(written_acc, read_acc):
            plgpu.wgmma(written_acc, wanted, smem.u.at[slot])
            plgpu.wgmma(read_acc, state.astype(self.dtype), q_smem.transpose((1, 0)))
            written = _apart(plgpu.wgmma_accumulator_load(written_acc, wait_n=1))
            kept = by_column(written, Gate.LEFT).astype(self.dtype)
            written = written.astype(self.dtype)
            read = _apart(plgpu.wgmma_accumulator_load(read_acc, wait_n=0))
            return kept, written, by_column(read, Gate.ENTERED)

        def ended(refs):
            state_acc, out_acc = refs
            plgpu.wgmma(state_acc, kept, k_smem)
            plgpu.wgmma(out_acc, written, smem.p.at[slot])

        square = plgpu.ACC((COLUMNS, CHUNK), jnp.float32)
        wanted = pl.run_scoped(wanted, square)
        kept, written, out = pl.run_scoped(written, square, square)
        decay = smem.gates[slot, Gate.ENTERED, CHUNK - 1]
        plgpu.barrier_wait(smem.weights_full.at[slot])
        accs: Any = plgpu.ACC.init(state * decay), plgpu.ACC.init(out)
        state, out = pl.run_state(ended)(accs)
        plgpu.barrier_arrive(smem.empty.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem.out.at[wg].transpose((1, 0))[...] = out.astype(self.dtype)
        plgpu.commit_smem()
        rows = pl.ds(chunk * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(smem.out.at[wg], gmem.out.at[b, rows, m, columns])
        return state


def _apart(product: jax.Array) -> jax.Array:
    """A product that was waited for; keeps LLVM from moving its readers ahead of the wait."""
    return lax.optimization_barrier(product)
