"""Gradients of the tokens of all chunks side by side.

Let S be the state that enters a chunk, and dS the cotangent of the one that leaves it. Every
gradient is a sum of products within the chunk; without the delta rule, of those without dN and dR:

    dQ = entered (dO S) + dP K,             dP = decay (dO Y') beta,
    later = dN K - entered (dR S),          dN = -decay (dR Y') beta without the diagonal,
    earlier = dP' Q + dN' K + written (Y dS),    dK = later + earlier.

Decays need no products of their own: where a query or a key multiplies a product, the decay of its
token does too, so the gradient of a sum of logarithms is ``q . dQ + k . later - k . earlier``.
A block has a warpgroup for each of the three sums, and adds those of a key head's value heads. It
goes from one chunk's key head to another, and copies the next value head's operands ahead.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import dataclasses
import enum
import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import column_layout, row_layout, tile_layout, tiled

from .chunks import COLUMNS, read
from .dealt import DealtHeads
from .gates import CHUNK, Gate, load_gate, passed


class _Row(enum.IntEnum):
    """Numbers of each token that the kernel sums."""

    QUERY = 0  # q . dQ
    LATER = 1  # k . later
    EARLIER = 2  # k . earlier
    KEPT = 3  # k . written (Y dS)
    BETA = 4  # Y . dR
    ENDS = 5  # S . dS, of the value columns in the place of tokens


def token_gradients(
    operands: dict[str, jax.Array],
    d_out: jax.Array,
    *,
    solved: jax.Array,
    states: jax.Array,
    d_states: jax.Array,
    d_v: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes gradients of q and k [B, T, N, H], and of log decays and betas, fp32 [B, T, M].

    Args:
        operands: of the forward kernels; T a multiple of 64.
        d_out: cotangent of outputs, [B, T, M, V].
        solved: Y, [B, T, M, V].
        states: states that enter the chunks, [B, M, J, V, H].
        d_states: cotangents of the states that leave them.
        d_v: cotangent of values, dR, [B, T, M, V].
    """
    gates = operands["gates"]
    batch, length = operands["k"].shape[:2]
    values = {"d_out": d_out, "solved": solved, "d_v": d_v, "states": states, "d_states": d_states}
    named = {name: operands[name] for name in ("q", "k", "gates")} | values
    found = _launched(named, has_delta="inverses" in operands)

    def by_tokens(x: jax.Array) -> jax.Array:
        """[B, M, J, i] as [B, T, M]."""
        return jnp.moveaxis(x, 1, 3).reshape(batch, length, -1)

    rows = {row: found["rows"][:, :, :, row] for row in _Row}
    d_sum = rows[_Row.QUERY] + rows[_Row.LATER] - rows[_Row.EARLIER]
    decay = gates[:, :, :, Gate.ENTERED, -1]
    ends = rows[_Row.KEPT].sum(axis=-1) + decay * rows[_Row.ENDS].sum(axis=-1)
    d_sum = d_sum.at[..., -1].add(ends)
    # XLA's sums of a reversed array take several times as long as a product.
    d_log = jnp.matmul(d_sum, np.tri(CHUNK, dtype=np.float32), precision="highest")
    d_beta = rows[_Row.BETA] / gates[:, :, :, Gate.BETA]
    return found["d_q"], found["d_k"], by_tokens(d_log), by_tokens(d_beta)


def _launched(operands: dict[str, jax.Array], *, has_delta: bool) -> dict[str, jax.Array]:
    """Runs the kernel: "d_q" and "d_k" [B, T, N, H], "rows" fp32 [B, M, J, rows, 64]."""
    k, (batch, num_values, num_chunks) = operands["k"], operands["gates"].shape[:3]
    num_keys, width = k.shape[2:]
    kernel = _TokenGradients(
        batch=batch, num_keys=num_keys, num_values=num_values, num_chunks=num_chunks,
        has_delta=has_delta, width=width, value_width=operands["d_out"].shape[3], dtype=k.dtype,
    )  # fmt: skip
    by_key = jax.ShapeDtypeStruct(k.shape, k.dtype)
    rows = jax.ShapeDtypeStruct((batch, num_values, num_chunks, len(_Row), CHUNK), jnp.float32)
    return launch(
        kernel.block,
        name="delta_token_gradients",
        operands=operands,
        results={"d_q": by_key, "d_k": by_key, "rows": rows},
        scratch=kernel.scratch(),
        grid=kernel.heads.grid,
        grid_names=("block",),
        num_threads=_ROLES,
    )


