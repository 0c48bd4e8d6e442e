"""The kernel ladder on a Hopper GPU: every rung beside cuBLAS, ELU beside XLA, and small effects.

python -m experiments.bench.kernels.ladder --out experiments/results/ladder-h200.json

Each figure is a median of CUPTI kernel times; a rung and XLA are interleaved in one process. Errors
are relative to fp32 products, beside XLA's.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import timing
from experiments.bench.environment import clocks
from experiments.bench.harness import options, relative, table_of
from experiments.ladder import RUNGS, effects, elementwise, specialized, tensor_cores
from experiments.ladder.specialized import Tiles

SIZES = (4096, 8192)
SLOW = ("naive", "coalesced", "shared")  # one size, few repeats
ELU_SHAPE = (16384, 8192)
NUM_ELEMENTS = 1 << 28  # fp32: 1 GiB
STRIDES = (1, 2, 4, 8, 16, 32)
BLOCKS = (1, 2, 4, 8, 16)
VARIANTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "tensor_core swizzle 32": functools.partial(tensor_cores.tensor_core, swizzle=32),
    "tensor_core swizzle 64": functools.partial(tensor_cores.tensor_core, swizzle=64),
    "pipelined 2 stages": functools.partial(tensor_cores.pipelined, num_stages=2),
    "persistent rows in order": functools.partial(specialized.persistent, tiles=Tiles(band=1)),
    "persistent band 16": functools.partial(specialized.persistent, tiles=Tiles(band=16)),
}


@jax.jit
def xla(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b)


@jax.jit
def oracle(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


@functools.cache
def operands(size: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(size))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    return a, b


def measure_matmul(matmul: Callable[..., jax.Array], size: int, *, slow: bool) -> dict[str, Any]:
    """One rung at one size, beside XLA."""
    a, b = operands(size)
    matmul = jax.jit(matmul)
    want = oracle(a, b)
    got = matmul(a, b)
    error, plain = relative(got, want), relative(xla(a, b), want)
    again = bool(jnp.array_equal(got, matmul(a, b)))
    del want, got
    forms = {"rung": (matmul, (a, b)), "xla": (xla, (a, b))}
    times = timing.measure(forms, rounds=1 if slow else 4, iterations=2 if slow else 6)
    flop = 2 * size**3
    ms = {name: timed.median_ms for name, timed in times.items()}
    return {
        "size": size, "ms": ms["rung"], "tflops": flop / ms["rung"] / 1e9,
        "xla_ms": ms["xla"], "xla_tflops": flop / ms["xla"] / 1e9,
        "of_xla": ms["xla"] / ms["rung"], "error": error, "xla_error": plain,
        "ok": error <= 2 * plain, "repeats": again, "clocks": clocks(),
    }  # fmt: skip


def timed_gb_s(forms: dict[str, tuple[Callable, tuple]], num_bytes: dict[str, int]) -> dict:
    """Milliseconds and GB/s of each form, interleaved."""
    rows = {}
    for name, timed in timing.measure(forms, rounds=3, iterations=4).items():
        ms = timed.median_ms
        rows[name] = {"ms": ms, "gb_s": num_bytes[name] / ms / 1e6}
    return rows


def elu_values() -> dict[str, Any]:
    """ELU, and ELU with its gradient: by hand and by XLA."""
    keys = jax.random.split(jax.random.key(0))
    x, d_y = (jax.random.normal(key, ELU_SHAPE, jnp.bfloat16) for key in keys)
    one = functools.partial(elementwise.elu, vector=1)
    forms = {
        "value by hand": (elementwise.elu, (x,)),
        "value by hand, 2 bytes a load": (one, (x,)),
        "value by XLA": (elementwise.elu_reference, (x,)),
        "value by XLA, bf16 formula": (jax.nn.elu, (x,)),
        "value and gradient by hand": (elementwise.elu_and_gradient, (x, d_y)),
        "value and gradient by XLA": (elementwise.elu_and_gradient_reference, (x, d_y)),
        "value, then gradient, by XLA in two calls": (xla_in_two, (x, d_y)),
        "copy": (lambda x: x + 1, (x,)),
    }
    size = 2 * x.size
    streams = {name: (4 if "gradient" in name else 2) * size for name in forms}
    rows = timed_gb_s(forms, streams)
    hand = jax.jit(elementwise.elu_and_gradient)(x, d_y)
    true = jax.jit(elementwise.elu_and_gradient_reference)(x, d_y)
    errors = [relative(h, t) for h, t in zip(hand, true, strict=True)]
    return {"shape": ELU_SHAPE, "rows": rows, "difference": errors}


def xla_in_two(x: jax.Array, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the ELU and its gradient unfused: intermediates go through memory."""
    y = elementwise.elu_reference(x)
    x, y = jax.lax.optimization_barrier((x, y))
    slope = jnp.where(x > 0, 1, y + 1)
    return y, d_y * jax.lax.optimization_barrier(slope)


