"""Collective matmuls on a mesh, and their values and gradients in float64; and their kernels on
one device that is its own peer.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.collective_matmul.hopper.all_gather_kernel import AllGatherKernel
from pallas_kernels.collective_matmul.hopper.config import CollectiveConfig
from pallas_kernels.collective_matmul.hopper.reduce_scatter_kernel import ReduceScatterKernel
from pallas_kernels.grouped_matmul.hopper.config import GroupedConfig
from tests.rounding import Rounded, stored

AXIS = "tensor"
POSITIONS, COLUMNS = P("fsdp", AXIS, None), P("fsdp", None, AXIS)


def mesh(fsdp: int = 1, tensor: int = 2) -> Mesh:
    """A mesh, over one of whose axes the matmuls communicate."""
    devices = jax.devices()[: fsdp * tensor]
    return jax.make_mesh((fsdp, tensor), ("fsdp", AXIS), (AxisType.Auto,) * 2, devices=devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveCase:
    """Sizes over all devices: x [B, M, K], a weight [K, n] for each n in N."""

    B: int
    M: int
    K: int
    N: tuple[int, ...]
    transposed: bool = False
    dtype: Any = jnp.bfloat16

    @property
    def spec(self) -> str:
        """Einsum of an x and a weight."""
        return "bmk,nk->bmn" if self.transposed else "bmk,kn->bmn"

    def draw(self, *, gathers: bool) -> tuple[tuple[np.ndarray, ...], ...]:
        """Random x, one or as many as weights, fp32 weights, and cotangents of the results."""
        rng = np.random.default_rng(3)
        columns = self.N if gathers else (self.N[0],) * len(self.N)
        xs = [rng.normal(size=(self.B, self.M, self.K)).astype(self.dtype) for _ in columns]
        weights = [rng.normal(size=(self.K, n)) * self.K**-0.5 for n in columns]
        weights = [(w.T if self.transposed else w).astype(np.float32) for w in weights]
        ds = [rng.normal(size=(self.B, self.M, n)).astype(self.dtype) for n in columns]
        return (xs[:1], weights, ds) if gathers else (xs, weights, ds[:1])

    def specs(self, *, gathers: bool) -> tuple[P, P, P]:
        """Partition specs of xs, of weights and of results."""
        weight = P(None, AXIS) if gathers != self.transposed else P(AXIS, None)
        inward, outward = (POSITIONS, COLUMNS) if gathers else (COLUMNS, POSITIONS)
        return inward, weight, outward

    def on(self, mesh: Mesh, *, gathers: bool) -> Any:
        """The arrays of ``draw``, on the devices of a mesh."""
        places = (NamedSharding(mesh, spec) for spec in self.specs(gathers=gathers))
        given = zip(self.draw(gathers=gathers), places, strict=True)
        return tuple(jax.device_put(arrays, place) for arrays, place in given)

    def run(self, mesh: Mesh, implementation: str, *, gathers: bool) -> Any:
        """Function of (xs, weights), whole arrays, that returns a tuple of results."""
        inward, weight, outward = self.specs(gathers=gathers)
        options = dict(axis=AXIS, transposed=self.transposed, implementation=implementation)

        def gather(xs, weights):
            return all_gather_matmul(xs[0], weights, **options)

        def scatter(xs, weights):
            return (matmul_reduce_scatter(tuple(zip(xs, weights, strict=True)), **options),)

        return jax.shard_map(
            gather if gathers else scatter, mesh=mesh, in_specs=(inward, weight), out_specs=outward
        )

    def exact(self, xs, weights, ds, *, gathers: bool, devices: int) -> Any:
        """Results and gradients of xs and weights; sums of devices are sent in x's dtype."""
        xs, ds = ([Rounded(np.asarray(a, np.float64)) for a in each] for each in (xs, ds))
        held = [Rounded(np.asarray(jnp.asarray(w, self.dtype), np.float64)) for w in weights]
        a, b, c = (part for half in self.spec.split("->") for part in half.split(","))
        to_x, to_w = f"{c},{b}->{a}", f"{a},{c}->{b}"
        if gathers:
            y = [np.einsum(self.spec, xs[0], w) for w in held]
            dx = self._summed([(d, w) for d, w in zip(ds, held, strict=True)], to_x, "n", devices)
            dw = [np.einsum(to_w, xs[0], d) for d in ds]
            return y, ([dx], dw)
        y = [self._summed(list(zip(xs, held, strict=True)), self.spec, "k", devices)]
        dx = [np.einsum(to_x, ds[0], w) for w in held]
        return y, (dx, [np.einsum(to_w, x, ds[0]) for x in xs])

    def _summed(self, factors: Any, spec: str, summed: str, devices: int) -> Any:
        """Sum of products whose parts of the contracted dim are those of devices."""
        total = 0.0
        for part in range(devices):
            one = 0.0
            for operands in factors:
                cut = []
                for array, letters in zip(operands, spec.split("->")[0].split(","), strict=True):
                    at = letters.index(summed)
                    size = array.shape[at] // devices
                    index = [slice(None)] * array.ndim
                    index[at] = slice(part * size, (part + 1) * size)
                    cut.append(array[tuple(index)])
                one = stored(np.einsum(spec, *cut), self.dtype) + one
            total = stored(one, self.dtype) + total
        return total


