"""Gradients of the tokens of all chunks side by side.

With S the state that enters a chunk, dS the cotangent of the one that leaves it, Y and dR, every
gradient is a sum of products within the chunk:

    dQ = entered (dO S) + dP K,             dP = decay (dO Y') beta,
    later = dN K - entered (dR S),          dN = -decay (dR Y') beta without the diagonal,
    earlier = dP' Q + dN' K + written (Y dS),    dK = later + earlier.

Decays need no products of their own: where a query or a key multiplies a product, the decay of its
token does too, so the gradient of a sum of logarithms is ``q . dQ + k . later - k . earlier``.
A block has a warpgroup for each of the three sums, and adds those of a key head's value heads.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.registers import write_registers
from pallas_kernels.hopper.tile import column_layout, row_layout, tile_layout, tiled

from .chunks import COLUMNS, read
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
    found = _launched({name: operands[name] for name in ("q", "k", "gates")} | values)

    def by_tokens(x: jax.Array) -> jax.Array:
        """[B, M, J, i] as [B, T, M]."""
        return jnp.moveaxis(x, 1, 3).reshape(batch, length, -1)

    rows = {row: found["rows"][:, :, :, row] for row in _Row}
    d_sum = rows[_Row.QUERY] + rows[_Row.LATER] - rows[_Row.EARLIER]
    decay = gates[:, :, :, Gate.ENTERED, -1]
    ends = rows[_Row.KEPT].sum(axis=-1) + decay * rows[_Row.ENDS].sum(axis=-1)
    d_sum = d_sum.at[..., -1].add(ends)
    d_log = jnp.flip(jnp.cumsum(jnp.flip(d_sum, axis=-1), axis=-1), axis=-1)
    d_beta = rows[_Row.BETA] / gates[:, :, :, Gate.BETA]
    return found["d_q"], found["d_k"], by_tokens(d_log), by_tokens(d_beta)


def _launched(operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Runs the kernel: "d_q" and "d_k" [B, T, N, H], "rows" fp32 [B, M, J, rows, 64]."""
    k, (batch, num_values, num_chunks) = operands["k"], operands["gates"].shape[:3]
    num_keys, width = k.shape[2:]
    kernel = _TokenGradients(
        num_keys=num_keys, num_values=num_values, num_chunks=num_chunks,
        width=width, value_width=operands["d_out"].shape[3], dtype=k.dtype,
    )  # fmt: skip
    by_key = jax.ShapeDtypeStruct(k.shape, k.dtype)
    rows = jax.ShapeDtypeStruct((batch, num_values, num_chunks, len(_Row), CHUNK), jnp.float32)
    return launch(
        kernel.block,
        name="delta_token_gradients",
        operands=operands,
        results={"d_q": by_key, "d_k": by_key, "rows": rows},
        scratch=kernel.scratch(),
        grid=(batch * num_chunks * num_keys,),
        grid_names=("block",),
        num_threads=_ROLES,
    )


_ROLES = 3

