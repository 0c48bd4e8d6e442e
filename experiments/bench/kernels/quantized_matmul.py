r"""Products with weights in few bits: the kernel, by tiles, beside XLA's, cuBLAS's in bfloat16.

python -m experiments.bench.kernels.quantized_matmul --torch \
    --out experiments/results/quantized-matmul-h200.json

Times are medians of CUPTI kernel times, candidates in turns; calls rotate through a gigabyte of
weights, so that L2 holds none. "gb_s" counts the bytes of codes (of bf16's weight: its own).
"of_bf16" is the time of XLA's product in bfloat16 over this one. Errors are relative to the product
with the dequantized weight in fp32. "xla" multiplies the same weight without the kernel. Where a
format rounds inputs the one candidate is "hopper", which rounds them, too, by the default tiles.
With --tiles certain ones, with --sweep many; with --tables the fastest go into the tables of a
folder; with --torch PyTorch's tinygemm, by events around a CUDA graph of as many calls. Scales are
bf16.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
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

from experiments.bench.serving.decode import copied
from experiments.bench.table import Table
from experiments.bench.tuned_table import add_rows
from pallas_kernels import quantized_matmul
from pallas_kernels.common import tables
from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.quantized_matmul import (
    Activations,
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    arranged,
    round_weight,
)
from pallas_kernels.quantized_matmul.api import QuantizedImplementation
from pallas_kernels.quantized_matmul.choice import OP, QUESTION
from pallas_kernels.quantized_matmul.config import (
    MOST_ROWS,
    MOST_ROWS_AT_A_TIME,
    WIDTH,
    ProductShape,
    QuantizedConfig,
    config_for,
    configs,
)
from pallas_kernels.quantized_matmul.hopper import quantized_matmul_hopper

SHAPES = {  # K, N
    "up": (4096, 14_336),
    "down": (14_336, 4096),
    "gate and up": (4096, 28_672),
    "qkv": (4096, 6144),
    "out": (4096, 4096),
}
FORMATS = {
    "int4": WeightFormat(code=WeightCode.INT4, group_rows=128),
    "int4 g64": WeightFormat(code=WeightCode.INT4, group_rows=64),
    "int8": WeightFormat(code=WeightCode.INT8),
    "fp8": WeightFormat(code=WeightCode.E4M3),
    "fp8 blocks": WeightFormat(code=WeightCode.E4M3, group_rows=128, group_columns=128),
    "w8a8 fp8": WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3),
    "w8a8 int8": WeightFormat(code=WeightCode.INT8, activations=Activations.INT8),
}
ROWS = (1, 16, 64, 4096)
BEYOND_CACHE = 2**30
BF16 = jnp.dtype(jnp.bfloat16)
ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Rotation:
    """One program, called with each of several weights; the profiler asks what can be lowered."""

    program: jax.stages.Compiled

    def __call__(self, x: jax.Array, weights: list[Any]) -> list[jax.Array]:
        """A product with each."""
        return [self.program(x, weight) for weight in weights]

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Never called."""
        raise NotImplementedError

    trace = lower


