"""Chains of ``sum_rows``, and layers with them, in one program, and their meaning in float64.

Dims: D device, C call, R row, N column.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.ops.cached_attention import Pages
from jaxinfra.ops.decode_layers import decode_rows
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.row_sums import open_mailbox, sum_rows
from tests.kernels.layer_cases import LayerCase, normed, specs, wide
from tests.rounding import Rounded, stored
from tests.tolerance import assert_within_rounding

AXIS, EPSILON, OFFSET = "tensor", 1e-5, 0.25


def mesh_of(devices: int) -> Mesh:
    """The first devices, in one axis."""
    return jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSumCase:
    """Calls whose residual is the sum before; the last has no norm.

    The rows that a call adds are drawn, and multiplied with the normalized sum before.
    """

    rows: int
    width: int
    calls: int = 5
    dtype: Any = jnp.bfloat16
    scale_dtype: Any = jnp.bfloat16
    devices: int = 2

    def arguments(self, mesh: Mesh | None = None) -> tuple[jax.Array, ...]:
        """Factors [D, C, R, N], the first residual [R, N] and the norms' scales [C, N]."""
        rng, (R, N) = np.random.default_rng(self.rows + self.width), (self.rows, self.width)
        shapes = (self.devices, self.calls, R, N), (R, N), (self.calls, N)
        kinds = self.dtype, self.dtype, self.scale_dtype
        drawn = [
            jnp.asarray(rng.normal(size=shape), kind)
            for shape, kind in zip(shapes, kinds, strict=True)
        ]
        if mesh is None:
            return tuple(drawn)
        specs = P(AXIS), P(), P()
        return tuple(
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(drawn, specs, strict=True)
        )

    def program(self, mesh: Mesh, implementation: Any) -> Any:
        """The chain: all calls' sums and norms, [D, C, R, N] each, of every device."""

        def chain(factors, x, scales):
            box = open_mailbox(
                self.rows, self.width, jnp.dtype(self.dtype), axis=AXIS,
                implementation=implementation,
            )  # fmt: skip
            y, sums, normed = x, [], []
            for i in range(self.calls):
                part = (factors[0, i].astype(jnp.float32) * y.astype(jnp.float32)).astype(
                    self.dtype
                )
                norm = None if i + 1 == self.calls else self.norm(scales[i])
                x, y, box = sum_rows(part, x, box, norm=norm)
                sums.append(x)
                normed.append(y)
            return jnp.stack(sums)[None], jnp.stack(normed)[None]

        specs = (P(AXIS), P(), P())
        return jax.shard_map(
            chain, mesh=mesh, in_specs=specs, out_specs=(P(AXIS), P(AXIS)), check_vma=False
        )

    def norm(self, scale: jax.Array) -> RmsNorm:
        """The norm of a call."""
        return RmsNorm(scale=scale, epsilon=EPSILON, offset=OFFSET)

    def exact(self, given: tuple[jax.Array, ...], got: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        """Computes each call in float64, from the rounded results of the call before it."""
        wide = functools.partial(np.asarray, dtype=np.float64)
        factors, first, scales = map(wide, given)
        sums, normed = [], []
        for i in range(self.calls):
            x, y = (first, first) if i == 0 else (wide(each[0, i - 1]) for each in got)
            parts = [np.asarray(jnp.asarray(f * y, self.dtype), np.float64) for f in factors[:, i]]
            x = Rounded(x) + functools.reduce(np.add, map(Rounded, parts))
            sums.append(x)
            held = Rounded(wide(got[0][0, i]))  # the norm is of the rounded sum
            root = np.sqrt(np.mean(held * held, axis=-1, keepdims=True) + EPSILON)
            normed.append(held if i + 1 == self.calls else held / root * (scales[i] + OFFSET))
        return tuple(stored(_stacked(each), self.dtype) for each in (sums, normed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EqualRows:
    """``decode_rows`` of equal rows, which share pages and write the same token to them."""

    case: LayerCase
    rows: int
    finite: bool = False  # slots of no token hold 0, which an attention that masks them needs

    def given(self) -> tuple[Any, ...]:
        """One row's arguments."""
        x, layers, pools, *place = self.case.arguments()
        if self.finite:
            pools = tuple(np.where(np.isnan(pool), 0, pool).astype(pool.dtype) for pool in pools)
        return x, layers, pools, *place

    def arguments(self, mesh: Mesh) -> tuple[Any, ...]:
        """Arguments of ``step`` on the mesh's devices."""

        def repeated(a: Any) -> np.ndarray:
            return np.repeat(np.asarray(a), self.rows, axis=0)

        x, layers, pools, table, positions, rope = self.given()
        many = repeated(x), layers, pools, repeated(table), repeated(positions)
        return self.case.over(mesh, (*many, tuple(map(repeated, rope))))

    def step(self, mesh: Mesh) -> Any:
        """The stream after the layers, and the pools."""
        case, num = self.case, mesh.shape[AXIS]
        config = GroupedAttentionConfig(
            num_q_heads=case.N // num, num_kv_heads=case.K // num, head_dim=case.H,
            rope=RopeConfig(theta=1e4),
        )  # fmt: skip

        def layers(x, layers, pools, tables, positions, rope):
            arrays = {n: p.reshape(-1, *p.shape[2:]) for n, p in zip("kv", pools, strict=True)}
            found = decode_rows(
                x[:, None], layers, Pages(arrays=arrays, tables_BM=tables), config=config,
                positions_BT=positions[:, None], rope=tuple(each[:, None] for each in rope),
                axis=AXIS,
            )  # fmt: skip
            assert found is not None, "measured"
            y, after = found
            return y[:, 0], tuple(
                after[n].reshape(p.shape) for n, p in zip("kv", pools, strict=True)
            )

        return jax.shard_map(
            layers, mesh=mesh, in_specs=specs(AXIS), out_specs=(P(), specs(AXIS)[2]),
            check_vma=False,
        )  # fmt: skip

    def assert_right(self, y: jax.Array, pools: Any) -> None:
        """Asserts that rows have the same bits, those of the formula but for rounding."""
        np.testing.assert_array_equal(bits(y), np.broadcast_to(bits(y)[:1], y.shape))
        assert_within_rounding((y[:1], pools), self.exact())

    def exact(self, devices: int = 2) -> tuple[Rounded, tuple[Rounded, Rounded]]:
        """The stream and the pools by the formula, with every array that is stored in 16 bits."""
        case, (x, layers, pages, (table,), _, rope) = self.case, self.given()
        page, slot = divmod(case.length - 1, case.size)

        def held(x: Rounded) -> Rounded:
            return stored(x, jnp.bfloat16)

        def added(x: Rounded, rows: Rounded, weight: Any) -> Rounded:
            """x and the devices' products of their columns, which each of them rounds."""
            bounds = np.linspace(0, rows.shape[1], devices + 1).astype(int)
            spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            parts = [held(rows[:, span] @ wide(weight)[span]) for span in spans]
            return held(x + functools.reduce(np.add, parts))

        x, after = wide(x), (wide(pages[0]), wide(pages[1]))
        for i in range(case.layers):
            w, pools = layers.layer(i), (pages[0][i], pages[1][i])
            heads = held(held(normed(x, w.attention_norm)) @ wide(w.qkv))
            attended, new = case.attended(np.reshape(heads, (-1, case.H)), pools, table, rope)
            for pool, rows in zip(after, new, strict=True):
                pool[i, table[page], slot] = rows
            x = added(x, held(attended), w.out)
            both = held(held(normed(x, w.mlp_norm)) @ wide(w.gate_up))
            gate, up = both[:, : case.F], both[:, case.F :]
            x = added(x, held(gate / (1 + np.exp(-gate)) * up), w.down)
        return x, after


def _stacked(rows: list[Rounded]) -> Rounded:
    return Rounded(np.stack([x.value for x in rows]), np.stack([x.spread for x in rows]))


def bits(x: Any) -> np.ndarray:
    """The bits of 16-bit numbers."""
    return np.asarray(x).view(np.uint16)