@functools.cache
def with_gradients(
    case: CollectiveCase,
    mesh: Mesh,
    implementation: str,
    gathers: bool,
    compiler_options: tuple[tuple[str, str], ...] = (),
) -> Any:
    """Jitted function of (xs, weights, ds) that returns results and gradients."""

    def run(xs, weights, ds):
        results, pull = jax.vjp(case.run(mesh, implementation, gathers=gathers), xs, weights)
        return list(results), pull(tuple(ds))

    return jax.jit(run, compiler_options=dict(compiler_options))


class _Itself:
    """The first of two devices, which gets its own messages to the second."""

    __slots__ = ()

    def device(self, peer):
        return jax.lax.rem(jnp.int32(peer), jnp.int32(2))

    def there(self, ref, peer):
        return ref

    def signal(self, flag, peer):
        pl.semaphore_signal(flag)


class GatherFromItself(_Itself, AllGatherKernel):
    """Rows of the second device are never written: only results of the first one's count."""

    __slots__ = ()


class GatherFromNobody(GatherFromItself):
    """Waits for a second device that never says that it has sent."""

    __slots__ = ()

    def signal(self, flag, peer):
        pass


class ScatterToItself(_Itself, ReduceScatterKernel):
    """Adds the second device's rows of the product to the first one's."""

    __slots__ = ()


def looped(kind: Any, x: jax.Array, weight: jax.Array, *, transposed: bool, **changes: Any) -> Any:
    """Runs a kernel by itself: x [B, M, K] to gather, or [B, 2 M, K] whose product to scatter."""
    B, M, K = x.shape
    gathers, N = issubclass(kind, AllGatherKernel), weight.shape[0 if transposed else 1]
    M = M if gathers else M // 2
    config = GroupedConfig(columns=256, in_any_order=changes.pop("in_any_order", True))
    kernel = kind(
        c=config, options=CollectiveConfig(**changes), dtype=x.dtype, out_dtype=x.dtype,
        num_rows=B * M, num_groups=0, axis="none", num_devices=2, length=M, depths=(K,),
        num_columns=N, transposed=transposed,
    )  # fmt: skip
    shapes = {"out": (2 * B * M, N), "gathered": (2 * B * M, K)}
    if not gathers:
        shapes = {"out": (B * M, N), "inbox": kernel.inbox}
    results = {name: jax.ShapeDtypeStruct(shape, x.dtype) for name, shape in shapes.items()}
    found = kernel.launch({"a": [x.reshape(-1, K)], "b": [weight]}, results)
    found.pop("inbox", None)
    return {name: y.reshape(B, -1, y.shape[-1])[:, :M] for name, y in found.items()}


def by_itself(x: np.ndarray, weight: np.ndarray, *, gathers: bool, transposed: bool) -> Rounded:
    """The ``out`` of ``looped``."""
    x, weight = (Rounded(np.asarray(a, np.float64)) for a in (x, weight))
    y = np.einsum("bmk,nk->bmn" if transposed else "bmk,kn->bmn", x, weight)
    if gathers:
        return y
    half = y.shape[1] // 2
    return y[:, :half] + stored(y[:, half:], jnp.bfloat16)
