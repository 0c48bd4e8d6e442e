"""Which rows a tile of a grouped product has: found on the device, before the kernel.

A tile has rows of one group. The copy engine moves 8 rows at a time, so a group's first tile
begins at the multiple of 8 at or before its first row and leaves the rows before it alone.

Dims: G group, I tile.
"""

import jax
import jax.numpy as jnp

ROW_MULTIPLE = 8


def most_row_tiles(num_rows: int, num_groups: int, block_rows: int) -> int:
    """Row tiles that no sizes exceed, those of rows of no group among them."""
    shifted = num_rows + (ROW_MULTIPLE - 1) * (num_groups + 1)
    return shifted // block_rows + num_groups + 1


def row_tiles(group_sizes_G: jax.Array, *, num_rows: int, block_rows: int) -> jax.Array:
    """int32 [I + 1, 4]: (group, first row read, first row written, end of rows written) of each
    tile in the order of rows, and (number of tiles, 0, 0, 0) last.

    Rows of no group come last, as those of a group number G.
    """
    num_groups = group_sizes_G.shape[0]
    rest = num_rows - jnp.sum(group_sizes_G, keepdims=True)
    sizes_G = jnp.concatenate([group_sizes_G, rest]).astype(jnp.int32)
    ends_G = jnp.cumsum(sizes_G)
    starts_G = ends_G - sizes_G
    first_G = starts_G - starts_G % ROW_MULTIPLE
    counts_G = jnp.where(sizes_G > 0, -(-(ends_G - first_G) // block_rows), 0)
    tile_ends_G = jnp.cumsum(counts_G)
    tile_I = jnp.arange(most_row_tiles(num_rows, num_groups, block_rows), dtype=jnp.int32)
    group_I = jnp.sum(tile_ends_G[None, :] <= tile_I[:, None], axis=1, dtype=jnp.int32)
    group_I = jnp.minimum(group_I, num_groups)
    row_I = first_G[group_I] + (tile_I - (tile_ends_G - counts_G)[group_I]) * block_rows
    tiles = jnp.stack(
        [
            group_I,
            row_I,
            jnp.maximum(starts_G[group_I], row_I),
            jnp.minimum(ends_G[group_I], row_I + block_rows),
        ],
        axis=1,
    )
    return jnp.pad(tiles, ((0, 1), (0, 0))).at[-1, 0].set(tile_ends_G[-1])