class Case:
    """A format and a shape at a number of rows; its programs compile side by side."""

    def __init__(
        self, name: str, form: str, M: int, pool, *, sweep: bool, tiles: list[QuantizedConfig]
    ):
        self.name, self.M, self.form = name, M, FORMATS[form]
        self.K, self.N = SHAPES[name]
        self.title = f"{form} {name}, {M} rows"
        self.rounds_inputs = self.form.activations is not None
        self.x = jax.ShapeDtypeStruct((M, self.K), BF16)
        self.weight = jax.eval_shape(self.one, jax.random.key(0))
        self.candidates = self.configs(sweep=sweep, tiles=tiles)
        # Codes lie as the kernel reads them: XLA would take them apart before it multiplies.
        whose: QuantizedImplementation = "hopper" if self.rounds_inputs else "xla"
        calls: dict[Any, Callable] = {
            whose: functools.partial(quantized_matmul, implementation=whose)
        }
        for config in self.candidates:
            calls[config] = functools.partial(
                quantized_matmul_hopper, out_dtype=BF16, config=config
            )
        self.programs = {
            key: pool.submit(lambda f=f: jax.jit(f).lower(self.x, self.weight).compile())
            for key, f in calls.items()
        }
        plain = jax.ShapeDtypeStruct((self.K, self.N), BF16)
        self.programs["bf16"] = pool.submit(lambda: jax.jit(jnp.dot).lower(self.x, plain).compile())

    @property
    def num_bytes(self) -> int:
        """Of codes."""
        return self.K * self.N * self.form.code.bits // 8

    def one(self, key: jax.Array) -> QuantizedWeight:
        """A random weight."""
        drawn = 0.02 * jax.random.normal(key, (self.K, self.N), jnp.float32)
        return arranged(round_weight(drawn, self.form, scale_dtype=BF16))

    def configs(self, *, sweep: bool, tiles: list[QuantizedConfig]) -> list[QuantizedConfig]:
        """The tiles asked for that fit, the default ones, or all that give blocks equal work."""
        shape = ProductShape.of(self.M, self.weight)
        if self.rounds_inputs or self.M > MOST_ROWS:
            return []
        chosen = config_for(shape)
        if tiles:
            return [config for config in tiles if config.unsupported(shape) is None]
        if not sweep:
            return [chosen] if chosen else []
        parts = -(-self.M // MOST_ROWS_AT_A_TIME)

        def waves(config: QuantizedConfig) -> float:
            blocks = self.N // (WIDTH * config.tiles) * config.split * parts
            return math.ceil(blocks / NUM_PROCESSORS) * config.tiles / config.split

        return sorted(configs(shape), key=lambda c: (waves(c), abs(c.groups - 2)))[:24]

    def measure(self, table: Table, *, torch: Any) -> list[tables.Row]:
        """Rows of the table, and those of the kernel's."""
        x = jax.random.normal(jax.random.key(9), self.x.shape, BF16)
        first = jax.jit(self.one)(jax.random.key(0))
        count = 1 + -(-BEYOND_CACHE // self.num_bytes)
        few = [first] + [
            dataclasses.replace(first, data=_other_codes(first.data, i)) for i in range(1, count)
        ]
        plain_count = 1 + -(-BEYOND_CACHE // (2 * self.K * self.N))
        plain = [
            0.02 * jax.random.normal(key, (self.K, self.N), BF16)
            for key in jax.random.split(jax.random.key(1), plain_count)
        ]
        programs = {key: program.result() for key, program in self.programs.items()}
        times: dict[Any, list[float]] = {key: [] for key in programs}
        for _ in range(ROUNDS):
            for key, program in programs.items():
                weights = plain if key == "bf16" else few
                times[key].append(taken_us(Rotation(program), x, weights))
        bf16_us = statistics.median(times["bf16"])
        wide = jnp.float32, "highest"
        want = jnp.dot(x.astype(wide[0]), first.dequantize(wide[0]), precision=wide[1])
        for key, each in times.items():
            us = statistics.median(each)
            num_bytes = 2 * self.K * self.N if key == "bf16" else self.num_bytes
            row = {
                "us": round(us, 2),
                "turns_us": [round(t, 2) for t in each],
                "gb_s": round(num_bytes / us / 1e3),
                "tflop_s": round(2e-6 * self.M * self.K * self.N / us, 1),
                "of_bf16": round(bf16_us / us, 3),
            }
            if key != "bf16":
                got = programs[key](x, first).astype(jnp.float32)
                row["error"] = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
            table.add(f"{self.title}: {key}", lambda row=row: row)
        if torch is not None and self.form == FORMATS["int4"] and self.M <= MOST_ROWS:
            table.add(
                f"{self.title}: tinygemm",
                lambda: torch.tinygemm(self.M, self.K, self.N, BEYOND_CACHE),
            )
        return [
            self.row(key, statistics.median(each))
            for key, each in times.items()
            if isinstance(key, QuantizedConfig) and not key.quads
        ]

    def row(self, config: QuantizedConfig, us: float) -> tables.Row:
        """As the tables have it."""
        case: dict[str, tables.Value] = {
            "rows": self.M, "depth": self.K, "columns": self.N, "bits": self.form.code.bits,
        }  # fmt: skip
        choice: dict[str, tables.Value] = {
            "tiles": config.tiles, "split": config.split, "groups": config.groups,
            "stages": config.stages,
        }  # fmt: skip
        return tables.Row.of(case=case, choice=choice, ms=round(us / 1e3, 5))


def taken_us(rotation: Rotation, x: jax.Array, weights: list[Any]) -> float:
    """Kernel time of a call."""
    _, launches = profiler.measure(rotation, aggregate=False, iterations=2)(x, weights)
    assert launches is not None, "the product launched no kernel"
    sums = [sum(taken for _, taken in each) for each in launches]
    return 1e3 * statistics.median(sums) / len(weights)


@functools.partial(jax.jit, static_argnames="number")
def _other_codes(data: jax.Array, number: int) -> jax.Array:
    """Other codes of a weight, finite where they are of FP8."""
    return jnp.roll(data, number, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tables", type=pathlib.Path, help="folder whose table takes the times")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--shapes", nargs="+", default=["up", "down"], choices=[*SHAPES])
    parser.add_argument("--formats", nargs="+", default=["int4"], choices=[*FORMATS])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument(
        "--tiles",
        nargs="+",
        default=[],
        help="such as 7.4.2.6 or 7.4.2.6.1: as QuantizedConfig has its fields",
    )
    parser.add_argument("--sweep", action="store_true", help="other tiles, too")
    parser.add_argument("--torch", action="store_true", help="PyTorch's tinygemm, too")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    torch = None
    if args.torch:
        torch = importlib.import_module("experiments.bench.kernels.quantized_matmul_torch")
    tiles = [config_of(each) for each in args.tiles]
    found = []
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        cases = [
            Case(name, form, rows, pool, sweep=args.sweep, tiles=tiles)
            for form in args.formats
            for name in args.shapes
            for rows in args.rows
        ]
        concurrent.futures.wait([p for case in cases for p in case.programs.values()])
    copy = copied()
    table.add("copy", lambda: {"gb_s": round(copy / 1e9, 1)})
    for case in cases:
        if time.monotonic() < table.deadline:
            found += case.measure(table, torch=torch)
        if args.tables is not None:
            keep(args.tables, found)


def config_of(text: str) -> QuantizedConfig:
    """Of what --tiles has."""
    tiles, split, groups, stages, *quads = map(int, text.split("."))
    return QuantizedConfig(
        tiles=tiles, split=split, groups=groups, stages=stages, quads=bool(sum(quads))
    )


def keep(folder: pathlib.Path, rows: list[tables.Row]) -> None:
    """Writes the table, of each case the two fastest tiles; its other cases as they were."""
    best: dict[tuple, list[tables.Row]] = {}
    for row in sorted(rows, key=lambda row: row.ms):
        best.setdefault(row.case, []).append(row)
    fastest = [row for each in best.values() for row in each[:2]]
    add_rows(folder, fastest, op=OP, question=QUESTION, without=best)


if __name__ == "__main__":
    main()
