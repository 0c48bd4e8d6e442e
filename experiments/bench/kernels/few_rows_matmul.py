"""Products of few rows: the kernels of ``few_rows_matmul``, by tiles, beside XLA and each other.

python -m experiments.bench.kernels.few_rows_matmul --out experiments/results/few-rows-h200.json

First every variant is held to the formula in fp32; one that is farther from it than rounding can
explain fails, and its time is in no table. Times are medians of CUPTI kernel time; calls rotate
through as many weights as keep L2 from holding one. Rows "fused" have what is beside a product in
the kernel, and are held against "apart": a norm, the product as "auto" chooses it, and a sum; what
launching each of them costs is not in it. Other rows are the product, with the sum that follows it,
and are held against "xla". The ratio "of_copy" is the weight's rate over that of a copy in the same
process. With --tables the times go into the table of a folder, which "auto" follows.
"""

import argparse
import concurrent.futures
import dataclasses
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.harness import copied
from experiments.bench.table import Table
from experiments.bench.tuned_table import add_rows
from pallas_kernels import few_rows_matmul
from pallas_kernels.common import tables
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.few_rows_matmul.choice import QUESTION, KernelConfig, weight_name
from pallas_kernels.few_rows_matmul.config import (
    MOST_RESIDENT,
    SKINNY_DEPTHS,
    SPLITS,
    FusedConfig,
    ProductShape,
    QuantizedConfig,
    SkinnyConfig,
    default_fused,
    default_skinny,
    fused_configs,
    quantized_configs,
)
from pallas_kernels.few_rows_matmul.hopper import fused_hopper, product_hopper
from pallas_kernels.few_rows_matmul.reference import FewRowsCall, multiplied
from pallas_kernels.hopper.cluster_sums import WIDTH
from pallas_kernels.quantized_weight import WeightCode, WeightFormat, arranged, round_weight

BF16 = jnp.dtype(jnp.bfloat16)
LAYERS = {  # model width, packed heads' width, hidden width
    "8b": (4096, 6144, 14_336),
    "9b": (4096, 12_416, 12_288),  # hybrid: with gates, and numbers per head
    "1b": (2048, 3072, 8192),
}
WEIGHTS = {
    "bf16": None,
    "int4": WeightFormat(code=WeightCode.INT4, group_rows=128),
    "fp8": WeightFormat(code=WeightCode.E4M3),
    "int8": WeightFormat(code=WeightCode.INT8),
}
LEAST_BLOCKS, MOST_BLOCKS = 90, 600
BEYOND_CACHE = 160 * 2**20
MOST_WEIGHTS = 8  # bf16 weights sampled one by one; a quantized weight's copies are rolled instead
ROUNDS = 3
LARGEST_ERROR = 6e-3
"""Largest error over the result's norm: three roundings to bfloat16 are 1.7e-3 each."""


@dataclasses.dataclass(frozen=True)
class Rotation:
    """One program, called with each of several weights; the profiler asks what can be lowered."""

    program: jax.stages.Compiled

    def __call__(self, given: Any, weights: list[Any]) -> list[jax.Array]:
        """A product with each."""
        return [self.program(given, weight) for weight in weights]

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Never called."""
        raise NotImplementedError

    trace = lower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One of a layer's."""

    K: int
    N: int
    norm: bool = False
    swiglu: bool = False
    swiglu_input: bool = False
    residual: bool = False

    def call(self, given: dict[str, jax.Array], weight: Any) -> FewRowsCall:
        """Describes the call on these arrays."""
        norm = RmsNorm(scale=given["scale"], epsilon=1e-5) if self.norm else None
        return FewRowsCall(
            x=given["x"],
            weight=weight,
            norm=norm,
            swiglu=self.swiglu,
            swiglu_input=self.swiglu_input,
            residual=given.get("residual"),
        )


def products(layer: str, *, is_quantized: bool, is_fused: bool) -> dict[str, Product]:
    """A layer's four, by name; gates of a quantized weight are the next one's."""
    D, heads, F = LAYERS[layer]
    return {
        "qkv": Product(K=D, N=heads, norm=is_fused),
        "out": Product(K=D, N=D, residual=True),
        "gate and up": Product(K=D, N=2 * F, norm=is_fused, swiglu=not is_quantized),
        "down": Product(K=F, N=D, residual=True, swiglu_input=is_quantized and is_fused),
    }


