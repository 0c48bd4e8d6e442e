"""Chains of ``sum_rows`` in one program, and their meaning in float64.

Dims: D device, C call, R row, N column.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.row_sums import open_mailbox, sum_rows
from tests.rounding import Rounded, stored

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
        """What each call computes of the results before it, as the program rounded them."""
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


def _stacked(rows: list[Rounded]) -> Rounded:
    return Rounded(np.stack([x.value for x in rows]), np.stack([x.spread for x in rows]))


def bits(x: Any) -> np.ndarray:
    """The bits of 16-bit numbers."""
    return np.asarray(x).view(np.uint16)