type _Product = tuple[jax.Array, Any, int | None]
"""Both operands of a product, and the part of the right one in shared memory; None: all of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _TokenGradients:
    """The kernel of one call."""

    num_keys: int
    num_values: int
    num_chunks: int
    width: int
    value_width: int
    dtype: jnp.dtype

    @property
    def parts(self) -> range:
        """Parts of 64 value columns."""
        return range(self.value_width // COLUMNS)

    def scratch(self) -> dict[str, Any]:
        """Returns a block's shared memory buffers and barriers, by name."""
        tile, num = tiled(128), len(self.parts)
        keys = plgpu.SMEM((CHUNK, self.width), self.dtype, transforms=tile)
        values = plgpu.SMEM((num, CHUNK, COLUMNS), self.dtype, transforms=tile)
        states = plgpu.SMEM((num, COLUMNS, self.width), self.dtype, transforms=tile)
        return {
            "q": keys,
            "k": keys,
            "d_out": values,
            "solved": values,
            "d_v": values,
            "states": states,
            "d_states": states,
            "gates": plgpu.SMEM((len(Gate), CHUNK), jnp.float32),
            "keys_full": plgpu.Barrier(num_arrivals=2),
            "full": plgpu.Barrier(num_arrivals=1 + 5 * num),
            "over": plgpu.Barrier(num_arrivals=_ROLES),
            "later_written": plgpu.Barrier(),
        }

    def block(self, gmem, smem) -> None:
        """Runs one block: a sum for each warpgroup, over the value heads of a key head."""
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        n, rest = lax.rem(block, self.num_keys), lax.div(block, self.num_keys)
        chunk, b = lax.rem(rest, self.num_chunks), lax.div(rest, self.num_chunks)
        group, tokens = self.num_values // self.num_keys, pl.ds(chunk * CHUNK, CHUNK)

        @pl.when(wg == 0)
        def _():
            for name in "qk":
                source = getattr(gmem, name).at[b, tokens, n]
                plgpu.copy_gmem_to_smem(source, getattr(smem, name), smem.keys_full)

        plgpu.barrier_wait(smem.keys_full)

        def total(role: Callable, *, loads: bool) -> jax.Array:
            """Sum of a role over the value heads."""

            def add(i, found):
                m = n * group + i
                if loads:
                    self.load_head(gmem, smem, b, chunk, m)
                plgpu.barrier_wait(smem.full)
                found = role(smem, gmem.rows.at[b, m, chunk], found)
                plgpu.barrier_arrive(smem.over)
                plgpu.barrier_wait(smem.over)
                return found

            empty = jnp.zeros((CHUNK, self.width), jnp.float32)
            return lax.fori_loop(0, group, add, plgpu.layout_cast(empty, tile_layout()))

        # The results take the space of operands that all have read.
        @pl.when(wg == 0)
        def _():
            found = total(self.d_q, loads=True)
            self.write(found, smem.q, gmem.d_q.at[b, tokens, n])

        @pl.when(wg == 1)
        def _():
            smem.k[...] = total(self.later, loads=False).astype(self.dtype)
            plgpu.barrier_arrive(smem.later_written)

        @pl.when(wg == 2)
        def _():
            found = total(self.earlier, loads=False)
            plgpu.barrier_wait(smem.later_written)
            self.write(found + self.load(smem.k), smem.k, gmem.d_k.at[b, tokens, n])

    def load_head(self, gmem, smem, b, chunk, m) -> None:
        """Copies a value head's operands to shared memory."""
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        plgpu.copy_gmem_to_smem(gmem.gates.at[b, m, chunk], smem.gates, smem.full)
        for part in self.parts:
            columns = pl.ds(part * COLUMNS, COLUMNS)
            for name in ("d_out", "solved", "d_v", "states", "d_states"):
                is_state = name.endswith("states")
                at = (b, m, chunk, columns) if is_state else (b, tokens, m, columns)
                source, target = getattr(gmem, name).at[at], getattr(smem, name).at[part]
                plgpu.copy_gmem_to_smem(source, target, smem.full)

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
        found = self.read_from_state(smem, found, smem.d_v, sign=-1.0, is_strict=True)
        write_registers(self.row_sums(found, smem.k) - before, rows.at[_Row.LATER])
        for row, left, right in (
            (_Row.BETA, smem.solved, smem.d_v),
            (_Row.ENDS, smem.states, smem.d_states),
        ):
            products = jnp.float32(0.0)
            for part in self.parts:
                products += self.row_sums(self.load(left.at[part]), right.at[part])
            write_registers(products, rows.at[row])
        return found

    def earlier(self, smem, rows, found) -> jax.Array:
        """Adds a head's part of dK in which a key writes what is read after it."""
        before = self.row_sums(found, smem.k)
        kept: list[_Product] = []
        for part in self.parts:
            solved = self.by_row(smem, self.load(smem.solved.at[part]), Gate.WRITTEN)
            kept.append((solved.astype(self.dtype), smem.d_states, part))
        found = self.with_products(found, kept)
        write_registers(self.row_sums(found, smem.k) - before, rows.at[_Row.KEPT])
        products: list[_Product] = []
        for source, sign, is_strict in ((smem.d_out, 1.0, False), (smem.d_v, -1.0, True)):

            def product(acc, source=source):
                for part in self.parts:
                    plgpu.wgmma(acc, smem.solved.at[part], source.at[part].transpose((1, 0)))
                return read(acc)

            weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
            weights = self.by_row(smem, weights, Gate.BETA) * sign
            weights *= passed(smem.gates, is_strict=is_strict)
            products.append((weights.astype(self.dtype), smem.k if is_strict else smem.q, None))
        found = self.with_products(found, products)
        write_registers(self.row_sums(found, smem.k) - before, rows.at[_Row.EARLIER])
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
        products: list[_Product] = [(weights.astype(self.dtype), smem.k, None)]
        for part in self.parts:
            x = self.by_row(smem, self.load(source.at[part]), Gate.ENTERED) * sign
            products.append((x.astype(self.dtype), smem.states, part))
        return self.with_products(found, products)

    def with_products(self, found: jax.Array, products: Sequence[_Product]) -> jax.Array:
        """Adds products [64, H]: of weights with keys, or of tokens with states."""

        def add(acc):
            for left, right, part in products:
                plgpu.wgmma(acc, left, right if part is None else right.at[part])

        start: Any = plgpu.ACC.init(found)
        return lax.optimization_barrier(pl.run_state(add)(start))

    def by_row(self, smem, x: jax.Array, gate: Gate) -> jax.Array:
        numbers = load_gate(smem.gates, gate, row_layout())
        return x * lax.broadcast_in_dim(numbers, x.shape, [0])

    def load(self, tile) -> jax.Array:
        return plgpu.load(tile, layout=tile_layout()).astype(jnp.float32)

    def row_sums(self, x: jax.Array, tile) -> jax.Array:
        """Each row's sum of products with a tile in shared memory."""
        return jnp.sum(x * self.load(tile), axis=1)
