"""The base class of the grouped kernels: a block's warpgroup roles, ring of tiles, and stores.

Blocks are persistent. A block takes its next tile from a counter in memory, since tiles differ in
work. One warpgroup finds the tile, passes its facts to the others through shared memory, and copies
operands ahead; two multiply and store results. Every block reads the group sizes itself, since a
kernel that lists the tiles would cost a launch.

Indexed rows are copied by the loader's 128 threads, since Hopper's TMA has no gather: 16 bytes per
thread, eight times per tile, to the tile's swizzled layout. The same threads wait for their copies
a few steps later and make them visible to the tensor cores.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import Named, launch
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.mosaic import mgpu_utils, plgpu
from pallas_kernels.hopper.tile import tiled

from .config import LINE_BYTES, LOADER, NUM_COMPUTE, WARPGROUP_ROWS, GroupedConfig

THREADS = 128
PIECE = 16  # bytes
LINE = 128  # bytes within which pieces are permuted
IN_FLIGHT = 2
"""Number of the last steps whose row copies may still be in flight."""


def copy_rows(source: Any, rows: Any, target: Any, *, row_bytes: int) -> None:
    """Starts the copies of the indexed rows of a 16 KiB tile into shared memory.

    Args:
        source: [T, columns] in global memory, which begins at the tile's first column.
        rows: int32 [rows] in global memory: the source row of each row of the tile.
        target: the tile in shared memory, [rows, columns] of 2-byte numbers.
        row_bytes: distance in bytes from one source row to the next.
    """
    num_rows, columns = target.shape
    pieces = columns * 2 // PIECE  # of a row
    lines = columns * 2 // LINE
    rows_at_once = THREADS // pieces
    assert num_rows // rows_at_once == 8, (num_rows, columns)
    assert rows_at_once % 8 == 0, (num_rows, columns)
    # Eight rows of a line follow each other, then the next line's.
    stride = rows_at_once * lines * LINE
    copies = "\n".join(
        f"""
            ld.global.nc.u32 index, [rows + {4 * rows_at_once * j}];
            mad.wide.u32 address, index, {row_bytes}, source;
            cp.async.cg.shared.global [target + {stride * j}], [address], {PIECE};"""
        for j in range(8)
    )
    ptx = f"""{{
            .reg .u32 thread, piece, row, line, index, target, swizzled;
            .reg .u64 address, source, rows;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, {THREADS - 1};
            and.b32 piece, thread, {pieces - 1};
            shr.u32 row, thread, {pieces.bit_length() - 1};
            mul.wide.u32 rows, row, 4;
            add.u64 rows, rows, $1;
            mul.wide.u32 source, piece, {PIECE};
            add.u64 source, source, $0;
            shr.u32 line, piece, 3;
            and.b32 swizzled, row, 7;
            xor.b32 swizzled, swizzled, piece;
            and.b32 swizzled, swizzled, 7;
            mad.lo.u32 target, swizzled, {PIECE}, $2;
            mad.lo.u32 target, line, {8 * LINE}, target;
            mad.lo.u32 target, row, {LINE}, target;{copies}
        }}"""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(tiled(128))))
    def copy(_, source, rows, target):
        pointers = (mgpu_utils.memref_ptr(ref) for ref in (source, rows, target))
        mgpu_utils.inline_ptx(ptx, *pointers, has_side_effects=True)

    copy(source, rows, target)


def wait_for_rows() -> None:
    """Commits this step's row copies; waits for all but the last ``IN_FLIGHT`` steps' copies."""

    @plgpu.inline_mgpu()
    def wait(_):
        ptx = f"cp.async.commit_group; cp.async.wait_group {IN_FLIGHT};"
        mgpu_utils.inline_ptx(ptx, has_side_effects=True)

    wait()
    plgpu.commit_smem()


def take_number(counter: Any, taken: Any) -> None:
    """Increments a counter in global memory, by one thread; stores its old value to ``taken``."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_, counter, taken):
        ptx = """{
            .reg .pred first;
            .reg .u32 thread, value;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 first, thread, 0;
            @first atom.global.add.u32 value, [$0], 1;
            @first st.shared.u32 [$1], value;
        }"""
        pointers = mgpu_utils.memref_ptr(counter), mgpu_utils.memref_ptr(taken)
        mgpu_utils.inline_ptx(ptx, *pointers, has_side_effects=True)

    take(counter, taken)


