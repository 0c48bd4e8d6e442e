"""The base class of the kernels: tiles of products, and messages to peers.

Blocks are persistent and take tiles of 128 x 256 results in order from a counter. One warpgroup
copies operands ahead; two multiply 64 rows each (``grouped_matmul.hopper.ring``). No block waits
for a peer before it has sent what the peer waits for, so launches end wherever all begin.

What is sent is contiguous, from shared memory to an address that the kernel reads when it runs.
TMA's descriptor of a peer's array would be made when the launch is recorded in a CUDA graph. XLA
replays graphs wherever this device's own arrays have the addresses of the recording, even if a
peer's do not.

Dims: M position on a device, K contraction, N column.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_kernels.grouped_matmul.hopper.config import (
    BAND,
    BLOCK_DEPTH,
    BLOCK_ROWS,
    WARPGROUP_ROWS,
)
from pallas_kernels.grouped_matmul.hopper.ring import RingKernel
from pallas_kernels.hopper.mosaic import arith, llvm, mgpu, mgpu_utils, plgpu
from pallas_kernels.hopper.threads import address, assembly, constant, i32, one_thread

from .config import COLUMNS, SECONDS, CollectiveConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveKernel(RingKernel):
    """The base class of both kernels.

    A tile's facts begin with the number of steps, whether no tile is left, the peer, the row tile
    and the first column. Peer s is the device s places behind this one; peer 0 is this one.
    """

    axis: str
    num_devices: int
    length: int  # rows that follow one another on a device: M
    depths: tuple[int, ...]  # of the factors
    num_columns: int
    transposed: bool
    options: CollectiveConfig

    def scratch(self) -> dict[str, Any]:
        """Returns the ring's buffers and barriers."""
        b = (BLOCK_DEPTH, COLUMNS)
        return self.shared(a=(BLOCK_ROWS, BLOCK_DEPTH), b=b[::-1] if self.transposed else b)

    def start(self, gmem: Any) -> Any:
        """Nothing is remembered from tile to tile."""
        return ()

    @property
    def num_row_tiles(self) -> int:
        """Number of tiles of a device's rows along the rows."""
        return self.num_rows // BLOCK_ROWS

    @property
    def num_column_tiles(self) -> int:
        """Number of tiles along the columns."""
        return -(-self.num_columns // COLUMNS)

    @property
    def num_tiles(self) -> int:
        """Number of tiles of one device's rows."""
        return self.num_row_tiles * self.num_column_tiles

    @property
    def num_products(self) -> int:
        """Number of steps of products in a tile."""
        return sum(-(-depth // BLOCK_DEPTH) for depth in self.depths)

    def place(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row tile, and the first column, of one of a device's tiles."""
        m, n = plgpu.planar_snake(tile, (self.num_row_tiles, self.num_column_tiles), 0, BAND)
        return m, n * COLUMNS

    def device(self, peer: Any) -> jax.Array:
        """Returns the index on the axis of the device ``peer`` places behind this one."""
        return lax.rem(lax.axis_index(self.axis) + peer, jnp.int32(self.num_devices))

    def row_of_all(self, peer: Any, row: jax.Array) -> jax.Array:
        """Returns the row, among all devices' rows, of a device's ``row``."""
        batch, rest = lax.div(row, self.length), lax.rem(row, self.length)
        return (batch * self.num_devices + self.device(peer)) * self.length + rest

    def distances(self, ref: Any) -> list[Any]:
        """Returns the distance from this device's array to that of each peer, from peer 1 on."""
        peers = range(1, self.num_devices)
        return [distance(ref, self.there(ref, peer)) for peer in peers]

    def there(self, ref: Any, peer: Any) -> Any:
        """Returns a reference to a peer's array."""
        there: Any = {self.axis: self.device(peer)}  # of the mesh's axes, this one differs
        return plgpu.remote_ref(ref, there)

    def signal(self, flag: Any, peer: Any) -> None:
        """Increments a peer's counter, after what was sent to it has arrived."""
        pl.semaphore_signal(flag, device_id={self.axis: self.device(peer)})

    def load_products(
        self, gmem: Any, smem: Any, a: list[Any], row: jax.Array, column: jax.Array, done: jax.Array
    ) -> None:
        """Loads all steps of the products of 128 rows of the arrays ``a`` with 256 columns."""
        rows = pl.ds(pl.multiple_of(row, BLOCK_ROWS), BLOCK_ROWS)
        columns = pl.ds(pl.multiple_of(column, COLUMNS), COLUMNS)
        before = done
        for a_gmem, b_gmem, depth in zip(a, gmem.b, self.depths, strict=True):

            def copy(k, slot, full, a_gmem=a_gmem, b_gmem=b_gmem):
                depths = pl.ds(pl.multiple_of(k * BLOCK_DEPTH, BLOCK_DEPTH), BLOCK_DEPTH)
                part = (columns, depths) if self.transposed else (depths, columns)
                plgpu.copy_gmem_to_smem(b_gmem.at[part], smem.b.at[slot], full)
                plgpu.copy_gmem_to_smem(a_gmem.at[rows, depths], smem.a.at[slot], full)

            steps = -(-depth // BLOCK_DEPTH)
            self.fill(smem, steps, before, copy, gathered=False)
            before = before + steps

    def multiplied(self, smem: Any, wg: Any, done: jax.Array) -> jax.Array:
        """Multiplies this warpgroup's rows of one tile: fp32 [64, 256]."""
        mine = self.mine(wg)

        def product(acc):
            def step(k, _):
                slot = self.slot(done + k)
                plgpu.barrier_wait(smem.full.at[slot])
                b = smem.b.at[slot]
                b = b.transpose((1, 0)) if self.transposed else b
                plgpu.wgmma(acc, smem.a.at[slot, mine], b)
                plgpu.wgmma_wait(1)
                # The step before this one is multiplied.
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(smem.empty.at[self.slot(done + k - 1)]))

            lax.fori_loop(0, self.num_products, step, None)
            value = acc[...]
            plgpu.barrier_arrive(smem.empty.at[self.slot(done + self.num_products - 1)])
            return value

        return pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, COLUMNS), jnp.float32))

    def mine(self, wg: Any) -> Any:
        """Returns the rows of a tile that a warpgroup multiplies."""
        return pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

    def store_part(self, smem: Any, wg: Any, i: int, part: jax.Array, target: Any) -> None:
        """Starts the store of columns ``i * line`` and on of a warpgroup's rows."""
        # At most the copies before the last are still reading.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        ref = smem.out[0].at[wg, i % 2]
        ref[...] = part.astype(self.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ref, target)

    def parts(self, value: jax.Array) -> list[jax.Array]:
        """Returns the parts of a warpgroup's result that are stored one by one."""
        return [
            lax.slice(value, (0, j), (WARPGROUP_ROWS, j + self.line))
            for j in range(0, COLUMNS, self.line)
        ]

    def line_columns(self, column: jax.Array, i: int) -> Any:
        """Returns the columns of a tile's part i."""
        return pl.ds(pl.multiple_of(column + i * self.line, self.line), self.line)

    def flags(self, count: int) -> Any:
        """Returns counters of what arrived from peers, 0 at first."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def distance(ref: Any, other: Any) -> Any:
    """Returns the distance in bytes between two references' addresses: its low and high int32."""
    word = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=(word, word))
    def measure(_, ref, other):
        i64 = ir.IntegerType.get_signless(64)
        begin, end = (llvm.ptrtoint(i64, mgpu_utils.memref_ptr(each)) for each in (ref, other))
        far = arith.subi(end, begin)
        words = (arith.trunci(i32(), arith.shrui(far, mgpu.c(at, i64))) for at in (0, 32))
        return tuple(mgpu.FragmentedArray.splat(each, (), is_signed=True) for each in words)

    return measure(ref, other)


