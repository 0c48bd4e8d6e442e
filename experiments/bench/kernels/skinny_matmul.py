"""Matmuls of a few rows: the kernel, by tiles, beside XLA's choice of its own and of libraries.

python -m experiments.bench.kernels.skinny_matmul --out experiments/results/skinny-matmul-h200.json

Times are medians of CUPTI kernel times; calls rotate through as many weights as keep L2 from
holding one. "of_copy" is the weight's bytes over those of a copy in the same process. Errors are
relative to the product in fp32. With --tables the fastest go into the tables of a folder.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.serving.decode import copied
from experiments.bench.table import Table
from experiments.bench.tuned_table import add_rows
from pallas_kernels.common import tables
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.skinny_matmul.choice import OP, QUESTION
from pallas_kernels.skinny_matmul.config import DEPTHS, SkinnyConfig, config_for
from pallas_kernels.skinny_matmul.hopper import padded, skinny_matmul_hopper
from pallas_kernels.skinny_matmul.reference import skinny_matmul_reference

SHAPES = {  # K, N, gated
    "8b qkv": (4096, 6144, False),
    "8b out": (4096, 4096, False),
    "8b gate and up": (4096, 28_672, True),
    "8b down": (14_336, 4096, False),
    "1b qkv": (2048, 3072, False),
    "1b out": (2048, 2048, False),
    "1b gate and up": (2048, 16_384, True),
    "1b down": (8192, 2048, False),
}
SUMMED = ("out", "down")
"""Products that a residual is added to, by the operation that adds parts of K, too."""
ROWS = (1, 16, 64, 128, 256)
BEYOND_CACHE = 160 * 2**20


class Case:
    """A shape at a number of rows, and its programs, which compile side by side."""

    def __init__(self, name: str, M: int, pool: concurrent.futures.Executor, *, clusters: bool):
        self.K, self.N, self.swiglu = SHAPES[name]
        self.clusters = (1, 2, 4) if clusters and padded(M) >= 32 else (1,)
        self.name, self.M = name, M
        self.count = max(2, min(8, 1 + BEYOND_CACHE // (2 * self.K * self.N)))
        x = jax.ShapeDtypeStruct((M, self.K), jnp.bfloat16)
        w = [jax.ShapeDtypeStruct((self.K, self.N), jnp.bfloat16)] * self.count
        self.candidates = self.configs()
        self.programs = {
            key: pool.submit(lambda f=f: jax.jit(f).lower(x, w).compile())
            for key, f in {c: self.calls(c) for c in self.candidates}.items()
        }
        self.true = pool.submit(lambda: jax.jit(self.exact).lower(x, w[0]).compile())
        self.draw = pool.submit(lambda: jax.jit(self.drawn).lower().compile())

    def configs(self) -> list[SkinnyConfig | None]:
        """None for XLA, and tiles around the default."""
        rows = padded(self.M)
        default = config_for(rows, self.N, self.K, swiglu=self.swiglu)
        if default is None:
            return [None]
        widths = {default.tile_n, 128} if self.swiglu else {default.tile_n}
        each = [
            SkinnyConfig(tile_n=width, depth=depth, cluster=cluster)
            for width, depth, cluster in itertools.product(sorted(widths), DEPTHS, self.clusters)
        ]
        if self.name.endswith(SUMMED):
            for width, depth, cluster in itertools.product((64, 128), DEPTHS, self.clusters):
                # As many parts as there are multiprocessors for.
                splits = 2 ** int(math.log2(max(1, NUM_PROCESSORS // (self.N // width))))
                each.append(SkinnyConfig(tile_n=width, depth=depth, cluster=cluster, splits=splits))
        if padded(self.M) > 64:
            each += [
                dataclasses.replace(config, tile_n=width, transposed=True)
                for config, width in itertools.product(tuple(each), (64, 128))
            ]
        # Deep tiles were up to twice as slow from 128 rows on, and in wide gated ones.
        slow = [c for c in each if c.depth > 64 and (rows > 64 or c.tile_n > 128)]
        return [None, *(c for c in dict.fromkeys(each) if self.fits(c) and c not in slow)]

    def fits(self, config: SkinnyConfig) -> bool:
        """Whether tiles fit this case."""
        return config.unsupported(padded(self.M), self.N, self.K, swiglu=self.swiglu) is None

    def calls(self, config: SkinnyConfig | None) -> Callable:
        """As many products as there are weights."""
        f = functools.partial(skinny_matmul_reference, swiglu=self.swiglu)
        if config is not None:
            f = functools.partial(skinny_matmul_hopper, swiglu=self.swiglu, config=config)
        f = jax.jit(f)  # traced and lowered once for all weights
        if self.name.endswith(SUMMED):
            return lambda x, ws: [f(x, w) + 1 for w in ws]
        return lambda x, ws: [f(x, w) for w in ws]

    def drawn(self) -> tuple[jax.Array, list[jax.Array]]:
        """Random x, and weights."""
        x = jax.random.normal(jax.random.key(9), (self.M, self.K), jnp.bfloat16)
        keys = jax.random.split(jax.random.key(0), self.count)
        return x, [0.02 * jax.random.normal(key, (self.K, self.N), jnp.bfloat16) for key in keys]

    def exact(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The first product in fp32."""
        wide = [a.astype(jnp.float32) for a in (x, w)]
        product = skinny_matmul_reference(*wide, swiglu=self.swiglu)
        return product + 1 if self.name.endswith(SUMMED) else product

    def measure(self, config: SkinnyConfig | None, x, ws, copy: float) -> dict:
        """Time of one product, and its error."""
        program = self.programs[config].result()
        want = self.true.result()(x, ws[0])
        got = program(x, ws)[0].astype(jnp.float32)
        _, launches = profiler.measure(program, aggregate=False, iterations=4)(x, ws)
        assert launches is not None, "the product launched no kernel"
        taken = statistics.median(sum(t for _, t in each) for each in launches) / self.count
        return {
            "us": round(1e3 * taken, 2),
            "of_copy": round(2e3 * self.K * self.N / taken / copy, 3),
            "error": float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)),
        }

    def row(self, config: SkinnyConfig | None, us: float) -> tables.Row:
        """As the tables have it."""
        case: dict[str, tables.Value] = {
            "rows": padded(self.M), "depth": self.K, "columns": self.N, "swiglu": self.swiglu,
        }  # fmt: skip
        choice: dict[str, tables.Value] = {"implementation": "xla"}
        if config is not None:
            choice = {
                "implementation": "hopper", "tile_n": config.tile_n, "depth": config.depth,
                "cluster": config.cluster, "splits": config.splits,
                "transposed": config.transposed,
            }  # fmt: skip
        return tables.Row.of(case=case, choice=choice, ms=us / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tables", type=pathlib.Path, help="folder whose table takes the times")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds in all")
    parser.add_argument("--only", nargs="+", default=[""], help="shapes whose names begin so")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--clusters", action="store_true", help="that share copies, too")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    found = []
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        cases = [
            Case(name, M, pool, clusters=args.clusters)
            for name in SHAPES
            if name.startswith(tuple(args.only))
            for M in args.rows
        ]
        # Compilers try kernels on the GPU: nothing is timed before they are done.
        programs = [p for case in cases for p in (*case.programs.values(), case.true, case.draw)]
        concurrent.futures.wait(programs)
    print(f"compiled {time.monotonic() - begun:.1f} s", flush=True)
    copy = copied()
    table.add("copy", lambda: {"gb_s": round(copy / 1e9, 1)})
    for case in cases:
        x, ws = case.draw.result()()
        for config in case.candidates:
            name = f"{case.name}, {case.M} rows: {config or 'xla'}"
            row = table.add(name, functools.partial(case.measure, config, x, ws, copy))
            if "us" in row:
                found.append(case.row(config, row["us"]))
    if args.tables is not None:
        add_rows(args.tables, found, op=OP, question=QUESTION)


if __name__ == "__main__":
    main()
