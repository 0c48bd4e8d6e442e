"""Who reads what: all key tiles of all rows and kv heads in one line, cut into equal pieces.

A worker may end in the middle of a row, so that every worker has as many tiles as any other,
whatever the lengths. It depends on lengths, never on how they compile: layers of a model that have
the same window share a plan.

Dims: E entry (a query tile of a row), W worker.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.spec import PagedCall

from .config import PagedConfig, QueryLayout

BEFORE, TILES, FIRST_TILE, POSITION, TOKENS, BEGIN, END = range(7)
"""Columns of an entry: tiles before it in the line, its own for one kv head, the first of them in
its row, the position of its first token, its tokens, the keys that any of them sees."""

START, STOP, FIRST_SEGMENT, SEGMENT_STOP = range(4)
"""Columns of a worker: its tiles in the line, and the segments that they belong to. A segment is an
entry's line for one kv head: ``segment = entry * K + head``."""


class PagePlan(NamedTuple):
    """The plan of a call."""

    entries_E8: jax.Array  # int32
    workers_W4: jax.Array  # int32


def plan_pages(call: PagedCall, layout: QueryLayout, config: PagedConfig) -> PagePlan:
    """The plan for these lengths, in a few small operations."""
    c, block = layout, config.block_kv
    tile_T = jnp.arange(c.num_q_tiles, dtype=jnp.int32) // c.tiles_per_token
    token_1T = (tile_T * c.tokens)[None, :]
    queries_B1, lengths_B1 = call.query_lengths_B[:, None], call.lengths_B[:, None]
    tokens_BT = jnp.clip(queries_B1 - token_1T, 0, c.tokens)
    position_BT = lengths_B1 - queries_B1 + token_1T
    end_BT = jnp.where(tokens_BT > 0, jnp.maximum(position_BT + tokens_BT, 0), 0)
    begin_BT = jnp.zeros_like(end_BT)
    if call.spec.window is not None:
        begin_BT = jnp.clip(position_BT - (call.spec.window - 1), 0, end_BT)
    first_BT = begin_BT // block
    tiles_BT = jnp.maximum(-(-end_BT // block) - first_BT, 0)
    columns = (tiles_BT, first_BT, position_BT, tokens_BT, begin_BT, end_BT)
    tiles_E, *rest_E = (x.reshape(-1) for x in columns)
    # Sums of all pairs are one small kernel, where a scan is several.
    before_E = c.K * _sum_before(tiles_E)
    entries_E8 = jnp.stack([before_E, tiles_E, *rest_E, jnp.zeros_like(tiles_E)], axis=1)

    total = c.K * jnp.sum(tiles_E)
    start_W = worker_start(jnp.arange(config.all_workers + 1, dtype=jnp.int32), total, config)
    start_W, stop_W = start_W[:-1], start_W[1:]
    first_W = _segment_of(start_W, before_E, tiles_E, c.K)
    last_W = _segment_of(jnp.maximum(stop_W - 1, 0), before_E, tiles_E, c.K)
    segment_stop_W = jnp.where(stop_W > start_W, last_W + 1, first_W)
    return PagePlan(entries_E8, jnp.stack([start_W, stop_W, first_W, segment_stop_W], axis=1))


def worker_start(worker: jax.Array, total: jax.Array, config: PagedConfig) -> jax.Array:
    """Where a worker begins: the first ones have a tile more than the others."""
    each, more = total // config.all_workers, total % config.all_workers
    return worker * each + jnp.minimum(worker, more)


def _sum_before(x_E: jax.Array) -> jax.Array:
    earlier = jnp.arange(len(x_E))[None, :] < jnp.arange(len(x_E))[:, None]
    return jnp.sum(jnp.where(earlier, x_E[None, :], 0), axis=1, dtype=jnp.int32)


def _segment_of(
    tile_W: jax.Array, before_E: jax.Array, tiles_E: jax.Array, num_heads: int
) -> jax.Array:
    """The segment of a tile of the line."""
    after = before_E + num_heads * tiles_E
    entry_W = jnp.sum(after[None, :] <= tile_W[:, None], axis=1, dtype=jnp.int32)
    entry_W = jnp.minimum(entry_W, len(before_E) - 1)
    head_W = (tile_W - before_E[entry_W]) // jnp.maximum(tiles_E[entry_W], 1)
    return entry_W * num_heads + jnp.minimum(head_W, num_heads - 1)