def worth_timing(s: ProductShape, *, is_fused: bool) -> list[KernelConfig]:
    """Tiles by which almost every SM has a block, and not many more than one."""
    if s.bits < 16:
        found = [
            c
            for c in quantized_configs(s)
            if LEAST_BLOCKS <= s.N // (WIDTH * c.tiles) * c.split <= MOST_BLOCKS and c.split <= 2
        ]
        return [*sorted(found, key=lambda c: abs(c.groups - 2))[:8]]
    if is_fused:
        found = [c for c in fused_configs(s) if LEAST_BLOCKS <= c.num_blocks(s) <= MOST_BLOCKS]
        return list(dict.fromkeys([*found, *filter(None, [default_fused(s)])]))
    every = [
        SkinnyConfig(tile_n=tile_n, depth=depth, splits=splits, transposed=transposed)
        for tile_n in (64, 128, 256)
        for depth in (SKINNY_DEPTHS if s.M <= WIDTH else SKINNY_DEPTHS[:1])
        for splits in SPLITS
        for transposed in ((False, True) if s.M > WIDTH else (False,))
        if s.N // tile_n * splits <= MOST_BLOCKS
    ]
    every = [c for c in every if c.unsupported(s) is None]
    return list(dict.fromkeys([*every, *filter(None, [default_skinny(s)])]))


