"""Plan of which worker reads which key tiles: all rows' tiles end to end, cut in equal pieces.

This sequence of all tiles is the line. A piece may end in the middle of a row, so that every worker
has equally many tiles, whatever the lengths. A piece belongs to a team of workers, one for each of
a few kv heads. They read the same pages at about the same time, so neighboring memory is read
together.

Lengths are inputs of a plan, not compiled into it. Computing it takes two small operations, and
layers of a model with the same window share one plan.

Dims: E entry (a query tile of a row), W team.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention.spec import PagedCall

from .config import PagedConfig, QueryLayout


class PagePlan(NamedTuple):
    """Plan of a call: the tiles of the line before each entry, and where each team begins."""

    before_E1: jax.Array  # int32: tiles of the line before each entry; the last is their total
    entry_W: jax.Array  # int32: the entry in which each team begins; E if it has no tile


class Extent(NamedTuple):
    """Tokens of one query tile, and the range of keys that they see."""

    position: Any  # of the first token
    tokens: Any  # number of tokens
    begin: Any  # first key that any of the tokens sees
    end: Any  # end of the keys that any of them sees


def extent_of(
    capacity: int,
    layout: QueryLayout,
    window: int | None,
    length: Any,
    queries: Any,
    tile: Any,
) -> Extent:
    """Returns a query tile's tokens and the keys they see; takes arrays or a kernel's scalars.

    Args:
        capacity: most positions per row.
        length, queries: the row's numbers of positions and of queries (None: T).
        tile: index among the row's query tiles.
    """

    def divided(x: Any, by: int) -> Any:
        return lax.div(x, np.full(np.shape(x), by, np.int32))

    token = divided(tile, layout.tiles_per_token) * layout.tokens
    length = jnp.minimum(jnp.maximum(length, 0), capacity)
    queries = layout.T if queries is None else jnp.minimum(jnp.maximum(queries, 0), layout.T)
    tokens = jnp.minimum(jnp.maximum(queries - token, 0), layout.tokens)
    position = length - queries + token
    # Without tokens, it sees nothing.
    end = jnp.maximum(position + tokens, 0) * jnp.minimum(tokens, 1)
    begin = end - end  # zeros_like of a number with a mesh's sharding does not lower in a kernel
    if window is not None:
        begin = jnp.minimum(jnp.maximum(position - (window - 1), 0), end)
    return Extent(position=position, tokens=tokens, begin=begin, end=end)


def plan_pages(call: PagedCall, layout: QueryLayout, config: PagedConfig) -> PagePlan:
    """Computes the plan of reading pages for a call's current row lengths."""
    tile_E = jnp.tile(jnp.arange(layout.num_q_tiles, dtype=jnp.int32), layout.B)
    length_E, queries_E = (
        None if x is None else jnp.repeat(x, layout.num_q_tiles)
        for x in (call.lengths_B, call.query_lengths_B)
    )
    extent = extent_of(call.capacity, layout, call.spec.window, length_E, queries_E, tile_E)
    tiles_E = -(-extent.end // config.block_kv) - extent.begin // config.block_kv
    # Sums of all pairs are one small kernel, where a scan is several.
    each, all_of_them = jnp.arange(layout.num_entries), jnp.arange(layout.num_entries + 1)
    earlier = each[None, :] < all_of_them[:, None]
    head_blocks = layout.K // config.team(layout)
    in_line_E = head_blocks * tiles_E
    before_E1 = jnp.sum(jnp.where(earlier, in_line_E[None, :], 0), axis=1, dtype=jnp.int32)
    num_teams = config.num_teams(layout)
    if layout.num_entries == 1:  # a constant, and one operation less
        return PagePlan(before_E1, jnp.asarray(np.zeros(num_teams, np.int32)))
    start_W = piece_start(jnp.arange(num_teams, dtype=jnp.int32), before_E1[-1], num_teams)
    passed = before_E1[None, 1:] <= start_W[:, None]
    return PagePlan(before_E1, jnp.sum(passed, axis=1, dtype=jnp.int32))


def piece_start(team: Any, total: Any, num_teams: int) -> Any:
    """Returns the first tile, in the line, of a team; the first teams may have one tile more."""
    each, more = lax.div(total, jnp.int32(num_teams)), lax.rem(total, jnp.int32(num_teams))
    return team * each + jnp.minimum(team, more)


def team_of(tile: Any, total: Any, num_teams: int) -> Any:
    """Returns the team that reads a tile of the line: the inverse of ``piece_start``."""
    each, more = lax.div(total, jnp.int32(num_teams)), lax.rem(total, jnp.int32(num_teams))
    longer = more * (each + 1)
    late = more + lax.div(tile - longer, jnp.maximum(each, 1))
    return jnp.where(tile < longer, lax.div(tile, each + 1), late)
