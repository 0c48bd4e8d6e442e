"""Rows that nothing divides: through the copy engine, in windows and in columns, beside a copy.

python -m experiments.bench.kernels.odd_rows --out odd-rows.json

"flat" rows go through the copy engine as they lie between words, "columns" and "windows" through
registers (``rows.odd``). Each form is first held against XLA in fp32, each of its rows alone; then
they are timed in turns, all of 16 bits. A form that does not take a length is left out there.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import pathlib
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.bench.kernels import memory_random
from experiments.bench.kernels.memory_bound import as_words, rate, relative
from experiments.bench.kernels.memory_cases import OPS
from experiments.bench.kernels.memory_random import given, operands
from experiments.bench.table import Table
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.rows import apply, dispatch
from pallas_kernels.rows.choice import OddForm, config_for
from pallas_kernels.rows.dispatch import RowWorkload

ELEMENTS = 134_217_728
LENGTHS = (1001, 5001, 19999, 50257, 100003, 200001)
MEASURED = memory_random.MEASURED
FORMS = ("flat", "columns", "windows")
MOST_ERROR = 2**-7  # relative, of a row of results rounded to 8 bits, some twice
MOST_OF_SUMS = 1e-5  # likewise, of fp32 sums over rows


def compiled(name: str, workload: RowWorkload, forms: list[OddForm]) -> dict[str, Any]:
    """An op by the forms that take it, by name."""
    found = {}
    for form in forms:
        chosen = functools.partial(config_for, form=form)
        with (
            mock.patch.object(apply, "config_for", chosen),
            mock.patch.object(dispatch, "config_for", chosen),
            contextlib.suppress(UnsupportedError),
        ):
            f = jax.jit(lambda *args: OPS[name].kernel(*args))
            found[form] = f.lower(*operands(name, workload))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return dict(zip(found, pool.map(lambda x: x.compile(), found.values()), strict=True))


@functools.partial(jax.jit, static_argnums=0)
def errors(name: str, results: list[jax.Array], args: list[jax.Array]) -> list[jax.Array]:
    """Relative ones: the worst row's of the first result, those of sums over rows."""
    wide = jax.tree.leaves(OPS[name].xla(*(x.astype(jnp.float32) for x in args)))
    of_rows = jnp.linalg.norm(results[0].astype(jnp.float32) - wide[0], axis=-1)
    of_rows = of_rows / jnp.linalg.norm(wide[0], axis=-1)
    worst = jnp.max(jnp.where(jnp.isnan(of_rows), jnp.inf, of_rows))
    return [worst, *relative(results[1:], wide[1:])]


def check(name: str, programs: dict, args: list[jax.Array]) -> dict:
    """Errors of all forms."""
    found = {
        form: [float(x) for x in errors(name, jax.tree.leaves(f(*args)), args)]
        for form, f in programs.items()
    }
    right = [x[0] <= MOST_ERROR and max(x[1:], default=0.0) <= MOST_OF_SUMS for x in found.values()]
    return found | {"ok": all(right)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--ops", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
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
            programs, arrays = compiled(name, workload, args.forms), given(name, workload, pool)
            if not programs:
                continue
            checked = table.add(
                f"check {name} {workload.name}", functools.partial(check, name, programs, arrays)
            )
            num_bytes = 2 * OPS[name].num_arrays * elements
            shares: dict[str, list[float]] = {form: [] for form in programs}
            for turn in (*programs, *reversed(programs)):
                timed = functools.partial(rate, programs[turn], arrays, num_bytes, copied)
                row = table.add(f"{name} {workload.name} {turn}", timed)
                shares[turn].append(row.get("of_copy", 0.0))
            means = {form: sum(x) / len(x) for form, x in shares.items()}
            lines.append((name, workload.name, means, checked.get("ok")))
    print(f"{'op':22}{'rows':16}" + "".join(f"{form:>9}" for form in args.forms) + "  correct")
    for name, shape, means, ok in lines:
        each = "".join(f"{means.get(form, float('nan')):9.3f}" for form in args.forms)
        print(f"{name:22}{shape:16}{each}  {ok}")


if __name__ == "__main__":
    main()
