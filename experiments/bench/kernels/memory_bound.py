"""Softmaxes and norms beside XLA and a copy: errors against fp32, and GB/s of the fewest bytes.

python -m experiments.bench.kernels.memory_bound --out experiments/results/memory-bound-h200.json
python -m experiments.bench.kernels.memory_bound --random --out random.json

``--random`` takes 40 random lengths of 1,000 to 262,144 columns, in arrays of 16 to 512 MiB, two
ops each. Half of the lengths are any number, a quarter multiples of 64 and a quarter of 2,048. GB/s
counts each input read once and each output written once, by CUPTI kernel times. The ratio "of_copy"
divides it by the rate of ``x + 1`` of int32 of the same bytes in this process. Errors are relative.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from experiments.bench import harness
from pallas_kernels.norm import formulas as norms
from pallas_kernels.norm.reference import layer_norm_reference, rms_norm_reference
from pallas_kernels.rows.dispatch import DTYPES
from pallas_kernels.rows.formula import MASK, Formula
from pallas_kernels.rows.kernel import apply_rows
from pallas_kernels.softmax import formulas as softmaxes
from pallas_kernels.softmax.reference import (
    log_softmax_reference,
    softmax_gradient_reference,
    softmax_reference,
)

SHAPES = (
    (1048576, 128), (131072, 1024), (65536, 2048), (32768, 4096), (16384, 8192), (8192, 32768),
    (4096, 131072),
)  # fmt: skip
EPSILON = 1e-6
NORMS = ("rms_norm", "layer_norm", "rms_norm+residual", "layer_norm+residual")
OPS = (
    "masked_softmax",
    *(name + way for name in ("softmax", "log_softmax", *NORMS) for way in ("", "_gradient")),
)


def _softmaxes(name: str) -> tuple[Formula, Callable, str]:
    base = name.removesuffix("_gradient")
    log, masked = base == "log_softmax", base == "masked_softmax"
    if base == name:
        plain = log_softmax_reference if log else softmax_reference
        return softmaxes.forward(log=log, masked=masked), plain, "xm" if masked else "x"
    if log:

        def gradient(x, d_y):
            return jax.vjp(log_softmax_reference, x)[1](d_y)[0]

        return softmaxes.log_gradient(), gradient, "xd"
    return softmaxes.gradient(), softmax_gradient_reference, "xd"


def _norms(name: str, columns: int, dtype: str) -> tuple[Formula, Callable, str]:
    base = name.removesuffix("_gradient")
    layer, residual = base.startswith("layer_norm"), base.endswith("+residual")
    norm = norms.NormForm(
        columns=columns, epsilon=EPSILON, centered=layer, biased=layer, residual=residual,
        dtype=jnp.dtype(dtype),
    )  # fmt: skip
    reference = layer_norm_reference if layer else rms_norm_reference
    plain = functools.partial(reference, epsilon=EPSILON)

    def forward(*args):
        x = args[0] + args[1] if residual else args[0]
        y = plain(x, *args[1 + residual :])
        return (y, x) if residual else (y,)

    def gradient(x, d_y, *rest):
        vectors = (rest[-1], jnp.zeros_like(rest[-1])) if layer else rest[-1:]
        d_x, *d_vectors = jax.vjp(plain, x, *vectors)[1](d_y)
        return sum(rest[:-1], d_x), *d_vectors

    if base == name:
        return norms.forward(norm), forward, "x" + "r" * residual + ("sb" if layer else "s")
    return norms.backward(norm), gradient, "xd" + "r" * residual + "s"


def functions(name: str, columns: int, dtype: str) -> tuple[Callable, Callable, str, int]:
    """The kernel, XLA's form, arguments by letter, and how many arrays of rows these move.

    Letters: x, d and r rows, m a mask, s and b vectors.
    """
    made = _norms(name, columns, dtype) if "norm" in name else _softmaxes(name)
    formula, plain, letters = made

    def kernel(*args):
        rows = [x.astype(MASK) if x.dtype == jnp.bool else x for x in args if x.ndim == 2]
        vectors = [x for x in args if x.ndim == 1]
        results, sums = apply_rows(formula, rows, vectors_C=vectors)
        return *results, *(jnp.sum(parts, axis=0) for parts in sums)

    return kernel, plain, letters, sum(x in "xdr" for x in letters) + formula.num_results


def drawn(count: int, seed: int) -> Iterator[tuple[int, int, list[str]]]:
    """Random rows, columns and ops; all ops come equally often."""
    rng = np.random.default_rng(seed)
    names = ("softmax", "rms_norm", "layer_norm", "log_softmax")
    ops = itertools.cycle(name + way for name in names for way in ("", "_gradient"))
    for _ in range(count):
        columns = int(math.exp(rng.uniform(math.log(1_000), math.log(262_144))))
        step = int(rng.choice((1, 64, 2048), p=(0.5, 0.25, 0.25)))
        columns = max(columns // step * step, step, 1_000 if step == 1 else step)
        size = math.exp(rng.uniform(math.log(16 * 2**20), math.log(512 * 2**20)))
        yield max(8, round(size / 2 / columns / 8) * 8), columns, [next(ops), next(ops)]


def arguments(letters: str, rows: int, columns: int, dtype: str) -> list[jax.Array]:
    """Random arrays by letter."""

    def made(letter: str, key: jax.Array) -> jax.Array:
        if letter in "sb":
            return jax.random.normal(key, (columns,))
        if letter == "m":
            return jax.random.bernoulli(key, 0.5, (rows, columns))
        return jax.random.normal(key, (rows, columns), dtype)

    keys = jax.random.split(jax.random.key(0), len(letters))
    return [made(*each) for each in zip(letters, keys, strict=True)]


def rate(f: Callable, args: list[jax.Array], num_bytes: int, copy: float | None) -> dict:
    """Median time of the kernels of a call."""
    _, times = profiler.measure(f, iterations=9)(*args)
    assert times is not None, "the call launched no kernel"
    ms = statistics.median(times)
    row = {"ms": round(ms, 5), "gb_s": round(num_bytes / ms / 1e6, 1)}
    return row | ({"of_copy": round(row["gb_s"] / copy, 4)} if copy else {})


def measure(table, rows: int, columns: int, names: list[str], dtype: str) -> None:
    """Times ops at one shape by the kernel and by XLA, after a copy of the same bytes."""
    elements, size = rows * columns, jnp.dtype(dtype).itemsize
    shape = f"{rows}x{columns}" if dtype == "bfloat16" else f"{dtype} {rows}x{columns}"
    words = jnp.zeros(elements * size // 4, jnp.int32)
    copy = functools.partial(rate, lambda x: x + 1, [words], 2 * size * elements, None)
    copied = table.add(f"copy {shape}", copy).get("gb_s")
    for name in names:
        kernel, plain, letters, num_arrays = functions(name, columns, dtype)
        args = arguments(letters, rows, columns, dtype)
        num_bytes = (num_arrays * size + letters.count("m")) * elements
        wide = [x.astype(jnp.float32) if x.dtype == dtype else x for x in args]
        want = jax.tree.leaves(jax.jit(plain)(*wide))
        for form, f in (("hopper", kernel), ("xla", plain)):
            row = functools.partial(timed, f, args, want, num_bytes, copied)
            table.add(f"{name} {shape} {form}", row)


def timed(f: Callable, args: list[jax.Array], want: list, num_bytes: int, copied) -> dict:
    """A row of the table, with errors beside what is wanted."""
    program = jax.jit(f).lower(*args).compile()
    pairs = zip(jax.tree.leaves(program(*args)), want, strict=True)
    errors = [harness.relative(*pair) for pair in pairs]
    return rate(program, args, num_bytes, copied) | {"errors": errors}


def main() -> None:
    parser = harness.options(__doc__, budget=240.0)
    parser.add_argument("--random", action="store_true", help="40 random shapes instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=[d.__name__ for d in DTYPES])
    args = parser.parse_args()
    table = harness.table_of(args)
    fixed = [(rows, columns, list(OPS)) for rows, columns in SHAPES]
    for rows, columns, names in drawn(40, args.seed) if args.random else fixed:
        measure(table, rows, columns, names, args.dtype)


if __name__ == "__main__":
    main()
