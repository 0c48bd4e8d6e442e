"""Softmaxes and norms at rows of random lengths, beside XLA and a copy.

python -m experiments.bench.kernels.memory_random --compile /tmp/rows --processes 16
python -m experiments.bench.kernels.memory_random --programs /tmp/rows --out random.json
python -m experiments.bench.kernels.memory_random --summary random.json

Lengths of 1,000 to 262,144 columns, half of them any number, a quarter multiples of 64 and a
quarter of 2,048; arrays of 16 to 512 MiB in bf16. Each shape is measured with some of the ops; rows
are named as those of ``memory_bound``, so that ``memory_table`` reads both. Values are held to
float64 by the tests, at lengths of each kind, and not here.
"""

import argparse
import functools
import itertools
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.kernels import stored_programs
from experiments.bench.kernels.memory_bound import as_words, rate
from experiments.bench.kernels.memory_cases import OPS
from experiments.bench.table import Table
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.dispatch import RowWorkload

SHORTEST, LONGEST = 1_000, 262_144
SMALLEST, LARGEST = 16 * 2**20, 512 * 2**20  # bytes of an array
MEASURED = (
    "softmax", "softmax_gradient", "rms_norm", "rms_norm_gradient", "layer_norm",
    "layer_norm_gradient", "log_softmax", "log_softmax_gradient",
)  # fmt: skip
TARGET = 0.85


def drawn(count: int, seed: int) -> list[tuple[RowWorkload, list[str]]]:
    """Shapes and their ops; all ops come equally often."""
    rng = np.random.default_rng(seed)
    ops = itertools.cycle(MEASURED)
    found = []
    for _ in range(count):
        columns = int(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        step = int(rng.choice((1, 64, 2048), p=(0.5, 0.25, 0.25)))
        columns = max(columns // step * step, step, SHORTEST if step == 1 else step)
        size = math.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST)))
        rows = max(8, round(size / 2 / columns / 8) * 8)
        found.append((RowWorkload(rows=rows, columns=columns), [next(ops), next(ops)]))
    return found


def operands(name: str, workload: RowWorkload) -> list[jax.ShapeDtypeStruct]:
    """Shapes of an op's arguments."""
    whole = jax.ShapeDtypeStruct((workload.rows, workload.columns), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((workload.columns,), jnp.float32)
    return [vector if letter in "sb" else whole for letter in OPS[name].letters]


def program(name: str, form: str, workload: RowWorkload) -> jax.stages.Compiled:
    """Compiled, or an error that the table records."""
    f = OPS[name].kernel if form == "hopper" else OPS[name].xla
    return jax.jit(f).lower(*operands(name, workload)).compile()


def given(name: str, workload: RowWorkload, pool: jax.Array) -> list[jax.Array]:
    """Arguments, parts of random numbers."""
    arrays = []
    for i, each in enumerate(operands(name, workload)):
        if each.ndim == 1:
            arrays.append(jnp.linspace(0.5, 1.5, each.size, dtype=jnp.float32))
        else:
            start = 4096 * i  # arguments overlap, and differ
            arrays.append(pool[start : start + each.size].reshape(each.shape))
    return arrays


def makers(workload: RowWorkload, names: list[str]) -> dict:
    """What compiles a shape's programs, by op and form."""
    return {
        (name, form): functools.partial(program, name, form, workload)
        for name in names
        for form in ("hopper", "xla")
    }


def measure(table: Table, shapes: list[tuple[RowWorkload, list[str]]], folder: pathlib.Path | None):
    """Times shape after shape; everything is compiled before."""
    programs = {
        workload: stored_programs.compile_each(makers(workload, names))
        if folder is None
        else stored_programs.fetch(folder / f"{workload.name}.pickle")
        for workload, names in shapes
        if folder is None or (folder / f"{workload.name}.pickle").exists()
    }
    pool = jax.random.normal(jax.random.key(0), (LARGEST // 2 + 2**21,), jnp.bfloat16)
    for workload, names in shapes:
        if workload not in programs:
            continue
        elements = workload.rows * workload.columns
        words = as_words(pool[:elements].reshape(workload.rows, workload.columns))
        copy = functools.partial(rate, lambda x: x + 1, [words], 4 * elements, None)
        copied = table.add(f"copy {workload.name}", copy).get("gb_s")
        for name in names:
            args = given(name, workload, pool)
            num_bytes = 2 * OPS[name].num_arrays * elements
            for form in ("hopper", "xla"):
                f = programs[workload][name, form]
                table.add(
                    f"{name} {workload.name} {form}",
                    functools.partial(_rate, f, args, num_bytes, copied),
                )


def _rate(f, args, num_bytes: int, copy: float | None) -> dict:
    return {"failed": f} if isinstance(f, str) else rate(f, args, num_bytes, copy)


def summary(rows: list[dict]) -> dict:
    """Shares of a copy of what "auto" takes where its tables have these rows."""
    times = {row["name"]: row["ms"] for row in rows if "ms" in row}
    shares = {row["name"]: row["of_copy"] for row in rows if "of_copy" in row}
    found: dict[str, dict] = {}
    for name in times:
        case, _, form = name.rpartition(" ")
        if form != "xla":
            continue
        kernel = times.get(f"{case} hopper", math.inf)
        form = "hopper" if times[name] >= dispatch.LEAST_GAIN * kernel else "xla"
        found[case] = {"auto": form, "of_copy": shares[f"{case} {form}"], "xla": shares[name]}
    taken, plain = ([each[key] for each in found.values()] for key in ("of_copy", "xla"))
    return {
        "cases": found,
        "held": sum(share >= TARGET for share in taken),
        "of": len(taken),
        "mean": round(float(np.exp(np.mean(np.log(taken)))), 4),
        "mean of XLA": round(float(np.exp(np.mean(np.log(plain)))), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th shape, from the i-th")
    parser.add_argument("--compile", type=pathlib.Path, help="only write programs there")
    parser.add_argument("--processes", type=int, default=1, help="that compile")
    parser.add_argument("--programs", type=pathlib.Path, help="load them from there")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--summary", type=pathlib.Path, help="of a file, measuring nothing")
    args = parser.parse_args()
    if args.summary:
        print(json.dumps(summary(json.loads(args.summary.read_text())["rows"]), indent=1))
        return
    i, n = map(int, args.part.split("/"))
    shapes = drawn(args.count, args.seed)[i - 1 :: n]
    if args.compile is None:
        table = Table(out=args.out, deadline=time.monotonic() + args.budget)
        measure(table, shapes, args.programs)
        return
    args.compile.mkdir(parents=True, exist_ok=True)
    if args.processes > 1:
        flags = [f"--seed={args.seed}", f"--count={args.count}", f"--compile={args.compile}"]
        stored_programs.compile_in_processes(
            "experiments.bench.kernels.memory_random", flags, args.processes
        )
        return
    for workload, names in shapes:
        ready = stored_programs.compile_each(makers(workload, names))
        stored_programs.keep(args.compile / f"{workload.name}.pickle", ready)


if __name__ == "__main__":
    main()
