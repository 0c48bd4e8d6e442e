"""Norms, products and residual sums of a few rows: one kernel, by tiles, beside several.

python -m experiments.bench.kernels.fused_matmul --out experiments/results/fused-matmul-h200.json

First every variant is held to the formula in fp32; one that is farther from it than rounding can
explain fails, and its time is in no table. Times are medians of CUPTI kernel time; calls rotate
through as many weights as keep L2 from holding one. "apart" is a norm, the product by whom its op
chooses, and a sum; what launching each of them costs is not in it. "of_copy" is the weight's bytes
over those of a copy in the same process. With --tables the times go into the tables of a folder,
which "auto" follows: one of 16-bit weights, one of weights in few bits.
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

from experiments.bench.kernels.few_bit_tiles import worth_timing
from experiments.bench.kernels.quantized_matmul import FORMATS, Rotation, taken_us
from experiments.bench.serving.decode import copied
from experiments.bench.table import Table
from experiments.bench.tuned_table import add_rows
from pallas_kernels import fused_matmul
from pallas_kernels.common import tables
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.fused_matmul import quantized
from pallas_kernels.fused_matmul.choice import OP, case_of, question_of
from pallas_kernels.fused_matmul.config import FusedConfig, config_for, configs
from pallas_kernels.fused_matmul.hopper import fused_matmul_hopper
from pallas_kernels.fused_matmul.reference import FusedCall, fused_matmul_reference
from pallas_kernels.quantized_matmul import QuantizedWeight, arranged, round_weight
from pallas_kernels.quantized_matmul.choice import choice_of
from pallas_kernels.quantized_matmul.config import ProductShape, QuantizedConfig
from pallas_kernels.quantized_matmul.sliced_config import SlicedConfig

BF16 = jnp.dtype(jnp.bfloat16)
LAYERS = {  # model width, q and kv heads' width, hidden width
    "8b": (4096, 6144, 14_336),
    "1b": (2048, 3072, 8192),
}
WEIGHTS = {"bf16": None} | {name: FORMATS[name] for name in ("int4", "fp8", "int8")}
LEAST_BLOCKS, MOST_BLOCKS = 90, 600
BEYOND_CACHE = 160 * 2**20
MOST_WEIGHTS = 8  # drawn by themselves; codes of one in few bits are rolled
ROUNDS = 3
LARGEST_ERROR = 6e-3
"""Of the result's norm: three roundings to bfloat16 are 1.7e-3 each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One of a layer's."""

    K: int
    N: int
    norm: bool = False
    swiglu: bool = False
    swiglu_input: bool = False
    residual: bool = False

    def call(self, given: dict[str, jax.Array], weight: Any) -> FusedCall:
        """Of these arrays."""
        norm = RmsNorm(scale=given["scale"], epsilon=1e-5) if self.norm else None
        return FusedCall(
            x=given["x"],
            weight=weight,
            norm=norm,
            swiglu=self.swiglu,
            swiglu_input=self.swiglu_input,
            residual=given.get("residual"),
        )


def products(layer: str, *, in_few_bits: bool) -> dict[str, Product]:
    """A layer's four, by name; gates of a weight in few bits are the next one's."""
    D, heads, F = LAYERS[layer]
    return {
        "qkv": Product(K=D, N=heads, norm=True),
        "out": Product(K=D, N=D, residual=True),
        "gate and up": Product(K=D, N=2 * F, norm=True, swiglu=not in_few_bits),
        "down": Product(K=F, N=D, residual=True, swiglu_input=in_few_bits),
    }


class Case:
    """A product at a number of rows, and its programs, which compile side by side."""

    def __init__(self, name: str, product: Product, form: str, M: int, pool):
        self.name, self.product, self.M, self.form = name, product, M, WEIGHTS[form]
        self.count = max(2, 1 + BEYOND_CACHE // self.num_bytes)
        if self.form is None:
            self.count = min(self.count, MOST_WEIGHTS)
        given = jax.eval_shape(self.given)
        weight = jax.eval_shape(self.one, jax.random.key(0))
        self.candidates = self.variants(weight)
        self.programs = {
            key: pool.submit(lambda f=f: jax.jit(f).lower(given, weight).compile())
            for key, f in self.candidates.items()
        }
        self.draw = pool.submit(lambda: jax.jit(self.drawn).lower().compile())
        self.true = pool.submit(lambda: jax.jit(self.exact).lower(given, weight).compile())

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        bits = 16 if self.form is None else self.form.code.bits
        return self.product.K * self.product.N * bits // 8

    def variants(self, weight: Any) -> dict[Any, Callable]:
        """By "apart", or tiles."""
        p = self.product

        def apart(given, weight) -> jax.Array:
            call = p.call(given, weight)
            return fused_matmul(
                call.x, weight, norm=call.norm, swiglu=call.swiglu, residual=call.residual,
                swiglu_input=call.swiglu_input, implementation="apart",
            )  # fmt: skip

        found: dict[Any, Callable] = {"apart": apart}
        if isinstance(weight, QuantizedWeight):
            for tiles in worth_timing(ProductShape.of(self.M, weight)):
                found[tiles] = lambda given, weight, tiles=tiles: quantized.fused(
                    p.call(given, weight), config=tiles
                )
            return found
        every = configs(p.N, p.K, swiglu=p.swiglu)
        chosen = [c for c in every if LEAST_BLOCKS <= c.num_blocks(p.N) <= MOST_BLOCKS]
        chosen += [config_for(p.N, p.K, swiglu=p.swiglu)]
        for config in dict.fromkeys(chosen):
            found[config] = lambda given, weight, config=config: fused_matmul_hopper(
                p.call(given, weight), config=config
            )
        return found

    @property
    def call(self) -> FusedCall:
        """Of shapes."""
        weight = jax.eval_shape(self.one, jax.random.key(0))
        return self.product.call(jax.eval_shape(self.given), weight)

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
        with jax.default_matmul_precision("highest"):
            return fused_matmul_reference(self.product.call(wide, weight))

    def measure(self, table: Table, copy: float) -> dict[Any, float]:
        """Rows of all variants, which take turns; microseconds of those that are right."""
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
        """As the tables have it."""
        choice: dict[str, tables.Value] = {"implementation": "apart"}
        if isinstance(key, FusedConfig):
            choice = {"implementation": "hopper", "tiles": key.tiles, "split": key.split}
        if isinstance(key, QuantizedConfig | SlicedConfig):
            choice = {"implementation": "hopper", **choice_of(key)}
        return tables.Row.of(case=case_of(self.call), choice=choice, ms=us / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tables", type=pathlib.Path, help="folder whose table takes the times")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds in all")
    parser.add_argument("--layers", nargs="+", default=[*LAYERS], choices=[*LAYERS])
    parser.add_argument("--weights", nargs="+", default=[*WEIGHTS], choices=[*WEIGHTS])
    parser.add_argument("--rows", type=int, default=1, help="1 to 8")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    begun = time.monotonic()
    found: dict[str, list[tables.Row]] = {}
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        cases = [
            Case(f"{layer} {form} {name}", product, form, args.rows, pool)
            for layer in args.layers
            for form in args.weights
            for name, product in products(layer, in_few_bits=form != "bf16").items()
        ]
        # Compilers try kernels on the GPU: nothing is timed before they are done.
        programs = [p for case in cases for p in (*case.programs.values(), case.draw, case.true)]
        concurrent.futures.wait(programs)
    print(f"compiled {time.monotonic() - begun:.1f} s", flush=True)
    copy = copied()
    table.add("copy", lambda: {"gb_s": round(copy / 1e9, 1)})
    summary = []
    for case in cases:
        if time.monotonic() > table.deadline:
            summary.append(f"{case.name}: out of time")
            continue
        times = case.measure(table, copy)
        fused = {key: us for key, us in times.items() if key != "apart"}
        best = min(fused, key=lambda key: fused[key], default=None)
        apart = times.get("apart", math.nan)
        summary.append(
            f"{case.name}: apart {apart:.2f}, fused {fused.get(best, math.nan):.2f}, {best}"
        )
        rows = found.setdefault(question_of(case.call), [])
        rows += [case.row(key, us) for key, us in times.items()]
    if args.tables is not None:
        for question, rows in found.items():
            # Tiles of a case that were timed before, and are not now, were of another kernel.
            timed = {row.case for row in rows}
            add_rows(args.tables, rows, op=OP, question=question, without=timed)
    print(*summary, sep="\n")


if __name__ == "__main__":
    main()
