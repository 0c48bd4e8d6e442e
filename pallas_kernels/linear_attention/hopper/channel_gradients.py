"""Gradients of the tokens of all chunks side by side, with a decay per channel of the keys.

The sums are those of ``gradients``, of which each decay is a row of channels:

    dQ_i = sum_j decay(i, j) dP_ij k_j + decay(i, start) (dO S)_i,
    later_i = sum_j decay(i, j) dN_ij k_j - decay(i, start) (dR S)_i,
    earlier_j = sum_i decay(i, j) (dP_ij q_i + dN_ij k_i) + decay(end, j) (Y dS)_j.

As in ``channels``, a level of blocks takes the pairs whose tokens are in two halves of a block.
Both factors of their decay count from the block's middle. A sum goes from large blocks to small
ones. Before a level's product it decays to the place from which that level counts: for a
token that reads, from the start of the chunk on, and for one that writes, from the end back. So
every factor but those of the last level, of 8 tokens, is at most 1, and a sum needs one
accumulator.

The gradient of a sum of logarithms is ``q dQ + k later - k earlier``, channel by channel. At a
chunk's last token it is also what the end's decay multiplies: the state and the kept keys. Of these
the same products are taken that ``k earlier`` has, as most of both cancel. A token's product with
itself cancels, too: it is kept in fp32 beside the others, as the rounding of its factors would be
the whole gradient where decays are strong.

A block has a warpgroup for each sum. The second one also adds the logarithms' gradients up, from
the chunk's end back, as a product with a triangle of ones, while the others begin the next chunk.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import column_layout, row_layout, tile_layout, tiled

from . import levels
from .chunks import COLUMNS, read
from .dealt import DealtHeads
from .gates import CHUNK, Gate, load_gate, load_numbers

_WIDTH = 128  # of keys
_ROLES = 3
_SIDE = _WIDTH // 2  # columns of a tile that are in registers together
_SIDES = (0, _SIDE)
_SLOTS = 2  # parts of 64 value columns in shared memory
_OF_VALUES = ("d_out", "solved", "d_v")
_OF_STATES = ("states", "d_states")


def channel_gradients(
    tokens: dict[str, jax.Array],
    d_out: jax.Array,
    *,
    solved: jax.Array,
    states: jax.Array,
    d_states: jax.Array,
    d_v: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes gradients of q and k, [B, T, N, H], of log decays, fp32 [B, T, M, H], and of betas.

    Args:
        tokens: "q" and "k" as given, [B, T, N, H], "sums" and "decays" of
            ``channels.prepared`` and "gates" without logarithms; T a multiple of 64.
        d_out: cotangent of outputs, [B, T, M, V].
        solved: Y, [B, T, M, V].
        states: states that enter the chunks, [B, M, J, V, H].
        d_states: cotangents of the states that leave the chunks, as states.
        d_v: cotangent of values, dR, [B, T, M, V].
    """
    batch, length, num_keys, width = tokens["k"].shape
    ends = jnp.sum(states.astype(jnp.float32) * d_states.astype(jnp.float32), axis=3)
    ends = ends * tokens["decays"]
    kernel = _ChannelGradients(
        batch=batch, num_keys=num_keys, num_values=d_out.shape[2], num_chunks=length // CHUNK,
        value_width=d_out.shape[3], dtype=d_out.dtype,
    )  # fmt: skip
    by_head = (batch, length, kernel.num_values, width)
    found = launch(
        kernel.block,
        name="channel_gradients",
        operands={name: tokens[name] for name in ("q", "k", "sums", "gates")}
        | {"ends": ends, "d_out": d_out, "solved": solved, "d_v": d_v}
        | {"states": states, "d_states": d_states},
        results={
            "d_q": jax.ShapeDtypeStruct(by_head, kernel.dtype),
            "d_k": jax.ShapeDtypeStruct(by_head, kernel.dtype),
            "d_log": jax.ShapeDtypeStruct(by_head, jnp.float32),
            "d_beta": jax.ShapeDtypeStruct((*ends.shape[:3], CHUNK), jnp.float32),
        },
        scratch=kernel.scratch(),
        grid=kernel.heads.grid,
        grid_names=("block",),
        num_threads=_ROLES,
    )

    def by_key(x: jax.Array) -> jax.Array:
        """Adds the value heads of each key head."""
        if kernel.num_values == num_keys:
            return x
        return x.reshape(batch, length, num_keys, -1, width).sum(axis=3, dtype=jnp.float32)

    d_beta = found["d_beta"] / tokens["gates"][:, :, :, Gate.BETA]
    d_beta = jnp.moveaxis(d_beta, 1, 3).reshape(batch, length, -1)
    return by_key(found["d_q"]), by_key(found["d_k"]), found["d_log"], d_beta


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ChannelGradients:
    """The kernel of one call."""

    batch: int
    num_keys: int
    num_values: int
    num_chunks: int
    value_width: int
    dtype: jnp.dtype

    @property
    def parts(self) -> range:
        """Parts of 64 value columns."""
        return range(self.value_width // COLUMNS)

    @property
    def heads(self) -> DealtHeads:
        """Value heads of chunks, by block."""
        return DealtHeads(self.batch, self.num_chunks, self.num_values)

    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and barriers, by name."""
        tile, slots = tiled(128), min(_SLOTS, len(self.parts))
        keys = plgpu.SMEM((CHUNK, _WIDTH), self.dtype, transforms=tile)
        wide = plgpu.SMEM((CHUNK, _WIDTH), jnp.float32, transforms=tiled(128, 4))
        values = plgpu.SMEM((slots, CHUNK, COLUMNS), self.dtype, transforms=tile)
        states = plgpu.SMEM((slots, COLUMNS, _WIDTH), self.dtype, transforms=tile)
        return {
            "q": keys,
            "k": keys,
            "sums": wide,
            # Factors of a level, or at the end a sum in fp32.
            "shared": plgpu.RefUnion(
                wide, plgpu.SMEM((3, CHUNK, _WIDTH), self.dtype, transforms=tile)
            ),
            **dict.fromkeys(_OF_VALUES, values),
            **dict.fromkeys(_OF_STATES, states),
            # Without the last, for which no room is left.
            "gates": plgpu.SMEM((Gate.WRITTEN, CHUNK), jnp.float32),
            "ends": plgpu.SMEM((_WIDTH,), jnp.float32),
            "tokens_full": plgpu.Barrier(num_arrivals=5),
            "full": plgpu.Barrier(
                num_arrivals=len(_OF_VALUES) + len(_OF_STATES), num_barriers=slots
            ),
            "met": plgpu.Barrier(num_arrivals=_ROLES),
            "copied": plgpu.Barrier(),  # dQ, from the place of the queries
        }

    def block(self, gmem, smem) -> None:
        """Runs one block: a sum for each warpgroup."""
        wg = lax.axis_index("wg")
        for number, role in enumerate((self.queries, self.later, self.earlier)):
            pl.when(wg == number)(lambda role=role: self.run(gmem, smem, role))

    def run(self, gmem, smem, role: Callable) -> None:
        """Goes through a block's items with one of the sums."""
        if role == self.queries:
            self.load_parts(gmem, smem, jnp.int32(0), self.parts[:_SLOTS])
        if role == self.later:
            self.load_tokens(gmem, smem, jnp.int32(0))

        def step(item, _):
            role(gmem, smem, item)

        lax.fori_loop(0, self.heads.count, step, None)

    def load_tokens(self, gmem, smem, item) -> None:
        """Copies an item's queries, keys and numbers to shared memory, if the block has it."""
        (b, chunk, m), group = self.heads.place(item), self.num_values // self.num_keys
        rows = pl.ds(chunk * CHUNK, CHUNK)

        @pl.when(item < self.heads.count)
        def _():
            for source, target in (
                (gmem.q.at[b, rows, lax.div(m, group)], smem.q),
                (gmem.k.at[b, rows, lax.div(m, group)], smem.k),
                (gmem.sums.at[b, rows, m], smem.sums),
                (gmem.gates.at[b, m, chunk, pl.ds(0, int(Gate.WRITTEN))], smem.gates),
                (gmem.ends.at[b, m, chunk], smem.ends),
            ):
                plgpu.copy_gmem_to_smem(source, target, smem.tokens_full)

    def load_parts(self, gmem, smem, item, parts: range) -> None:
        """Copies parts of an item's values and states to shared memory, if the block has it."""
        b, chunk, m = self.heads.place(item)
        rows = pl.ds(chunk * CHUNK, CHUNK)

        @pl.when(item < self.heads.count)
        def _():
            for part in parts:
                columns, slot = pl.ds(part * COLUMNS, COLUMNS), part % _SLOTS
                for name, at in (
                    *((name, (b, rows, m, columns)) for name in _OF_VALUES),
                    *((name, (b, m, chunk, columns)) for name in _OF_STATES),
                ):
                    target = getattr(smem, name).at[slot]
                    plgpu.copy_gmem_to_smem(getattr(gmem, name).at[at], target, smem.full.at[slot])

    def meet(self, smem) -> None:
        """Waits for the other warpgroups."""
        plgpu.barrier_arrive(smem.met)
        plgpu.barrier_wait(smem.met)

    def queries(self, gmem, smem, item) -> None:
        """Computes dQ of an item, and what queries add to the gradient of logarithms."""
        (b, chunk, m), (_, tiles) = self.heads.place(item), smem.shared
        weights, found = self.with_states(
            gmem, smem, item, "d_out", [("d_out", "solved")], "states", loads=True
        )
        plgpu.barrier_wait(smem.tokens_full)
        own = self.own_weights(smem, weights)
        weights = self.weights_of_read(smem, weights)
        found = found * self.by_row(smem, Gate.ENTERED, found.shape)
        for half in levels.HALVES:
            found = levels.scaled(found, smem.sums, levels.reading(half))
            self.meet(smem)  # all have multiplied what the factors replace
            if half == levels.HALVES[0]:
                self.load_parts(gmem, smem, item + 1, self.parts[:_SLOTS])
            self.write_factors(smem, tiles, half, _SIDES[0])
            self.meet(smem)
            found = with_products(found, tiles, [(levels.of_level(weights, half), 1)])
        found = levels.scaled(found, smem.sums, levels.READ)
        self.meet(smem)  # all have read the sums of logarithms and the factors
        for first in _SIDES:
            keys, queries = _side(smem.k, first), _side(smem.q, first)
            part = lax.slice(found, *_corners(first)) + self.load(keys) * lax.broadcast_in_dim(
                own, (CHUNK, _SIDE), [0]
            )
            _side(smem.sums, first)[...] = part * self.load(queries)
            queries[...] = part.astype(self.dtype)
        plgpu.commit_smem()
        self.meet(smem)
        plgpu.copy_smem_to_gmem(smem.q, gmem.d_q.at[b, pl.ds(chunk * CHUNK, CHUNK), m])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem.copied)

    def later(self, gmem, smem, item) -> None:
        """Computes the part of dK of what a key reads; then dK, and gradients of logarithms."""
        (b, chunk, m), (wide, tiles) = self.heads.place(item), smem.shared
        weights, found = self.with_states(gmem, smem, item, "d_v", [("d_v", "solved")], "states")
        plgpu.barrier_wait(smem.tokens_full)
        write_registers(levels.diagonal(weights), gmem.d_beta.at[b, m, chunk])
        weights = self.weights_of_read(smem, -weights)
        found = -found * self.by_row(smem, Gate.ENTERED, found.shape)
        for half in levels.HALVES:
            found = levels.scaled(found, smem.sums, levels.reading(half))
            self.meet(smem)
            self.write_factors(smem, tiles, half, _SIDES[1])
            self.meet(smem)
            found = with_products(found, tiles, [(levels.of_level(weights, half), 1)])
        found = levels.scaled(found, smem.sums, levels.READ)
        self.meet(smem)
        self.meet(smem)  # the other two have written their sums
        rows, d_sums = pl.ds(chunk * CHUNK, CHUNK), []
        for first in _SIDES:
            later, earlier = lax.slice(found, *_corners(first)), self.load(_side(wide, first))
            _side(tiles.at[2], first)[...] = (later + earlier).astype(self.dtype)
            keys, of_queries = (self.load(_side(x, first)) for x in (smem.k, smem.sums))
            d_sums.append(of_queries + keys * (later - earlier))
        ends = load_numbers(smem.ends, _WIDTH, column_layout())
        ends = lax.broadcast_in_dim(ends, found.shape, [1])
        plgpu.commit_smem()  # all warps have read what the operands replace
        plgpu.copy_smem_to_gmem(tiles.at[2], gmem.d_k.at[b, rows, m])
        plgpu.barrier_wait(smem.copied)
        self.load_tokens(gmem, smem, item + 1)
        for first, x in zip(_SIDES, d_sums, strict=True):
            high = x.astype(self.dtype)
            _side(tiles.at[0], first)[...] = high
            _side(tiles.at[1], first)[...] = (x - high.astype(jnp.float32)).astype(self.dtype)
        plgpu.commit_smem()
        ones = levels.triangle().astype(self.dtype)
        d_log = with_products(ends, tiles, [(ones, 0), (ones, 1)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        write_registers(d_log, gmem.d_log.at[b, rows, m])

    def earlier(self, gmem, smem, item) -> None:
        """Computes the part of dK of what a key writes."""
        wide, tiles = smem.shared
        pairs = [("solved", "d_out"), ("solved", "d_v")]
        *products, found = self.with_states(gmem, smem, item, "solved", pairs, "d_states")
        plgpu.barrier_wait(smem.tokens_full)
        beta = self.by_row(smem, Gate.BETA, (CHUNK, CHUNK))
        own = self.own_weights(smem, products[0])
        first = load_gate(smem.gates, Gate.FIRST, column_layout())
        weights = [
            levels.seen(product * sign, first, by_reader=False).astype(self.dtype)
            for product, sign in zip(products, (beta, -beta), strict=True)
        ]
        found = found * lax.broadcast_in_dim(self.written(smem), found.shape, [0])
        for half in levels.HALVES:
            self.meet(smem)
            if half == levels.HALVES[0]:
                self.add_kept(smem, tiles.at[2], found)
            found = levels.scaled(found, smem.sums, levels.writing(half))
            self.meet(smem)
            of_queries, of_keys = (levels.of_level(x, half) for x in weights)
            keys = 2 if half == levels.LAST else 1
            found = with_products(found, tiles, [(of_queries, 0), (of_keys, keys)])
        found = levels.scaled(found, smem.sums, levels.WRITTEN)
        found = found + self.load(smem.q) * lax.broadcast_in_dim(own, found.shape, [0])
        self.meet(smem)
        wide[...] = found
        plgpu.commit_smem()
        self.meet(smem)

    def with_states(
        self, gmem, smem, item, left: str, pairs: list[tuple[str, str]], states: str, *, loads=False
    ) -> list[jax.Array]:
        """Computes products of pairs, [64, 64] each, and that of ``left`` with states, [64, H]."""

        def products(*accs):
            for part in self.parts:
                slot = part % _SLOTS
                plgpu.barrier_wait(smem.full.at[slot])
                for acc, names in zip(accs, pairs, strict=False):
                    a, b = (getattr(smem, name).at[slot] for name in names)
                    plgpu.wgmma(acc, a, b.transpose((1, 0)))
                rows = getattr(smem, states).at[slot]
                plgpu.wgmma(accs[-1], getattr(smem, left).at[slot], rows)
                if part + _SLOTS in self.parts:
                    plgpu.wgmma_wait(0)
                    self.meet(smem)
                    if loads:
                        self.load_parts(gmem, smem, item, self.parts[part + _SLOTS :][:1])
            return [read(acc) for acc in accs]

        square = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
        wide = plgpu.ACC((CHUNK, _WIDTH), jnp.float32)
        return pl.run_scoped(products, *[square] * len(pairs), wide)

    def own_weights(self, smem, products: jax.Array) -> jax.Array:
        """Computes dP of each token with itself, fp32 [64].

        A token's decay to itself is 1, and its products cancel in the gradient of logarithms.
        Products of rounded factors would not.
        """
        return levels.diagonal(products) * load_gate(smem.gates, Gate.BETA, row_layout())

    def weights_of_read(self, smem, products: jax.Array) -> jax.Array:
        """Computes dP or dN of products of readers (rows) with values, without each token's own."""
        beta = load_gate(smem.gates, Gate.BETA, column_layout())
        products *= lax.broadcast_in_dim(beta, products.shape, [1])
        first = load_gate(smem.gates, Gate.FIRST, row_layout())
        return levels.seen(products, first, by_reader=True).astype(self.dtype)

    def written(self, smem) -> jax.Array:
        """Computes ``Gate.WRITTEN`` of each token."""
        beta = load_gate(smem.gates, Gate.BETA, row_layout())
        place = plgpu.broadcasted_iota(jnp.float32, (CHUNK,), 0, layout=row_layout())
        return jnp.where(place >= smem.gates[Gate.FIRST, CHUNK - 1], beta, 0.0)

    def write_factors(self, smem, tiles, half: int, first: int) -> None:
        """Writes some columns of a level's factors: of queries, of keys that write and that read.

        The keys' factors differ in the last level only.
        """
        if half == levels.LAST:
            moves = [
                (levels.READ, [(smem.q, 0), (smem.k, 2)]),
                (levels.WRITTEN, [(smem.k, 1)]),
            ]
        else:
            moves = [(levels.between(half), [(smem.q, 0), (smem.k, 1)])]
        for move, places in moves:
            decay = levels.decay(smem.sums, move, first=first, count=_SIDE)
            for source, which in places:
                x = self.load(_side(source, first)) * decay
                _side(tiles.at[which], first)[...] = x.astype(self.dtype)
        plgpu.commit_smem()

    def add_kept(self, smem, buffer, found: jax.Array) -> None:
        """Adds ``k . written (Y dS)`` of all tokens, channel by channel, to the chunk's end."""
        for first in _SIDES:
            kept = lax.slice(found, *_corners(first)) * self.load(_side(smem.k, first))
            kept = levels.scaled(kept, smem.sums, levels.KEPT, first=first)
            levels.add_columns(kept, buffer, first=first)
        plgpu.commit_smem()
        levels.add_warps(buffer, smem.ends)
        plgpu.commit_smem()

    def by_row(self, smem, gate: Gate, shape: tuple[int, ...]) -> jax.Array:
        return lax.broadcast_in_dim(load_gate(smem.gates, gate, row_layout()), shape, [0])

    def load(self, tile) -> jax.Array:
        return plgpu.load(tile, layout=tile_layout()).astype(jnp.float32)


def with_products(found: jax.Array, tiles: Any, products: list[tuple[jax.Array, int]]) -> jax.Array:
    """Adds products of [64, 64] with tiles [64, H], given by their numbers."""

    def add(acc):
        for left, which in products:
            plgpu.wgmma(acc, left, tiles.at[which])

    start: Any = plgpu.ACC.init(found)
    return lax.optimization_barrier(pl.run_state(add)(start))


def _side(tile: Any, first: int) -> Any:
    """Columns of a tile in shared memory."""
    return tile.at[:, pl.ds(first, _SIDE)]


def _corners(first: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the first and last index of those columns, of a tile in registers."""
    return (0, first), (CHUNK, first + _SIDE)
