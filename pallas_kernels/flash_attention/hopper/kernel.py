"""Base class of the Hopper attention kernels: a call's static part, its tiles and its masks.

Dims: B batch, T query position, S key position, N query heads, K key/value heads, H head width of
query and key, Hv head width of value.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.spec import AttentionSpec
from pallas_kernels.hopper import odd_tiles
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import mgpu, plgpu
from pallas_kernels.hopper.threads import assembly, i32
from pallas_kernels.hopper.tile import LOG2E, mask_tile

from .tiles import Geometry


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """Base class of the Hopper attention kernels of one call; subclasses add the phases."""

    name: ClassVar[str]  # in profiler traces
    g: Geometry
    spec: AttentionSpec
    dtype: jnp.dtype  # of operands and results
    q_tile: int  # queries per tile
    kv_tile: int  # keys per tile
    segmented: bool  # whether tokens have ids; a query sees keys of its own id
    interpretable: bool  # avoids what the interpreter lacks
    padded: bool = True  # lengths of arrays in global memory are multiples of 8
    own_copies: bool = False  # copies queries by ``odd_tiles`` whatever their length

    @property
    def odd_queries(self) -> bool:
        """Whether ``odd_tiles``, not Pallas, copies tiles of arrays with T rows (queries)."""
        return not self.padded and (self.own_copies or self.g.T % odd_tiles.GROUP != 0)

    @property
    def odd_keys(self) -> bool:
        """Whether ``odd_tiles``, not Pallas, copies tiles of keys and values."""
        return not self.padded and self.g.S % odd_tiles.GROUP != 0

    @property
    def num_q_tiles(self) -> int:
        """Number of query tiles per head and batch entry."""
        return -(-self.g.T // self.q_tile)

    @property
    def num_tiles(self) -> int:
        """Number of query tiles of all heads and batch entries."""
        return self.g.B * self.g.N * self.num_q_tiles

    @property
    def num_k_tiles(self) -> int:
        """Number of key tiles per head and batch entry."""
        return -(-self.g.S // self.kv_tile)

    @property
    def ragged(self) -> bool:
        """Whether the last key tile is partly padding that no ids mask."""
        return self.g.S % self.kv_tile != 0 and not self.segmented

    @property
    def masked(self) -> bool:
        """Whether any tile may contain scores that must be masked."""
        s = self.spec
        return self.segmented or s.left is not None or s.right is not None or self.ragged

    @property
    def tiling(self) -> Any:
        """Tiling and swizzle of an operand's tile in shared memory."""
        raise NotImplementedError

    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and barriers, by name."""
        raise NotImplementedError

    def arrivals(self, count: int) -> dict[str, Any]:
        """Returns a buffer of ``count`` barriers for copies by ``odd_tiles``; {} without such."""
        return {"arrivals": odd_tiles.arrivals(count)} if self.odd_queries or self.odd_keys else {}

    def load_tile(
        self, smem, odd: bool, source, place: odd_tiles.TilePlace, tile, full, which
    ) -> None:
        """Starts the copy to shared memory of a tile of an array [B, rows, heads, width].

        Args:
            odd: ``odd_queries`` or ``odd_keys``.
            source: the array in global memory.
            place: batch entry, first row and head of the tile.
            tile: the buffer in shared memory.
            full: barrier that signals the tile's arrival; for an odd tile, the start of its copy.
            which: index in ``arrivals`` of the barrier that signals an odd tile's arrival.
        """
        if odd:
            odd_tiles.load_tile(source, place, tile, self.tiling, smem.arrivals, which)
            plgpu.barrier_arrive(full)
            return
        b, row, head = place
        plgpu.copy_gmem_to_smem(source.at[b, pl.ds(row, tile.shape[0]), head], tile, full)

    def make_arrivals(self, smem) -> None:
        """Initializes the barriers of odd tiles, before the loading warpgroup's first copy."""
        if self.odd_queries or self.odd_keys:
            odd_tiles.make_arrivals(smem.arrivals)

    def wait_tile(self, smem, odd: bool, which, use) -> None:
        """Waits until an odd tile is in shared memory, after a wait for ``full`` of ``load_tile``.

        Args:
            odd: as in ``load_tile``.
            which: as in ``load_tile``.
            use: number of tiles that arrived at barrier ``which`` before.
        """
        if odd:
            odd_tiles.wait(smem.arrivals, which, use)

    def only(self, it):
        """Returns 0 as the index into a buffer [1, ...], computed anew in each loop step ``it``.

        So no registers hold the buffer's WGMMA descriptors throughout the loop (``fresh_zero``).
        """
        return 0 if self.interpretable else fresh_zero(it)

    def store_tile(self, tile, sink, place: odd_tiles.TilePlace) -> None:
        """Starts the copy of a tile from shared memory to an array, as one group to wait for."""
        if odd_tiles.is_odd(sink):
            odd_tiles.store_tile(tile, sink, place, self.tiling)
            return
        b, row, head = place
        plgpu.copy_smem_to_gmem(tile, sink.at[b, pl.ds(row, tile.shape[0]), head])

    def run(self, gmem, smem) -> None:
        """Runs one block of the kernel."""
        raise NotImplementedError

    def launch(
        self, operands: dict[str, Any], results: dict[str, Any], *, num_tiles: int, num_threads: int
    ) -> dict[str, jax.Array]:
        """Launches the kernel with one block per tile."""
        return launch(
            self.run,
            name=self.name,
            operands=operands,
            results=results,
            scratch=dict(sorted(self.scratch().items())),
            grid=(num_tiles,),
            grid_names=("tile",),
            num_threads=num_threads,
            params=dict(approx_math=True, unsafe_no_auto_barriers=True),
        )

    def probabilities(self, s, lse, *, lse_dim: int):
        """Computes P from unscaled scores, and the soft cap's derivative (None without a cap)."""
        unit, slope, cap = self.spec.scale * LOG2E, None, self.spec.logit_soft_cap
        if cap is not None:
            # tanh(x) by ex2, as in the forward.
            t = 1.0 - 2.0 / (jnp.exp2(s * (2.0 * LOG2E * self.spec.scale / cap)) + 1.0)
            s, unit, slope = t, cap * LOG2E, 1.0 - t * t
        return jnp.exp2(s * unit - lax.broadcast_in_dim(lse, s.shape, [lse_dim])), slope

    def mask_ids(self, x, q_ids, kv_ids, *, fill: float, by_keys: bool = False):
        """Sets elements to ``fill`` where the ids of query and key differ.

        Args:
            x: a tile, queries by keys; keys by queries if ``by_keys``.
            q_ids, kv_ids: ids of the tile's queries and keys, in row or column layout as their dim
                of x.
            fill: the value of a hidden score or probability.
            by_keys: whether rows of ``x`` are keys and columns are queries.
        """
        q_dim, kv_dim = (1, 0) if by_keys else (0, 1)
        q_ids = lax.broadcast_in_dim(q_ids, x.shape, [q_dim])
        return jnp.where(q_ids == lax.broadcast_in_dim(kv_ids, x.shape, [kv_dim]), x, fill)

    def mask_positions(self, x, aligned, key0, *, fill: float, by_keys: bool = False):
        """Sets elements to ``fill`` where positional masks hide the key; x is as in ``mask_ids``.

        Args:
            aligned: column minus row of the diagonal, on which a query meets the key at its
                position.
            key0: position of the tile's first key.
        """
        left, right = self.spec.left, self.spec.right
        if by_keys:  # column minus row is query minus key
            return mask_tile(
                x,
                fill=fill,
                diag_min=None if right is None else aligned - right,
                diag_max=None if left is None else aligned + left,
                num_rows=self.g.S - key0 if self.ragged else None,
            )
        return mask_tile(
            x,
            fill=fill,
            diag_max=None if right is None else aligned + right,
            diag_min=None if left is None else aligned - left,
            num_cols=self.g.S - key0 if self.ragged else None,
        )


def fresh_zero(it: Any) -> jax.Array:
    """Returns an int32 0 that the compiler takes for a value which depends on the loop's step.

    The WGMMA descriptors of a buffer are constant in a loop. The compiler computes all of them
    before the loop, runs out of registers, and reloads them from local memory in every step.
    Indexed as ``buffer.at[fresh_zero(it)]``, it computes them in the step instead.

    Args:
        it: the loop's step, int32 below 2**30.
    """
    splat = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat)

    @plgpu.inline_mgpu(arg_types=(splat,), return_type=result)
    def zero(_, it):
        step = it.registers.flat[0]
        high = assembly(i32(), [step], "shr.u32 $0, $1, 30;", "=r,r", pure=False)
        return mgpu.FragmentedArray.splat(high, (), is_signed=True)

    return zero(it)
