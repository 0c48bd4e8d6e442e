"""Layers of a decode step, and what they mean in float64 with the rounding of programs.

Dims: as in ``pallas_kernels.decode_layer.reference``.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import decode_layers
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import LayerWeights
from pallas_kernels.quantized_weight import (
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    arranged,
    round_weight,
)
from tests.rounding import Rounded, stored

EPSILON = 1e-3
BF16 = jnp.dtype(jnp.bfloat16)
FORMS = {
    "int4": WeightFormat(code=WeightCode.INT4, group_rows=128),
    "int4 of 64": WeightFormat(code=WeightCode.INT4, group_rows=64),
    "e4m3": WeightFormat(code=WeightCode.E4M3),
    "int8 of 128": WeightFormat(code=WeightCode.INT8, group_rows=128),
}


@functools.partial(jax.jit, static_argnums=1)
def _rounded(w: jax.Array, form: WeightFormat) -> QuantizedWeight:
    return arranged(round_weight(w, form))


class Drawn:
    """Random arrays."""

    def __init__(self, form: WeightFormat | None = None):
        self.rng, self.form = np.random.default_rng(7), form

    def array(self, *shape: int, size: float = 1.0, dtype: Any = BF16) -> np.ndarray:
        """Normally distributed."""
        return (size * self.rng.normal(size=shape)).astype(dtype)

    def weight(self, *shape: int) -> Any:
        """Whose products have the size of what they are multiplied with."""
        w = self.array(*shape, size=shape[0] ** -0.5)
        return w if self.form is None else _rounded(jnp.asarray(w), self.form)

    def norm(self, D: int, dtype: Any = BF16) -> RmsNorm:
        """A norm."""
        return RmsNorm(scale=jnp.asarray(self.array(D, dtype=dtype)), epsilon=EPSILON)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One row of so many tokens, the last one new; nobody's slots hold NaN.

    Its table has entries below 0 where tokens have not come to.
    """

    length: int
    D: int = 2048
    N: int = 16
    K: int = 4
    H: int = 64
    F: int = 1024
    size: int = 64
    layers: int = 1
    form: str | None = None  # of weights in few bits

    def arguments(self) -> tuple[Any, ...]:
        """What ``decode_layers`` takes."""
        drawn, A = Drawn(None if self.form is None else FORMS[self.form]), self.N * self.H
        layers = [
            LayerWeights(
                attention_norm=drawn.norm(self.D),
                qkv=drawn.weight(self.D, A + 2 * self.K * self.H),
                out=drawn.weight(A, self.D),
                mlp_norm=drawn.norm(self.D),
                gate_up=drawn.weight(self.D, 2 * self.F),
                down=drawn.weight(self.F, self.D),
            )
            for _ in range(self.layers)
        ]
        per_row = -(-self.length // self.size)
        shape = per_row + 3, self.size, self.K, self.H
        table = drawn.rng.permutation(per_row + 2)[:per_row].astype(np.int32)
        empty = np.ones(shape[:2], bool)
        empty[self._places(table)] = False
        pages = drawn.array(self.layers, *shape), drawn.array(self.layers, *shape)
        for pool in pages:
            pool[:, empty] = np.nan
        table = np.append(table, [-1, -1])[None].astype(np.int32)
        angles = drawn.rng.uniform(0, 6, (1, self.H // 2)).astype(np.float32)
        positions = np.array([self.length - 1], np.int32)
        rope = np.cos(angles), np.sin(angles)
        stacks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return drawn.array(1, self.D), stacks, pages, table, positions, rope

    def over(self, mesh: Mesh, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments on the devices of the mesh's one axis, which share heads and hidden
        columns.
        """
        x, layers, pages, *place = given
        axis, (num,) = mesh.axis_names[0], mesh.devices.shape
        heads, kv_heads = self.N * self.H, self.K * self.H

        def dealt(stack: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
            parts = [jnp.split(part, num, axis=2) for part in split_at(stack, sizes)]
            return jnp.concatenate([part[i] for i in range(num) for part in parts], axis=2)

        layers = dataclasses.replace(
            layers,
            qkv=dealt(layers.qkv, (heads, kv_heads, kv_heads)),
            gate_up=dealt(layers.gate_up, (self.F, self.F)),
        )
        return jax.tree.map(
            lambda spec, leaves: jax.device_put(leaves, NamedSharding(mesh, spec)),
            specs(axis),
            (x, layers, tuple(pages), *place),
            is_leaf=lambda leaf: isinstance(leaf, P),
        )

    def assert_nothing_else_written(self, given: tuple[Any, ...], after: Any) -> None:
        """Pools have the bits that they had before, but for the new token's slot of each layer."""
        _, _, pages, (table,), _, _ = given
        other = np.ones(pages[0].shape[1:3], bool)
        other[table[(self.length - 1) // self.size], (self.length - 1) % self.size] = False
        for pool, before in zip(after, pages, strict=True):
            np.testing.assert_array_equal(bits(pool)[:, other], bits(before)[:, other])

    def _places(self, table: np.ndarray) -> tuple[np.ndarray, ...]:
        """Pages and slots of the tokens that were there before."""
        places = [(table[p // self.size], p % self.size) for p in range(self.length - 1)]
        return tuple(np.array(places, int).reshape(-1, 2).T)

    def exact(
        self, given: tuple[Any, ...], *, sees_nothing: bool = False
    ) -> tuple[Rounded, tuple[Rounded, Rounded]]:
        """The stream after the layers, and the pools."""
        x, layers, pages, (table,), _, rope = given

        def inward(rows: Rounded) -> Rounded:
            """Quantized weights are multiplied with 16 bits."""
            return rows if self.form is None else stored(rows, BF16)

        x, after = wide(x), (wide(pages[0]), wide(pages[1]))
        for i in range(self.layers):
            w, pools = layers.layer(i), (pages[0][i], pages[1][i])
            heads = inward(normed(x, w.attention_norm)) @ wide(w.qkv)
            heads = np.reshape(heads, (-1, self.H))
            attended, new = self.attended(heads, pools, table, rope)
            if sees_nothing:
                attended = attended * 0.0
            for pool, rows in zip(after, new, strict=True):
                pool[i, table[(self.length - 1) // self.size], (self.length - 1) % self.size] = rows
            x = inward(attended) @ wide(w.out) + x
            both = inward(normed(x, w.mlp_norm)) @ wide(w.gate_up)
            gate, up = both[:, : self.F], both[:, self.F :]
            hidden = gate / (1 + np.exp(-gate)) * up
            x = inward(hidden) @ wide(w.down) + x
        return x, after

    def attended(self, heads, pools, table, rope) -> tuple[Rounded, list[Rounded]]:
        """[1, N H], and the new key and value as pages have them."""
        half, (cos, sin) = self.H // 2, (wide(each) for each in rope)
        first, second = heads[:, :half], heads[:, half:]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        queries = np.reshape(turned[: self.N], (self.K, self.N // self.K, self.H))
        new = [stored(turned[self.N : self.N + self.K], BF16), stored(heads[-self.K :], BF16)]
        places = self._places(table)
        old = [wide(pool[places].reshape(-1, self.K, self.H)) for pool in pools]
        keys, values = (np.concatenate([o, n[None]], axis=0) for o, n in zip(old, new, strict=True))
        scores = np.einsum("kgh,lkh->kgl", queries, keys) * self.H**-0.5
        powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        powers = powers / np.sum(powers, axis=-1, keepdims=True)
        attended = np.einsum("kgl,lkh->kgh", powers, values)
        return np.reshape(attended, (1, -1)), new


def pair() -> Mesh:
    """Two devices."""
    return jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])


def specs(axis: str) -> tuple[Any, ...]:
    """Returns the partition specs of ``decode_layers``'s arguments over devices."""
    whole, columns, rows = P(), P(None, None, axis), P(None, axis, None)
    layers = LayerWeights(
        attention_norm=whole, qkv=columns, out=rows, mlp_norm=whole, gate_up=columns, down=rows
    )
    pools = P(None, None, None, axis, None)
    return whole, layers, (pools, pools), whole, whole, whole


def over_devices(mesh: Mesh, implementation: str) -> Any:
    """``decode_layers`` by all devices of the mesh's one axis."""
    axis = mesh.axis_names[0]
    return jax.shard_map(
        functools.partial(decode_layers, implementation=implementation, axis=axis),
        mesh=mesh,
        in_specs=specs(axis),
        out_specs=(P(), specs(axis)[2]),
        check_vma=False,
    )


def split_at(stack: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Columns of so many at a time."""
    return jnp.split(stack, np.cumsum(sizes)[:-1], axis=2)


def bits(x: Any) -> np.ndarray:
    """Of 16-bit numbers, NaN among them."""
    return np.asarray(x).view(np.uint16)


def wide(x: Any) -> Rounded:
    """Exact numbers."""
    x = x.dequantize(jnp.float32) if isinstance(x, QuantizedWeight) else x
    return Rounded(np.asarray(x, np.float64))


def normed(x: Rounded, norm: RmsNorm) -> Rounded:
    """RMSNorm of rows."""
    root = np.sqrt(np.mean(x * x, axis=1, keepdims=True) + norm.epsilon)
    return x / root * wide(norm.scale)
