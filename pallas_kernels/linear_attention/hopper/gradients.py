"""Gradients of the tokens of all chunks side by side.

With S the state that enters a chunk, dS the cotangent of the one that leaves it, Y and dR, every
gradient is a sum of products within the chunk:

    dQ = entered (dO S) + dP K,             dP = decay (dO Y') beta,
    later = dN K - entered (dR S),          dN = -decay (dR Y') beta without the diagonal,
    earlier = dP' Q + dN' K + written (Y dS),    dK = later + earlier.

Decays need no products of their own: where a query or a key multiplies a product, the decay of its
token does too, so the gradient of a sum of logarithms is ``q . dQ + k . later - k . earlier``.
A block has a warpgroup for each of the three sums.

Dims: B batch, T position, N key heads, M value heads, H key width, V value width, J chunk.
"""

import dataclasses
import enum
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
    """Computes gradients of q and k [B, T, N, H], log decays and betas [B, T, M], in fp32.

    Args:
        operands: of the forward kernels; T a multiple of 64.
        d_out: cotangent of outputs, [B, T, M, V].
        solved: Y, [B, T, M, V].
        states: states that enter the chunks, [B, M, J, V, H].
        d_states: cotangents of the states that leave them.
        d_v: cotangent of values, dR, [B, T, M, V].
    """
    k, gates = operands["k"], operands["gates"]
    batch, length, num_keys, width = k.shape
    values = {"d_out": d_out, "solved": solved, "d_v": d_v, "states": states, "d_states": d_states}
    found = _launched({name: operands[name] for name in ("q", "k", "gates")} | values)

    def of_keys(x: jax.Array) -> jax.Array:
        """Sums over the value heads of each key head."""
        return x.reshape(batch, length, num_keys, -1, width).astype(jnp.float32).sum(axis=3)

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
    d_k = of_keys(found["later"]) + of_keys(found["earlier"])
    return of_keys(found["d_q"]), d_k, by_tokens(d_log), by_tokens(d_beta)


