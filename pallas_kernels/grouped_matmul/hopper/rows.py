"""Rows that an index names, to shared memory: what this generation's copy engine cannot do.

128 threads copy 16 bytes each, eight times a tile, to where a swizzled tile has them. Copies are
waited for by the threads that asked for them, a few steps later, and made visible to the tensor
cores before the tile is said to be there.
"""

from typing import Any

from pallas_kernels.hopper.mosaic import mgpu_utils, plgpu
from pallas_kernels.hopper.tile import tiled

THREADS = 128
PIECE = 16  # bytes
LINE = 128  # bytes within which pieces are permuted
IN_FLIGHT = 2
"""Steps whose copies are not waited for."""


def copy_rows(source: Any, rows: Any, target: Any, *, row_bytes: int) -> None:
    """Asks for a tile of 16 KiB.

    Args:
        source: [T, columns] in global memory, from the tile's first column on.
        rows: int32 [rows] in global memory: of the source, for each row of the tile.
        target: the tile in shared memory, [rows, columns] of 2-byte numbers.
        row_bytes: from a row of the source to the next.
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
    """Closes a step, and waits for all but the last ``IN_FLIGHT``."""

    @plgpu.inline_mgpu()
    def wait(_):
        ptx = f"cp.async.commit_group; cp.async.wait_group {IN_FLIGHT};"
        mgpu_utils.inline_ptx(ptx, has_side_effects=True)

    wait()
    plgpu.commit_smem()