NUM_TOLD = 2  # tiles that were found and not yet begun
NUM_FACTS = 8  # numbers that tell of one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingKernel(abc.ABC):
    """The base of the grouped kernels; subclasses find, load and multiply tiles.

    A tile is described by its facts, integers in shared memory: number of steps, group, and fields
    of the subclass. A group above ``num_groups`` means that no tile is left.
    """

    name: ClassVar[str]  # in traces
    c: GroupedConfig
    dtype: jnp.dtype  # of operands
    out_dtype: jnp.dtype
    num_rows: int
    num_groups: int

    def launch(self, operands: Named, results: Named) -> dict[str, Any]:
        """Launches one block per SM and returns the results by name."""
        return launch(
            self.run,
            name=self.name,
            operands=operands,
            results=results,
            scratch=self.scratch(),
            grid=(NUM_PROCESSORS,),
            grid_names=("worker",),
            num_threads=NUM_COMPUTE + 1,
        )

    @abc.abstractmethod
    def scratch(self) -> dict[str, Any]:
        """Returns the shared-memory buffers and barriers: ``shared`` and the subclass's own."""

    @abc.abstractmethod
    def start(self, gmem: Any) -> Any:
        """Returns the state from which the search for a block's first tile begins."""

    @abc.abstractmethod
    def find(self, gmem: Any, index: jax.Array, place: Any) -> tuple[tuple[jax.Array, ...], Any]:
        """Returns the facts of tile ``index``, and the state for the search for the next tile."""

    @abc.abstractmethod
    def load(self, gmem: Any, smem: Any, facts: tuple[jax.Array, ...], done: jax.Array) -> None:
        """Loads the operands of one tile into the ring, after ``done`` steps of earlier tiles."""

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the two multiplying warpgroups and of the loading one."""
        return 232, 40

    def begin(self, gmem: Any, smem: Any, wg: jax.Array) -> Any:
        """Prepares a multiplying warpgroup; returns constants for its calls of ``compute``."""
        del gmem, smem, wg

    def finish(self, smem: Any, wg: jax.Array) -> None:
        """Ends a multiplying warpgroup, after its last tile."""
        del smem, wg

    def before_tiles(self, gmem: Any, smem: Any) -> None:
        """Runs in the loading warpgroup before its first tile."""
        del gmem, smem

    @abc.abstractmethod
    def compute(
        self, gmem: Any, smem: Any, wg: jax.Array, facts: Any, done: jax.Array, constants: Any
    ) -> None:
        """Multiplies this warpgroup's rows of one tile and stores them."""

    @property
    def line(self) -> int:
        """Number of columns of a result that one TMA copy stores."""
        return LINE_BYTES // self.out_dtype.itemsize

    @property
    def unswizzled(self) -> tuple[int, ...]:
        """Shape of a warpgroup's buffer of results that is not swizzled."""
        return WARPGROUP_ROWS, self.line

    def shared(self, **operands: tuple[int, int]) -> dict[str, Any]:
        """Returns buffers of a ring with operand tiles of these shapes, and all barriers."""
        ring = {
            name: plgpu.SMEM((self.c.num_stages, *shape), self.dtype, transforms=tiled(128))
            for name, shape in operands.items()
        }
        return ring | self.barriers(num_copies=len(operands))

    def barriers(self, *, num_copies: int) -> dict[str, Any]:
        """Returns barriers of the ring's slots, each filled by ``num_copies``, and of the facts."""
        c = self.c
        return {
            "facts": plgpu.SMEM((NUM_TOLD, NUM_FACTS), jnp.int32),
            "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=c.num_stages),
            "empty": plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=c.num_stages),
            "told": plgpu.Barrier(num_barriers=NUM_TOLD),
            "heard": plgpu.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=NUM_TOLD),
        }

    def run(self, gmem: Any, smem: Any) -> None:
        """Runs one block with buffers for stores: swizzled for whole tiles, plain for others."""
        buffers = (NUM_COMPUTE, 2)
        transforms = tiled(128, self.out_dtype.itemsize)
        swizzled = plgpu.SMEM(
            (*buffers, WARPGROUP_ROWS, self.line), self.out_dtype, transforms=transforms
        )

        def roles(out: Any) -> None:
            smem.out = out
            self.roles(gmem, smem)

        out = plgpu.RefUnion(swizzled, plgpu.SMEM((*buffers, *self.unswizzled), self.out_dtype))
        pl.run_scoped(roles, out, collective_axes="wg")

    def roles(self, gmem: Any, smem: Any) -> None:
        """Runs the loading or multiplying role of each warpgroup."""
        wg = lax.axis_index("wg")
        counter = pl.get_global(plgpu.SemaphoreType.REGULAR) if self.c.in_any_order else None

        @pl.when(wg < NUM_COMPUTE)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            for slot in range(self.c.num_stages):
                plgpu.barrier_arrive(smem.empty.at[slot])
            for slot in range(NUM_TOLD):
                plgpu.barrier_arrive(smem.heard.at[slot])
            constants = self.begin(gmem, smem, wg)

            def step(carry):
                i, done, _ = carry
                slot = lax.rem(i, NUM_TOLD)
                plgpu.barrier_wait(smem.told.at[slot])
                facts = tuple(smem.facts[slot, j] for j in range(NUM_FACTS))
                plgpu.barrier_arrive(smem.heard.at[slot])
                self.compute(gmem, smem, wg, facts, done, constants)
                return i + 1, done + facts[0], facts[1] <= self.num_groups

            lax.while_loop(lambda carry: carry[2], step, (jnp.int32(0), jnp.int32(0), True))
            plgpu.wait_smem_to_gmem(0)
            self.finish(smem, wg)

        @pl.when(wg == LOADER)
        def _():
            plgpu.set_max_registers(self.registers[1], action="decrease")
            worker = lax.axis_index("worker")
            self.before_tiles(gmem, smem)

            def step(carry):
                i, index, done, _, place = carry
                slot = lax.rem(i, NUM_TOLD)
                facts, place = self.find(gmem, index, place)
                plgpu.barrier_wait(smem.heard.at[slot])
                for j, fact in enumerate(facts):
                    smem.facts[slot, j] = fact
                if counter is not None:
                    take_number(counter, smem.facts.at[slot, NUM_FACTS - 1])
                plgpu.commit_smem()
                if counter is None:
                    index = index + NUM_PROCESSORS
                else:
                    index = smem.facts[slot, NUM_FACTS - 1] + NUM_PROCESSORS
                plgpu.barrier_arrive(smem.told.at[slot])
                self.load(gmem, smem, facts, done)
                return i + 1, index, done + facts[0], facts[1] <= self.num_groups, place

            start = (jnp.int32(0), worker, jnp.int32(0), True, self.start(gmem))
            lax.while_loop(lambda carry: carry[3], step, start)
            # The interpreter asks that no barrier is left with a phase that nobody saw.
            for slot in range(self.c.num_stages):
                plgpu.barrier_wait(smem.empty.at[slot])
            for slot in range(NUM_TOLD):
                plgpu.barrier_wait(smem.heard.at[slot])

    def fill(self, smem: Any, num_steps: Any, done: Any, copy: Any, *, gathered: bool) -> None:
        """Calls ``copy(step, slot, barrier)`` as slots of the ring become free.

        Args:
            gathered: threads, not TMA, copy the left operand, and signal its arrival.
        """

        def step(k, _):
            @pl.when(k < num_steps)
            def _():
                slot = self.slot(done + k)
                plgpu.barrier_wait(smem.empty.at[slot])
                copy(k, slot, smem.full.at[slot])

            if gathered:
                wait_for_rows()

                @pl.when(k >= IN_FLIGHT)
                def _():
                    plgpu.barrier_arrive(smem.full.at[self.slot(done + k - IN_FLIGHT)])

        behind = jnp.where(num_steps > 0, IN_FLIGHT, 0) if gathered else 0
        lax.fori_loop(0, num_steps + behind, step, None)

    def size(self, gmem: Any, group: jax.Array, first: jax.Array) -> jax.Array:
        """Returns the number of rows of a group that begins at ``first``, cut at the last row."""
        size = gmem.sizes[jnp.minimum(group, self.num_groups - 1)]
        return jnp.clip(size, 0, self.num_rows - first)

    def slot(self, step: jax.Array) -> jax.Array:
        """Returns the ring slot of a step, where steps count over all tiles of the block."""
        return lax.rem(step, self.c.num_stages)

    def store(self, smem: Any, wg: jax.Array, parts: list, rows: Any) -> None:
        """Starts the store of a warpgroup's 64 rows of results, without waiting.

        Args:
            parts: for each ``line`` columns: fp32 [64, line], a function from (first row, rows) to
                the destination, and whether those columns exist.
            rows: (first, end) of the rows that are written.
        """
        plain = smem.out[1]
        first, end = rows
        is_whole = (first == 0) & (end == WARPGROUP_ROWS)
        pl.when(is_whole)(lambda: self.store_whole(smem, wg, parts))

        @pl.when(jnp.logical_not(is_whole))
        def _():
            for i, (part, gmem, exists) in enumerate(parts):
                self._stage(part, plain.at[wg, i % 2])
                # Rows of any number and place: copies of 32, 16, ... 1 of them, each or not.
                at = first
                for size in (32, 16, 8, 4, 2, 1):
                    taken = (end - first) & size

                    # One row is copied as so many bytes, not cut off where the columns end.
                    @pl.when((taken != 0) & exists)
                    def _(at=at, size=size, gmem=gmem, i=i):
                        plgpu.copy_smem_to_gmem(
                            plain.at[wg, i % 2, pl.ds(at, size)], gmem(at, size), commit_group=False
                        )

                    at = at + taken
                plgpu.commit_smem_to_gmem_group()

    def store_whole(self, smem: Any, wg: jax.Array, parts: list) -> None:
        """Starts the store of all 64 rows, without waiting."""
        swizzled = smem.out[0]
        for i, (part, gmem, _) in enumerate(parts):
            self._stage(part, swizzled.at[wg, i % 2])
            plgpu.copy_smem_to_gmem(swizzled.at[wg, i % 2], gmem(0, WARPGROUP_ROWS))

    def _stage(self, part: jax.Array, ref: Any) -> None:
        # At most the copies before the last are still reading.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        ref[...] = part.astype(self.out_dtype)
        plgpu.commit_smem()
