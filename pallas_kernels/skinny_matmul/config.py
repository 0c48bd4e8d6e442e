"""Tiles of the kernel, by size."""

import dataclasses

from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES, WARPGROUP

ROWS = 64  # of a warpgroup's product
DEPTHS = (64, 128)  # of K, in a tile
MOST_ROWS = 256
ROW_MULTIPLE = 8
WIDTHS = (32, 64, 128, 256)
MOST_STAGES = 24
RESERVE = 2 * 1024  # barriers
TRANSPOSED_WARPGROUPS = 2  # that share the rows
MOST_SUMS = 128  # a thread of these two, beside what else it needs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SkinnyConfig:
    """A block has so many columns of the weight, all of K or a part, and all rows."""

    tile_n: int = 64
    depth: int = 64  # of K, in a tile
    cluster: int = 1  # blocks that share each copy of x's tiles
    splits: int = 1  # parts of K; above 1 sums leave in fp32, and whoever reads them adds them
    transposed: bool = False  # columns of the weight are the left operand of tensor cores

    @property
    def out_bytes(self) -> int:
        """Bytes of a sum on its way out."""
        return 4 if self.splits > 1 else 2

    def num_warpgroups(self, M: int) -> int:
        """Those that multiply."""
        return TRANSPOSED_WARPGROUPS if self.transposed else num_groups(M)

    def staged_rows(self, M: int) -> int:
        """Rows of x that a tile in shared memory has."""
        return M if self.transposed else num_groups(M) * ROWS

    def stage_bytes(self, M: int) -> int:
        """Shared memory of a tile of x and one of the weight."""
        return 2 * self.depth * (self.tile_n + self.staged_rows(M))

    def num_stages(self, M: int, *, swiglu: bool) -> int:
        """Tiles in a ring, beside results on their way out: what shared memory has room for."""
        out = self.out_bytes * self.staged_rows(M) * self.tile_n // (2 if swiglu else 1)
        if self.transposed and self.splits > 1:
            out = 0  # sums leave from registers
        return min((SMEM_BYTES - RESERVE - out) // self.stage_bytes(M), MOST_STAGES)

    def unsupported(self, M: int, N: int, K: int, *, swiglu: bool) -> str | None:
        """Why these tiles cannot compute a product; None if they can."""
        part = self.tile_n // 2 if swiglu else self.tile_n
        if self.tile_n not in WIDTHS or part < WIDTHS[0] or N % self.tile_n:
            return (
                f"N={N} is no multiple of tiles of {self.tile_n}, or halves are under {WIDTHS[0]}"
            )
        if self.depth not in DEPTHS or K % (self.depth * self.splits):
            return f"K={K} is not a multiple of {self.splits} times {self.depth}"
        if self.splits > 1 and swiglu:
            return "parts of K are of plain products"
        if self.transposed:
            if M % (8 * TRANSPOSED_WARPGROUPS) or part % ROWS:
                return f"{M} rows do not divide by 16, or {part} columns by {ROWS}"
            registers = M * self.tile_n // TRANSPOSED_WARPGROUPS // WARPGROUP > MOST_SUMS
        else:
            registers = num_groups(M) > 2 and self.tile_n > 128
        if registers:
            return f"{M} rows by {self.tile_n} columns are too many registers"
        if self.cluster > 1 and (M % (8 * self.cluster) or N // self.tile_n % self.cluster):
            return f"{M} rows or {N // self.tile_n} blocks do not divide by {self.cluster}"
        if self.num_stages(M, swiglu=swiglu) < 2:
            return "two tiles do not fit in shared memory"
        return None


def num_groups(M: int) -> int:
    """Warpgroups that multiply 64 rows each."""
    return -(-M // ROWS)


def config_for(M: int, N: int, K: int, *, swiglu: bool) -> SkinnyConfig | None:
    """As many blocks as there are multiprocessors, or nearly; None where no tile fits.

    Tiles of 64 columns at least, where they divide N: a step of the ring takes as long with less.
    """

    def waves(config: SkinnyConfig) -> int:
        """Columns that a multiprocessor computes."""
        return -(-(N // config.tile_n) // NUM_PROCESSORS) * config.tile_n

    for least in (64, WIDTHS[0]):
        configs = [SkinnyConfig(tile_n=width) for width in WIDTHS if width >= least]
        fit = [c for c in configs if c.unsupported(M, N, K, swiglu=swiglu) is None]
        if fit:
            return min(fit, key=lambda config: (waves(config), -config.tile_n))
    return None