def fetch(source: Any, target: Any, barrier: Any) -> None:
    """Starts the copy of contiguous global memory to a buffer that is not swizzled."""
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def send(source: Any, target: Any, far: Any) -> None:
    """Starts the copy of a contiguous buffer in shared memory to a peer's array, uncommitted.

    Args:
        source: a buffer that is not swizzled.
        target: as much contiguous memory at the place in this device's own array.
        far: the ``distance`` of the peer's array.
    """
    num_bytes = math.prod(source.shape) * source.dtype.itemsize
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), splat, splat))
    def start(_, source, target, low, high):
        i64 = ir.IntegerType.get_signless(64)
        low, high = (arith.extui(i64, each.registers.flat[0]) for each in (low, high))
        far = arith.ori(low, arith.shli(high, mgpu.c(32, i64)))
        there = arith.addi(llvm.ptrtoint(i64, mgpu_utils.memref_ptr(target)), far)
        text = "@$0 cp.async.bulk.global.shared::cta.bulk_group [$1], [$2], $3;"
        operands = [one_thread(), there, address(source), constant(num_bytes)]
        assembly(None, operands, text, "b,l,r,r,~{memory}", pure=False)

    start(source, target, *far)


def wait_for_peer(flag: Any, count: int) -> None:
    """Waits until a counter that peers increment is ``count``; then TMA may read what they sent.

    The launch fails if that takes ``SECONDS``.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, flag):
        ptx = f"""{{
            .reg .pred over, late;
            .reg .u32 found;
            .reg .u64 start, now;
            mov.u64 start, %globaltimer;
        AGAIN:
            ld.acquire.sys.global.u32 found, [$0];
            setp.ge.u32 over, found, {count};
            @over bra DONE;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.gt.u64 late, now, {SECONDS}000000000;
            @late trap;
            bra AGAIN;
        DONE:
            fence.proxy.async;
        }}"""
        mgpu_utils.inline_ptx(ptx, mgpu_utils.memref_ptr(flag), has_side_effects=True)

    wait(flag)
