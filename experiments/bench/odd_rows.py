"""Rows that nothing divides: windows of whole vectors beside single columns, and beside a copy.

python -m experiments.bench.odd_rows --out odd-rows.json

"columns" is the form for rows whose vectors divide their length, "windows" the one that is chosen
where vectors divide only all rows together. Each is first held against XLA in fp32 on the first and
the last rows, and windows against columns on all; then they are timed in turns, all of 16 bits.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import time
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.bench.memory_bound import as_words, rate, relative
from experiments.bench.memory_cases import OPS
from experiments.bench.memory_random import given, operands
from experiments.bench.table import Table
from pallas_kernels.rows import apply
from pallas_kernels.rows.choice import config_for
from pallas_kernels.rows.dispatch import RowWorkload

ELEMENTS = 134_217_728
LENGTHS = (1001, 5001, 19999, 50257, 100003, 200001)
MEASURED = ("softmax", "log_softmax", "softmax_gradient", "log_softmax_gradient", "rms_norm",
            "layer_norm")  # fmt: skip
CHECKED = 16  # first and last rows
MOST_ERROR = 0.004  # relative, of results rounded to 8 bits: 2**-9 / sqrt(3) each, some twice


def compiled(name: str, workload: RowWorkload) -> dict[str, jax.stages.Compiled]:
    """An op by both forms, by name."""
    found = {}
    for form in ("columns", "windows"):
        chosen = functools.partial(config_for, windows=form == "windows")
        with mock.patch.object(apply, "config_for", chosen):
            f = jax.jit(lambda *args: OPS[name].kernel(*args))
            found[form] = f.lower(*operands(name, workload))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(found, pool.map(lambda x: x.compile(), found.values()), strict=True))


def check(name: str, programs: dict, args: list[jax.Array]) -> dict:
    """Errors of both forms on some rows, and how far they are apart on all."""
    results = {form: jax.tree.leaves(f(*args))[0] for form, f in programs.items()}
    found = {}
    for part, rows in (("first", slice(0, CHECKED)), ("last", slice(-CHECKED, None))):
        some = [x[rows] if x.ndim == 2 else x for x in args]
        want = jax.tree.leaves(OPS[name].xla(*(x.astype(jnp.float32) for x in some)))[0]
        for form, result in results.items():
            found[f"{form}, {part}"] = float(relative([result[rows]], [want])[0])
    wide = results["columns"].astype(jnp.float32)
    found["apart"] = float(relative([results["windows"]], [wide])[0])
    return found | {"ok": all(error <= MOST_ERROR for error in found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--ops", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds in all")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    pool = jax.random.normal(jax.random.key(0), (ELEMENTS + 2**21,), jnp.bfloat16)
    lines = []
    for columns in args.lengths:
        workload = RowWorkload(rows=ELEMENTS // columns // 8 * 8, columns=columns)
        elements = workload.rows * columns
        words = as_words(pool[:elements].reshape(workload.rows, columns))
        copy = functools.partial(rate, lambda x: x + 1, [words], 4 * elements, None)
        copied = table.add(f"copy {workload.name}", copy).get("gb_s")
        for name in args.ops:
            if time.monotonic() > table.deadline:
                break
            programs, arrays = compiled(name, workload), given(name, workload, pool)
            checked = table.add(
                f"check {name} {workload.name}", functools.partial(check, name, programs, arrays)
            )
            num_bytes = 2 * OPS[name].num_arrays * elements
            shares: dict[str, list[float]] = {"columns": [], "windows": []}
            for turn in ("columns", "windows", "windows", "columns"):
                timed = functools.partial(rate, programs[turn], arrays, num_bytes, copied)
                row = table.add(f"{name} {workload.name} {turn}", timed)
                shares[turn].append(row.get("of_copy", 0.0))
            means = (sum(x) / len(x) for x in shares.values())
            lines.append((name, workload.name, *means, checked.get("ok")))
    print(f"{'op':22}{'rows':16}{'columns':>9}{'windows':>9}  of a copy; correct")
    for name, shape, old, new, ok in lines:
        print(f"{name:22}{shape:16}{old:9.3f}{new:9.3f}  {ok}")


if __name__ == "__main__":
    main()