type _Factors = tuple[jax.Array, Any, int | None]  # of a product; the right one's part

_ROLES = 3
_OF_KEYS = ("q", "k")
_OF_VALUES = ("d_out", "solved", "d_v")
_OF_STATES = ("states", "d_states")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _TokenGradients:
    """The kernel of one call."""

    batch: int
    num_keys: int
    num_values: int
    num_chunks: int
    width: int
    value_width: int
    has_delta: bool
    dtype: jnp.dtype

    @property
    def parts(self) -> range:
        """Parts of 64 value columns."""
        return range(self.value_width // COLUMNS)

    @property
    def num_stages(self) -> int:
        """Number of steps whose keys and values, though not states, shared memory holds."""
        return 2 if self.value_width <= self.width else 1

    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and barriers, by name."""
        tile, num, stages = tiled(128), len(self.parts), self.num_stages
        keys = plgpu.SMEM((stages, CHUNK, self.width), self.dtype, transforms=tile)
        values = plgpu.SMEM((stages, num, CHUNK, COLUMNS), self.dtype, transforms=tile)
        states = plgpu.SMEM((num, COLUMNS, self.width), self.dtype, transforms=tile)
        return {
            **dict.fromkeys(_OF_KEYS, keys),
            **dict.fromkeys(_OF_VALUES, values),
            **dict.fromkeys(_OF_STATES, states),
            # Without the last, for which no room is left.
            "gates": plgpu.SMEM((stages, Gate.WRITTEN, CHUNK), jnp.float32),
            "keys_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "full": plgpu.Barrier(num_arrivals=1 + len(_OF_VALUES) * num, num_barriers=stages),
            "states_full": plgpu.Barrier(num_arrivals=len(_OF_STATES) * num),
            "over": plgpu.Barrier(num_arrivals=_ROLES),
            "written": plgpu.Barrier(num_barriers=2),  # one part of dK, and dK
        }

    def block(self, gmem, smem) -> None:
        """Runs one block: a sum for each warpgroup, over the value heads of a key head."""
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            for step in range(self.num_stages - 1):
                self.load(gmem, smem, jnp.int32(step))

            def put(found, at, sink):
                self.write(found, at.q, sink(gmem.d_q))

            self.sums(gmem, smem, self.d_q, put, loads=True)

        @pl.when(wg == 1)
        def _():
            def put(found, at, sink):
                at.k[...] = found.astype(self.dtype)
                plgpu.barrier_arrive(smem.written.at[0])

            self.sums(gmem, smem, self.later, put)

        @pl.when(wg == 2)
        def _():
            def put(found, at, sink):
                plgpu.barrier_wait(smem.written.at[0])
                self.write(found + self.tile(at.k), at.k, sink(gmem.d_k))
                plgpu.barrier_arrive(smem.written.at[1])

            self.sums(gmem, smem, self.earlier, put)

    def sums(self, gmem, smem, role: Callable, put: Callable, *, loads: bool = False) -> None:
        """Goes through a block's steps, and gives ``put`` a role's sum of each key head."""
        group, stages = self.group, self.num_stages

        def of_keys(item, _):
            b, chunk, n = self.heads.place(item)

            def add(i, found):
                step = item * group + i
                slot, key_slot = lax.rem(step, stages), lax.rem(item, stages)
                if loads:
                    self.load_states(gmem, smem, b, chunk, n * group + i)
                    self.load(gmem, smem, step + stages - 1)
                pl.when(i == 0)(lambda: plgpu.barrier_wait(smem.keys_full.at[key_slot]))
                plgpu.barrier_wait(smem.full.at[slot])
                at, rows = self.at(smem, slot, key_slot), gmem.rows.at[b, n * group + i, chunk]
                found = role(at, rows, found)
                plgpu.barrier_arrive(smem.over)
                plgpu.barrier_wait(smem.over)
                return found

            empty = jnp.zeros((CHUNK, self.width), jnp.float32)
            found = lax.fori_loop(0, group, add, plgpu.layout_cast(empty, tile_layout()))
            tokens = pl.ds(chunk * CHUNK, CHUNK)
            # The results take the space of operands that all have read.
            put(found, self.at(smem, 0, lax.rem(item, stages)), lambda ref: ref.at[b, tokens, n])

        lax.fori_loop(0, self.heads.count, of_keys, None)

    @property
    def group(self) -> int:
        """Number of value heads of a key head."""
        return self.num_values // self.num_keys

    @property
    def heads(self) -> DealtHeads:
        """Key heads of chunks, by block."""
        return DealtHeads(self.batch, self.num_chunks, self.num_keys)

    def at(self, smem, slot, key_slot) -> types.SimpleNamespace:
        """A step's operands in shared memory."""
        keys = {name: getattr(smem, name).at[key_slot] for name in _OF_KEYS}
        rest = {name: getattr(smem, name).at[slot] for name in (*_OF_VALUES, "gates")}
        states = {name: getattr(smem, name) for name in (*_OF_STATES, "states_full")}
        return types.SimpleNamespace(**keys, **rest, **states)

    def load(self, gmem, smem, step) -> None:
        """Copies a step's operands but states to shared memory, if the block has such a step."""
        item, i = lax.div(step, self.group), lax.rem(step, self.group)
        key_slot = lax.rem(item, self.num_stages)
        b, chunk, n = self.heads.place(item)

        @pl.when(step < self.heads.count * self.group)
        def _():
            @pl.when(i == 0)
            def _():
                pl.when(item >= self.num_stages)(lambda: plgpu.barrier_wait(smem.written.at[1]))
                for name in _OF_KEYS:
                    source = getattr(gmem, name).at[b, pl.ds(chunk * CHUNK, CHUNK), n]
                    target = getattr(smem, name).at[key_slot]
                    plgpu.copy_gmem_to_smem(source, target, smem.keys_full.at[key_slot])

            self.load_values(
                gmem, smem, b, chunk, n * self.group + i, lax.rem(step, self.num_stages)
            )

    def load_values(self, gmem, smem, b, chunk, m, slot) -> None:
        """Copies a value head's gates and values to shared memory."""
        tokens, full = pl.ds(chunk * CHUNK, CHUNK), smem.full.at[slot]
        gates = gmem.gates.at[b, m, chunk, pl.ds(0, int(Gate.WRITTEN))]
        plgpu.copy_gmem_to_smem(gates, smem.gates.at[slot], full)
        for part, name in itertools.product(self.parts, _OF_VALUES):
            source = getattr(gmem, name).at[b, tokens, m, pl.ds(part * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, getattr(smem, name).at[slot, part], full)

    def load_states(self, gmem, smem, b, chunk, m) -> None:
        """Copies a value head's states to shared memory; a step reads them last."""
        for part, name in itertools.product(self.parts, _OF_STATES):
            source = getattr(gmem, name).at[b, m, chunk, pl.ds(part * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, getattr(smem, name).at[part], smem.states_full)

    def write(self, found: jax.Array, place, sink) -> None:
        """Writes a result [64, H] to global memory through shared memory."""
        place[...] = found.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(place, sink)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def d_q(self, smem, rows, found) -> jax.Array:
        """Adds a head's dQ."""
        before = self.row_sums(found, smem.q)
        found = self.read_from_state(smem, found, smem.d_out, sign=1.0, is_strict=False)
        write_registers(self.row_sums(found, smem.q) - before, rows.at[_Row.QUERY])
        return found

    def later(self, smem, rows, found) -> jax.Array:
        """Adds a head's part of dK in which a key reads what was written before it."""
        before = self.row_sums(found, smem.k)
        if self.has_delta:
            found = self.read_from_state(smem, found, smem.d_v, sign=-1.0, is_strict=True)
        else:
            plgpu.barrier_wait(smem.states_full)
        write_registers(self.row_sums(found, smem.k) - before, rows.at[_Row.LATER])
        for row, left, right in (
            (_Row.BETA, smem.solved, smem.d_v),
            (_Row.ENDS, smem.states, smem.d_states),
        ):
            products = jnp.float32(0.0)
            for part in self.parts:
                products += self.row_sums(self.tile(left.at[part]), right.at[part])
            write_registers(products, rows.at[row])
        return found

    def earlier(self, smem, rows, found) -> jax.Array:
        """Adds a head's part of dK in which a key writes what is read after it."""
        before = self.row_sums(found, smem.k)
        products: list[_Factors] = []
        sources = ((smem.d_out, 1.0, False), (smem.d_v, -1.0, True))
        for source, sign, is_strict in sources if self.has_delta else sources[:1]:

            def product(acc, source=source):
                for part in self.parts:
                    plgpu.wgmma(acc, smem.solved.at[part], source.at[part].transpose((1, 0)))
                return read(acc)

            weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
            weights = self.by_row(smem, weights, Gate.BETA) * sign
            weights *= passed(smem.gates, is_strict=is_strict)
            products.append((weights.astype(self.dtype), smem.k if is_strict else smem.q, None))
        found = self.with_products(found, products)
        within = self.row_sums(found, smem.k)
        plgpu.barrier_wait(smem.states_full)
        kept: list[_Factors] = []
        written = self.written(smem)
        for part in self.parts:
            solved = self.tile(smem.solved.at[part])
            solved *= lax.broadcast_in_dim(written, solved.shape, [0])
            kept.append((solved.astype(self.dtype), smem.d_states, part))
        found = self.with_products(found, kept)
        after = self.row_sums(found, smem.k)
        write_registers(after - within, rows.at[_Row.KEPT])
        write_registers(after - before, rows.at[_Row.EARLIER])
        return found

    def read_from_state(self, smem, found, source, *, sign: float, is_strict: bool):
        """Adds ``sign entered (X S)``, and the product of ``sign decay (X Y') beta`` with keys."""

        def product(acc):
            for part in self.parts:
                plgpu.wgmma(acc, source.at[part], smem.solved.at[part].transpose((1, 0)))
            return read(acc)

        weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
        beta = load_gate(smem.gates, Gate.BETA, column_layout())
        weights *= lax.broadcast_in_dim(beta, weights.shape, [1])
        weights *= passed(smem.gates, is_strict=is_strict, by_reader=True) * sign
        products: list[_Factors] = [(weights.astype(self.dtype), smem.k, None)]
        plgpu.barrier_wait(smem.states_full)
        for part in self.parts:
            x = self.by_row(smem, self.tile(source.at[part]), Gate.ENTERED) * sign
            products.append((x.astype(self.dtype), smem.states, part))
        return self.with_products(found, products)

    def with_products(self, found: jax.Array, products: list[_Factors]) -> jax.Array:
        """Adds products [64, H]: of weights with keys, or of tokens with states."""

        def add(acc):
            for left, right, part in products:
                plgpu.wgmma(acc, left, right if part is None else right.at[part])

        start: Any = plgpu.ACC.init(found)
        return lax.optimization_barrier(pl.run_state(add)(start))

    def written(self, smem) -> jax.Array:
        """Computes ``Gate.WRITTEN`` of each token."""
        layout, last = row_layout(), CHUNK - 1
        beta, sums = (load_gate(smem.gates, x, layout) for x in (Gate.BETA, Gate.SUM))
        place = plgpu.broadcasted_iota(jnp.float32, (CHUNK,), 0, layout=layout)
        left = jnp.exp2(smem.gates[Gate.SUM, last] - sums)
        return beta * jnp.where(place >= smem.gates[Gate.FIRST, last], left, 0.0)

    def by_row(self, smem, x: jax.Array, gate: Gate) -> jax.Array:
        numbers = load_gate(smem.gates, gate, row_layout())
        return x * lax.broadcast_in_dim(numbers, x.shape, [0])

    def tile(self, tile) -> jax.Array:
        return plgpu.load(tile, layout=tile_layout()).astype(jnp.float32)

    def row_sums(self, x: jax.Array, tile) -> jax.Array:
        """Each row's sum of products with a tile in shared memory."""
        return jnp.sum(x * self.tile(tile), axis=1)