def strided() -> dict[str, Any]:
    """Bandwidth of what is asked for, by how far apart neighbouring threads read."""
    x = jax.random.normal(jax.random.key(0), (NUM_ELEMENTS,))
    rows = []
    for stride in STRIDES:
        f = jax.jit(functools.partial(effects.every_nth, stride=stride))
        assert bool(jnp.array_equal(f(x), x[::stride])), stride
        num = 8 * x.size // stride
        rows.append({"stride": stride, **timed_gb_s({"it": (f, (x,))}, {"it": num})["it"]})
    forms = {f"{4 * w} bytes": functools.partial(effects.copy, width=w) for w in (1, 2, 4)}
    assert all(bool(jnp.array_equal(jax.jit(f)(x), x)) for f in forms.values())
    calls = {name: (f, (x,)) for name, f in forms.items()} | {"xla": (lambda x: x + 1, (x,))}
    return {"stride": rows, "width": timed_gb_s(calls, dict.fromkeys(calls, 8 * x.size))}


def occupied() -> dict[str, Any]:
    """Bandwidth by warps per SM and loads in flight per thread."""
    x = jax.random.normal(jax.random.key(0), (NUM_ELEMENTS,))
    rows = []
    for in_flight in (1, 4):
        for blocks in BLOCKS:
            f = jax.jit(
                functools.partial(effects.copy_with_few_warps, blocks=blocks, in_flight=in_flight)
            )
            assert bool(jnp.array_equal(f(x), x)), (blocks, in_flight)
            row = timed_gb_s({"it": (f, (x,))}, {"it": 8 * x.size})["it"]
            rows.append({"warps": 4 * blocks, "in_flight": in_flight, **row})
    return {"rows": rows}


def divergent() -> dict[str, Any]:
    """Times one set of loops in two orders: threads of a warp agree on the count, and shuffled."""
    rng, n, most = np.random.default_rng(0), 1 << 22, 512
    counts = np.sort(rng.integers(0, most, n)).astype(np.int32)
    blocks = counts.reshape(-1, effects.THREADS)
    # Blocks in random order, so that long ones do not come last; within a warp all is as sorted.
    agree = rng.permutation(blocks).reshape(-1)
    x = jax.random.normal(jax.random.key(0), (n,))
    orders = {"warps agree": agree, "shuffled": rng.permutation(counts)}
    calls = {name: (effects.iterate, (x, jnp.asarray(c))) for name, c in orders.items()}
    error = max(
        relative(jax.jit(f)(*args), effects.iterate_reference(*args)) for f, args in calls.values()
    )
    times = {name: t.median_ms for name, t in timing.measure(calls, rounds=3, iterations=5).items()}
    # A warp takes as long as its longest loop.
    longest = {
        name: float(np.mean(c.reshape(-1, 32).max(axis=1)) / np.mean(c))
        for name, c in orders.items()
    }
    return {"ms": times, "longest_over_mean": longest, "error": error}


def items() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Everything there is to measure, in order."""
    for rung in RUNGS:
        for size in SIZES[:1] if rung.name in SLOW else SIZES:
            f = functools.partial(measure_matmul, rung.matmul, size, slow=rung.name in SLOW)
            yield f"rung {rung.name} {size}", f
    yield "elu", elu_values
    yield "access", strided
    yield "occupancy", occupied
    yield "divergence", divergent
    for size in reversed(SIZES):
        for name, variant in VARIANTS.items():
            yield (
                f"variant {name} {size}",
                functools.partial(measure_matmul, variant, size, slow=False),
            )


def main() -> None:
    args = options(__doc__, budget=140.0).parse_args()
    table = table_of(args)
    for name, measure in items():
        table.add(name, measure)
    for row in table.rows:
        if "of_xla" in row:
            print(
                f"{row['name']:38s} {row['ms']:9.3f} ms {row['tflops']:7.1f} TFLOP/s "
                f"{row['of_xla']:6.1%} of XLA's {row['xla_tflops']:5.0f}  ok={row['ok']}"
            )


if __name__ == "__main__":
    main()