def _launched(operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Runs the kernel: "d_q", "later", "earlier" [B, T, M, H], "rows" fp32 [B, M, J, rows, 64]."""
    k, (batch, num_values, num_chunks) = operands["k"], operands["gates"].shape[:3]
    length, num_keys, width = k.shape[1:]
    kernel = _TokenGradients(
        num_keys=num_keys, num_values=num_values, num_chunks=num_chunks,
        width=width, value_width=operands["d_out"].shape[3], dtype=k.dtype,
    )  # fmt: skip
    by_head = jax.ShapeDtypeStruct((batch, length, num_values, width), k.dtype)
    rows = jax.ShapeDtypeStruct((batch, num_values, num_chunks, len(_Row), CHUNK), jnp.float32)
    return launch(
        kernel.block,
        name="delta_token_gradients",
        operands=operands,
        results=dict.fromkeys(_ROLES, by_head) | {"rows": rows},
        scratch=kernel.scratch(),
        grid=(batch * num_chunks * num_values,),
        grid_names=("block",),
        num_threads=len(_ROLES),
    )


_ROLES = ("d_q", "later", "earlier")


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
            "full": plgpu.Barrier(num_arrivals=3 + 5 * num),
            "over": plgpu.Barrier(num_arrivals=len(_ROLES)),
        }

    def block(self, gmem, smem) -> None:
        """Runs one block: copies, then a sum for each warpgroup."""
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        m, rest = lax.rem(block, self.num_values), lax.div(block, self.num_values)
        chunk, b = lax.rem(rest, self.num_chunks), lax.div(rest, self.num_chunks)
        rows, n = pl.ds(chunk * CHUNK, CHUNK), lax.div(m, self.num_values // self.num_keys)

        @pl.when(wg == 0)
        def _():
            def copy(source, target):
                plgpu.copy_gmem_to_smem(source, target, smem.full)

            copy(gmem.q.at[b, rows, n], smem.q)
            copy(gmem.k.at[b, rows, n], smem.k)
            copy(gmem.gates.at[b, m, chunk], smem.gates)
            for part in self.parts:
                columns = pl.ds(part * COLUMNS, COLUMNS)
                copy(gmem.d_out.at[b, rows, m, columns], smem.d_out.at[part])
                copy(gmem.solved.at[b, rows, m, columns], smem.solved.at[part])
                copy(gmem.d_v.at[b, rows, m, columns], smem.d_v.at[part])
                copy(gmem.states.at[b, m, chunk, columns], smem.states.at[part])
                copy(gmem.d_states.at[b, m, chunk, columns], smem.d_states.at[part])

        plgpu.barrier_wait(smem.full)
        sums = (self.d_q, self.later, self.earlier)
        # The results take the space of operands that all have read.
        places = (smem.q, smem.k, smem.d_out)
        for role, (name, function) in enumerate(zip(_ROLES, sums, strict=True)):

            @pl.when(wg == role)
            def _(role=role, name=name, function=function):
                found = function(smem, gmem.rows.at[b, m, chunk])
                plgpu.barrier_arrive(smem.over)
                plgpu.barrier_wait(smem.over)
                self.write(found, places[role], getattr(gmem, name).at[b, rows, m])

    def write(self, found: jax.Array, place, sink) -> None:
        """Writes a result [64, H] to global memory through shared memory."""
        found = found.astype(self.dtype)
        if len(place.shape) == 2:
            place[...] = found
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(place, sink)
        else:
            for part in range(self.width // COLUMNS):
                start = part * COLUMNS
                place[part] = lax.slice(found, (0, start), (CHUNK, start + COLUMNS))
            plgpu.commit_smem()
            for part in range(self.width // COLUMNS):
                columns = pl.ds(part * COLUMNS, COLUMNS)
                plgpu.copy_smem_to_gmem(place.at[part], sink.at[:, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def d_q(self, smem, rows) -> jax.Array:
        """Computes dQ."""
        read_of, weights = self.read_from_state(smem, smem.d_out, sign=1.0, is_strict=False)
        found = self.with_products(read_of, [(weights, smem.k)])
        self.sum_rows(found, smem.q, rows, _Row.QUERY)
        return found

    def later(self, smem, rows) -> jax.Array:
        """Computes the part of dK in which a key reads what was written before it."""
        read_of, weights = self.read_from_state(smem, smem.d_v, sign=-1.0, is_strict=True)
        found = self.with_products(read_of, [(weights, smem.k)])
        self.sum_rows(found, smem.k, rows, _Row.LATER)
        products = jnp.float32(0.0)
        for part in self.parts:
            solved, d_v = (self.load(x.at[part]) for x in (smem.solved, smem.d_v))
            products += jnp.sum(solved * d_v, axis=1)
        write_registers(products, rows.at[_Row.BETA])
        ends = jnp.float32(0.0)
        for part in self.parts:
            states, d_states = (self.load(x.at[part]) for x in (smem.states, smem.d_states))
            ends += jnp.sum(states * d_states, axis=1)
        write_registers(ends, rows.at[_Row.ENDS])
        return found

    def earlier(self, smem, rows) -> jax.Array:
        """Computes the part of dK in which a key writes what is read after it."""

        def kept(acc):
            for part in self.parts:
                solved = self.by_row(smem, self.load(smem.solved.at[part]), Gate.WRITTEN)
                plgpu.wgmma(acc, solved.astype(self.dtype), smem.d_states.at[part])
            return read(acc)

        found = pl.run_scoped(kept, plgpu.ACC((CHUNK, self.width), jnp.float32))
        self.sum_rows(found, smem.k, rows, _Row.KEPT)
        products = []
        for source, sign, is_strict in ((smem.d_out, 1.0, False), (smem.d_v, -1.0, True)):

            def product(acc, source=source):
                for part in self.parts:
                    plgpu.wgmma(acc, smem.solved.at[part], source.at[part].transpose((1, 0)))
                return read(acc)

            weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
            weights = self.by_row(smem, weights, Gate.BETA) * sign
            weights *= passed(smem.gates, is_strict=is_strict)
            products.append((weights.astype(self.dtype), smem.k if is_strict else smem.q))
        found = self.with_products(found, products)
        self.sum_rows(found, smem.k, rows, _Row.EARLIER)
        return found

    def read_from_state(self, smem, source, *, sign: float, is_strict: bool):
        """Computes ``sign entered (X S)``, and the weights ``sign decay (X Y') beta``."""

        def from_state(acc):
            for part in self.parts:
                x = self.by_row(smem, self.load(source.at[part]), Gate.ENTERED) * sign
                plgpu.wgmma(acc, x.astype(self.dtype), smem.states.at[part])
            return read(acc)

        def product(acc):
            for part in self.parts:
                plgpu.wgmma(acc, source.at[part], smem.solved.at[part].transpose((1, 0)))
            return read(acc)

        read_of = pl.run_scoped(from_state, plgpu.ACC((CHUNK, self.width), jnp.float32))
        weights = pl.run_scoped(product, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
        beta = load_gate(smem.gates, Gate.BETA, column_layout())
        weights *= lax.broadcast_in_dim(beta, weights.shape, [1])
        weights *= passed(smem.gates, is_strict=is_strict, by_reader=True) * sign
        return read_of, weights.astype(self.dtype)

    def with_products(self, found: jax.Array, products: list[tuple[jax.Array, Any]]) -> jax.Array:
        """Adds products of weights [64, 64] with keys or queries."""

        def add(acc):
            for weights, keys in products:
                plgpu.wgmma(acc, weights, keys)

        start: Any = plgpu.ACC.init(found)
        return lax.optimization_barrier(pl.run_state(add)(start))

    def by_row(self, smem, x: jax.Array, gate: Gate) -> jax.Array:
        numbers = load_gate(smem.gates, gate, row_layout())
        return x * lax.broadcast_in_dim(numbers, x.shape, [0])

    def load(self, tile) -> jax.Array:
        return plgpu.load(tile, layout=tile_layout()).astype(jnp.float32)

    def sum_rows(self, found: jax.Array, keys, rows, row: _Row) -> None:
        """Writes each token's sum of products of a gradient with the key or query."""
        write_registers(jnp.sum(found * self.load(keys), axis=1), rows.at[row])
