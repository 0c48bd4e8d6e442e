"""Who reads what: all key tiles of all rows and kv heads in one line, cut into equal pieces.

A piece may end in the middle of a row, so that every worker has as many tiles as any other,
whatever the lengths. A piece belongs to a team of workers, one for each of a few kv heads, which
read the same pages at about the same time: what lies side by side in memory is read together.

A plan depends on lengths, never on how they compile, and is two small operations; layers of a model
that have the same window share one.

Dims: E entry (a query tile of a row), W team.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.spec import PagedCall

from .config import PagedConfig, QueryLayout


class PagePlan(NamedTuple):
    """The plan of a call. An entry is in the line once for each block of kv heads."""

    before_E1: jax.Array  # int32: tiles of the line before each entry; last, all of them
    entry_W: jax.Array  # int32: the entry that each team begins in


class Extent(NamedTuple):
    """What the tokens of a query tile are, and what they see."""

    position: Any  # of the first token
    tokens: Any
    begin: Any  # of the keys that any of them sees
    end: Any


def extent_of(
    capacity: int,
    layout: QueryLayout,
    window: int | None,
    length: Any,
    queries: Any,
    tile: Any,
) -> Extent:
    """The extent of a query tile, of arrays or, in a kernel, of numbers.

    Args:
        length, queries: of the row.
        tile: among the row's query tiles.
    """

    def divided(x: Any, by: int) -> Any:
        return lax.div(x, lax.full_like(x, by))

    token = divided(tile, layout.tiles_per_token) * layout.tokens
    length = jnp.minimum(jnp.maximum(length, 0), capacity)
    queries = jnp.minimum(jnp.maximum(queries, 0), layout.T)
    tokens = jnp.minimum(jnp.maximum(queries - token, 0), layout.tokens)
    position = length - queries + token
    # Without tokens, it sees nothing.
    end = jnp.maximum(position + tokens, 0) * jnp.minimum(tokens, 1)
    begin = jnp.zeros_like(end)
    if window is not None:
        begin = jnp.minimum(jnp.maximum(position - (window - 1), 0), end)
    return Extent(position=position, tokens=tokens, begin=begin, end=end)


def plan_pages(call: PagedCall, layout: QueryLayout, config: PagedConfig) -> PagePlan:
    """The plan for these lengths."""
    tile_BT = jnp.broadcast_to(
        jnp.arange(layout.num_q_tiles, dtype=jnp.int32)[None, :], (layout.B, layout.num_q_tiles)
    )
    rows = (
        jnp.broadcast_to(x[:, None], tile_BT.shape) for x in (call.lengths_B, call.query_lengths_B)
    )
    extent = extent_of(call.capacity, layout, call.spec.window, *rows, tile_BT)
    first_BT = extent.begin // config.block_kv
    tiles_E = ((extent.end + (config.block_kv - 1)) // config.block_kv - first_BT).reshape(-1)
    # Sums of all pairs are one small kernel, where a scan is several.
    each, all_of_them = jnp.arange(layout.num_entries), jnp.arange(layout.num_entries + 1)
    earlier = each[None, :] < all_of_them[:, None]
    head_blocks = layout.K // config.team(layout)
    before_E1 = head_blocks * jnp.sum(
        jnp.where(earlier, tiles_E[None, :], 0), axis=1, dtype=jnp.int32
    )
    team_W = jnp.arange(config.num_teams(layout), dtype=jnp.int32)
    start_W = Pieces.of(before_E1[-1], layout, config).start(team_W)
    passed = before_E1[None, 1:] <= start_W[:, None]
    entry_W = jnp.sum(passed, axis=1, dtype=jnp.int32)
    return PagePlan(before_E1, jnp.minimum(entry_W, layout.num_entries - 1))


SMALL_ABOVE = 64  # tiles of a team: below, pieces are equal


class Pieces(NamedTuple):
    """The line, cut for teams: large pieces side by side, then small ones.

    Multiprocessors do not read equally fast, so that of equal pieces some are done late. Small ones
    are begun where a large one is done.
    """

    large_total: Any  # tiles in large pieces
    total: Any
    large: int  # pieces
    small: int

    @classmethod
    def of(cls, total: Any, layout: QueryLayout, config: PagedConfig) -> "Pieces":
        """The pieces of so many tiles."""
        large = config.large_teams(layout)
        small = config.num_teams(layout) - large
        in_small = lax.div(total, jnp.int32(100)) * config.small_percent
        in_small = jnp.where(total >= SMALL_ABOVE * large, in_small, 0) if small else 0
        return cls(large_total=total - in_small, total=total, large=large, small=small)

    def start(self, team: Any) -> Any:
        """Where a team begins; one after the last begins at the end."""
        start = _start(team, self.large_total, self.large)
        if not self.small:
            return start
        rest = self.total - self.large_total
        later = self.large_total + _start(team - self.large, rest, self.small)
        return jnp.where(team < self.large, start, later)

    def team_of(self, tile: Any) -> Any:
        """Who has a tile of the line."""
        team = _piece_of(tile, self.large_total, self.large)
        if not self.small:
            return team
        rest = self.total - self.large_total
        later = self.large + _piece_of(tile - self.large_total, rest, self.small)
        return jnp.where(tile < self.large_total, team, later)


def _start(piece: Any, total: Any, count: int) -> Any:
    """Where one of equal pieces begins: the first ones have a tile more than the others."""
    each, more = lax.div(total, jnp.int32(count)), lax.rem(total, jnp.int32(count))
    return piece * each + jnp.minimum(piece, more)


def _piece_of(tile: Any, total: Any, count: int) -> Any:
    """The inverse of ``_start``."""
    each, more = lax.div(total, jnp.int32(count)), lax.rem(total, jnp.int32(count))
    longer = more * (each + 1)
    late = more + lax.div(tile - longer, jnp.maximum(each, 1))
    return jnp.where(tile < longer, lax.div(tile, each + 1), late)
