"""Quantization by blocks on a Hopper GPU: bits beside XLA's, and its rate beside a copy's.

python -m experiments.bench.quantize --out experiments/results/quantize-h200.json

"check" rows compare values and scales with those of the XLA form, bit for bit, infinities and NaN
among them. "time" rows are CUPTI times in turns, GB/s of the fewest bytes (2 read, 1 written, and
scales), over those of a copy of as many bytes (``x + 1`` of int32 by XLA).
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp

from experiments.bench.scaled_matmul import Contender, in_turns
from experiments.bench.table import Table
from pallas_kernels.common.scales import Scaling
from pallas_kernels.quantize import quantize, quantize_both_ways

E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
BLOCKS = (Scaling.BLOCK_OF_ROW, Scaling.BLOCK)
SHAPES = ((8192, 8192), (16384, 7168), (16384, 2048))
CHECKS = [
    (form, dtype, power_of_two)
    for form in BLOCKS
    for dtype in (E4M3, E5M2)
    for power_of_two in (False, True)
    if not (form is Scaling.BLOCK and power_of_two)
]


def numbers(rows: int, columns: int) -> jax.Array:
    """Rows of very different sizes; some zeros, infinities and NaN."""
    keys = jax.random.split(jax.random.key(0), 3)
    size = jnp.exp2(jax.random.randint(keys[1], (rows, 1), -60, 60).astype(jnp.float32))
    x = jax.random.normal(keys[0], (rows, columns), jnp.float32) * size
    odd = jax.random.uniform(keys[2], (rows, columns))
    x = jnp.where(odd < 1e-4, jnp.inf, jnp.where(odd < 2e-4, jnp.nan, x))
    return x.at[: rows // 8, : columns // 2].set(0.0).astype(jnp.bfloat16)


def check(form: Scaling, dtype: jnp.dtype, power_of_two: bool) -> dict:
    x = numbers(512, 1024)
    f = functools.partial(quantize, scaling=form, dtype=dtype, power_of_two=power_of_two)
    mine, theirs = (
        jax.jit(functools.partial(f, implementation=name))(x) for name in ("hopper", "xla")
    )

    def same(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.mean((a == b) | (jnp.isnan(a) & jnp.isnan(b))))

    nan = float(jnp.mean(jnp.isnan(mine.values.astype(jnp.float32))))
    return {
        "values_same": same(mine.values, theirs.values),
        "scales_same": same(mine.scale, theirs.scale),
        "nan": nan,
    }


def measure(rows: int, columns: int) -> dict:
    x = numbers(rows, columns)
    contenders = {}
    for form in BLOCKS:
        for name in ("hopper", "xla"):
            f = jax.jit(functools.partial(quantize, scaling=form, implementation=name))
            contenders[f"{form} {name}"] = Contender(call=f, sets=[(x,)])
    contenders["1x128 across"] = Contender(
        call=jax.jit(lambda x: quantize_both_ways(x)[1]), sets=[(x,)]
    )
    # Read once, written once: half the bytes of x and its values each way.
    words = jnp.zeros((rows * columns * 3 // 8,), jnp.int32)
    contenders["copy"] = Contender(call=jax.jit(lambda y: y + 1), sets=[(words,)])
    ms = in_turns(contenders)
    return {
        "ms": ms,
        "gb_per_s": {name: 3 * rows * columns / taken / 1e6 for name, taken in ms.items()},
        "of_copy": {name: ms["copy"] / taken for name, taken in ms.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=100.0)
    args = parser.parse_args()
    table = Table(args.out, deadline=time.monotonic() + args.budget)
    for rows, columns in SHAPES:
        table.add(
            f"time {rows}x{columns}",
            functools.partial(measure, rows, columns),
        )
    for form, dtype, power_of_two in CHECKS:
        table.add(
            f"check {form} {dtype.name}{' power of two' * power_of_two}",
            functools.partial(check, form, dtype, power_of_two),
        )


if __name__ == "__main__":
    main()