class Case:
    """A product at a number of rows, and its programs, which compile side by side."""

    def __init__(self, name: str, product: Product, form: str, M: int, pool, *, is_fused: bool):
        self.name, self.product, self.M, self.form = name, product, M, WEIGHTS[form]
        self.is_fused, self.other = is_fused, "apart" if is_fused else "xla"
        self.count = max(2, 1 + BEYOND_CACHE // self.num_bytes)
        if self.form is None:
            self.count = min(self.count, MOST_WEIGHTS)
        given, weight = jax.eval_shape(self.given), jax.eval_shape(self.one, jax.random.key(0))
        self.call = product.call(given, weight)
        self.programs = {
            key: pool.submit(lambda f=f: jax.jit(f).lower(given, weight).compile())
            for key, f in self.variants().items()
        }
        self.draw = pool.submit(lambda: jax.jit(self.drawn).lower().compile())
        self.true = pool.submit(lambda: jax.jit(self.exact).lower(given, weight).compile())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight's elements, without scales."""
        bits = 16 if self.form is None else self.form.code.bits
        return self.product.K * self.product.N * bits // 8

    def variants(self) -> dict[Any, Callable]:
        """Functions to time: the kernel by each tile config, and its competitor."""
        p = self.product

        def other(given, weight) -> jax.Array:
            call = p.call(given, weight)
            how = "auto" if self.is_fused else "xla"
            product = few_rows_matmul(
                multiplied(call), weight, swiglu=call.swiglu, implementation=how
            )
            return product if call.residual is None else call.residual + product

        def by(config: KernelConfig, given, weight) -> jax.Array:
            call = p.call(given, weight)
            if self.is_fused:
                assert not isinstance(config, SkinnyConfig), "worth_timing"
                return fused_hopper(call, config)
            assert not isinstance(config, FusedConfig), "worth_timing"
            product = product_hopper(
                call.x, weight, config, out_dtype=call.x.dtype, swiglu=call.swiglu
            )
            return product if call.residual is None else call.residual + product

        tiles = worth_timing(self.call.shape, is_fused=self.is_fused)
        return {self.other: other} | {c: lambda *given, c=c: by(c, *given) for c in tiles}

    def given(self) -> dict[str, jax.Array]:
        """Random rows, and what belongs to them."""
        p, keys = self.product, jax.random.split(jax.random.key(9), 3)
        width = 2 * p.K if p.swiglu_input else p.K
        arrays = {"x": jax.random.normal(keys[0], (self.M, width), BF16)}
        if p.norm:
            arrays["scale"] = 1 + 0.1 * jax.random.normal(keys[1], (p.K,), BF16)
        if p.residual:
            arrays["residual"] = jax.random.normal(keys[2], (self.M, p.N), BF16)
        return arrays

    def one(self, key: jax.Array) -> Any:
        """A random weight."""
        p = self.product
        if self.form is None:
            return 0.02 * jax.random.normal(key, (p.K, p.N), BF16)
        drawn = 0.02 * jax.random.normal(key, (p.K, p.N), jnp.float32)
        return arranged(round_weight(drawn, self.form, scale_dtype=BF16))

    def drawn(self) -> tuple[dict[str, jax.Array], list[Any]]:
        """Rows, and weights."""
        keys = jax.random.split(jax.random.key(0), self.count)
        if self.form is None:
            return self.given(), [self.one(key) for key in keys]
        first = self.one(keys[0])
        return self.given(), [
            dataclasses.replace(first, data=jnp.roll(first.data, i, axis=0))
            for i in range(self.count)
        ]

    def exact(self, given: dict[str, jax.Array], weight: Any) -> jax.Array:
        """The formula in fp32."""
        if self.form is not None:
            weight = weight.dequantize(jnp.float32)
        wide, weight = jax.tree.map(lambda x: x.astype(jnp.float32), (given, weight))
        call = self.product.call(wide, weight)
        with jax.default_matmul_precision("highest"):
            return few_rows_matmul(
                call.x, weight, norm=call.norm, swiglu=call.swiglu, residual=call.residual,
                swiglu_input=call.swiglu_input, implementation="xla",
            )  # fmt: skip

    def measure(self, table: Table, copy: float) -> dict[Any, float]:
        """Times all variants, interleaved; returns microseconds of the correct ones."""
        given, weights = self.draw.result()()
        want = self.true.result()(given, weights[0])
        programs, errors, failures = {}, {}, {}
        for key, each in self.programs.items():
            try:
                programs[key] = each.result()
                got = programs[key](given, weights[0]).astype(jnp.float32)
                errors[key] = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
                # Not a number is no rounding either.
                assert errors[key] < LARGEST_ERROR, f"the error is {errors[key]}"
            except Exception as error:  # one variant's failure must not end the table
                failures[key] = repr(error)[:300]
        times: dict[Any, list[float]] = {key: [] for key in programs if key not in failures}
        for _ in range(ROUNDS):
            for key in times:
                times[key].append(taken_us(Rotation(programs[key]), given, weights))
        for key in self.programs:
            row: dict[str, Any] = {"failed": failures.get(key)}
            if key in times:
                us = statistics.median(times[key])
                row = {"us": round(us, 2), "turns_us": [round(t, 2) for t in times[key]]}
                row["of_copy"] = round(1e6 * self.num_bytes / us / copy, 3)
                row["error"] = round(errors[key], 5)
            table.add(f"{self.name}, {self.M} rows: {key}", lambda row=row: row)
        return {key: statistics.median(turns) for key, turns in times.items()}

    def row(self, key: Any, us: float) -> tables.Row:
        """Makes the row of the tuned table."""
        choice: dict[str, tables.Value] = {"implementation": key}
        if isinstance(key, FusedConfig | SkinnyConfig | QuantizedConfig):
            choice = {"implementation": "fused" if self.is_fused else "hopper"}
            choice |= dataclasses.asdict(key)
        return tables.Row.of(case=case_of(self.call, self.is_fused), choice=choice, ms=us / 1e3)


def case_of(call: FewRowsCall, is_fused: bool) -> dict[str, tables.Value]:
    """The tuned table's case of a whole call, or of the product alone."""
    s = call.shape
    weight = weight_name(call) if is_fused else f"{s.bits} bits"
    fused = call.fused if is_fused else "swiglu" * s.swiglu
    return {"weight": weight, "rows": s.M, "depth": s.K, "columns": s.N, "fused": fused}


def taken_us(rotation: Rotation, given: Any, weights: list[Any]) -> float:
    """Kernel time of a call."""
    _, launches = profiler.measure(rotation, aggregate=False, iterations=2)(given, weights)
    assert launches is not None, "the product launched no kernel"
    sums = [sum(taken for _, taken in each) for each in launches]
    return 1e3 * statistics.median(sums) / len(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tables", type=pathlib.Path, help="folder whose table takes the times")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds in all")
    parser.add_argument("--layers", nargs="+", default=["8b", "1b"], choices=[*LAYERS])
    parser.add_argument("--weights", nargs="+", default=[*WEIGHTS], choices=[*WEIGHTS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        cases = [
            Case(f"{layer} {form} {name}", product, form, rows, pool, is_fused=is_fused)
            for layer in args.layers
            for form in args.weights
            for rows in args.rows
            for is_fused in ((True, False) if rows <= MOST_RESIDENT else (False,))
            for name, product in products(
                layer, is_quantized=form != "bf16", is_fused=is_fused
            ).items()
        ]
        # Compilers try kernels on the GPU: nothing is timed before they are done.
        programs = [p for case in cases for p in (*case.programs.values(), case.draw, case.true)]
        concurrent.futures.wait(programs)
    print(f"compiled {time.monotonic() - begun:.1f} s", flush=True)
    copy = copied()
    table.add("copy", lambda: {"gb_s": round(copy / 1e9, 1)})
    rows: list[tables.Row] = []
    for case in cases:
        if time.monotonic() > table.deadline:
            print(f"{case.name}: out of time")
            continue
        times = case.measure(table, copy)
        by_tiles = {key: us for key, us in times.items() if key != case.other}
        best = min(by_tiles, key=lambda key: by_tiles[key], default=None)
        other = times.get(case.other, math.nan)
        found = by_tiles.get(best, math.nan)
        print(f"{case.name}: {case.other} {other:.2f}, {found:.2f} by {best}", flush=True)
        rows += [case.row(key, us) for key, us in times.items()]
    if args.tables is not None:
        # Tiles of a case that were timed before, and are not now, were of another kernel.
        timed = {row.case for row in rows}
        add_rows(args.tables, rows, op="few_rows_matmul", question=QUESTION, without=timed)


if __name__ == "__main__":
    main()
