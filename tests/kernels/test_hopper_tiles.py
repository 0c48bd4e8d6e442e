"""Which tiles the blocks of the Hopper attention kernels visit, counted without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention.hopper import backward_block, tiles
from pallas_kernels.flash_attention.hopper.tiles import Geometry


@pytest.mark.parametrize(
    ("B", "S", "N", "K", "parts"),
    [(1, 26368, 8, 1, 2), (10, 512, 16, 2, 8), (4, 4096, 32, 8, 1), (1, 128, 12, 4, 3)],
)
def test_query_heads_get_blocks_of_their_own_where_key_tiles_are_few(B, S, N, K, parts):
    g = Geometry(B=B, T=S, S=S, N=N, K=K, H=64, Hv=64)
    split, found = backward_block.split_heads(g, 128)
    assert (found, split.K, split.group) == (parts, K * parts, N // K // parts)


@pytest.mark.parametrize(("B", "K", "S"), [(4, 32, 2048), (1, 12, 3000), (3, 7, 40), (1, 1, 99999)])
def test_backward_blocks_visit_every_key_tile_once(B, K, S):
    g = Geometry(B=B, T=8, S=S, N=K, K=K, H=64, Hv=64)
    num_tiles = 5
    blocks = jnp.arange(B * K * num_tiles)
    b, head, tile = tiles.key_tile_of(blocks, g, num_tiles)
    assert len(set(zip(b.tolist(), head.tolist(), tile.tolist(), strict=True))) == len(blocks)
    assert (max(b), max(head), max(tile)) == (B - 1, K - 1, num_tiles - 1)


@pytest.mark.parametrize("seed", range(20))
def test_tile_ranges_cover_what_is_seen_and_unmasked_tiles_are_whole(seed):
    rng = np.random.default_rng(seed)
    outer, inner, B = 8, 4, 2
    o_ids, i_ids = rng.integers(-1, 4, (B, 40)), rng.integers(-1, 4, (B, 36))
    if seed % 4:  # documents one after another; else in any order
        o_ids, i_ids = np.sort(o_ids, axis=1), np.sort(i_ids, axis=1)
    o_ids, i_ids = np.where(o_ids < 0, -1, o_ids), np.where(i_ids < 0, -2, i_ids)
    tile_ranges = jax.jit(tiles.tile_ranges, static_argnums=(2, 3))
    ranges = np.asarray(tile_ranges(o_ids.astype(np.int32), i_ids.astype(np.int32), outer, inner))
    for b in range(B):
        for i in range(40 // outer):
            lo, full_lo, full_hi, hi = ranges[b, i]
            for j in range(36 // inner):
                seen = (
                    o_ids[b, i * outer : (i + 1) * outer, None]
                    == i_ids[b, None, j * inner : (j + 1) * inner]
                )
                assert lo <= j < hi or not seen.any()
                assert seen.all() or not full_lo <= j < full_hi
