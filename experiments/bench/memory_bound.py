"""Softmaxes and norms beside XLA and a copy: errors first, then GB/s of the fewest bytes.

python -m experiments.bench.memory_bound --out experiments/results/memory-bound-h200.json

"check" rows give relative errors against fp32 beside those of XLA's bf16 form. Other rows are CUPTI
kernel times; GB/s counts each input read once and each output written once, and "of_copy" divides
it by the copy of the same process and shape (``as_words``). "plain" rows are what XLA alone
computes and no kernel is written for. What fails, or comes after --budget seconds, is recorded as
such and the table goes on; the file is written after every row.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.memory_cases import OPS, make_inputs
from experiments.bench.memory_plain import PLAIN
from experiments.bench.table import Table
from pallas_kernels.common.hopper_rows_config import Config, Stream, Wide
from pallas_kernels.common.rows import BARS, OTHERS, Workload

CHECKED_ROWS = 1056
BAR_OPS = ("softmax", "rms_norm", "rms_norm_gradient", "softmax_gradient")
VARIANTS: dict[tuple[str, int], dict[str, Config]] = {
    ("softmax", 4096): {"streamed": Stream(num_stages=3)},
    ("softmax_gradient", 4096): {"streamed": Stream(num_stages=3)},
    ("softmax", 32768): {
        "4 slots": Wide(tiles=2, chunks=2, slots=4),
        "5 slots": Wide(tiles=2, chunks=2, slots=5),
        "5 slots, ahead": Wide(tiles=2, chunks=2, slots=5, ahead=True),
        "a row a block": Wide(chunks=4, slots=4, row_a_block=True),
        "a row a block of 2": Wide(warpgroups=2, tiles=2, chunks=4, slots=4, row_a_block=True),
        "a row a block of 2 at once": Wide(warpgroups=2, tiles=8, slots=1, row_a_block=True),
    },
    ("rms_norm", 32768): {
        "4 slots": Wide(tiles=2, chunks=2, slots=4),
        "5 slots": Wide(tiles=2, chunks=2, slots=5),
    },
    ("rms_norm", 131072): {"6 slots": Wide(cluster=4, tiles=2, chunks=2, slots=6, ahead=True)},
    ("rms_norm_gradient", 32768): {
        "not ahead": Wide(cluster=2, tile=256, tiles=2, chunks=2, slots=6),
        "2 warpgroups": Wide(cluster=2, warpgroups=2, tiles=2, chunks=2, slots=6, ahead=True),
        "scale in memory": Wide(cluster=2, chunks=2, slots=5, vector=4, held=False),
    },
    ("rms_norm_gradient", 131072): {
        "not ahead": Wide(cluster=8, tile=256, tiles=2, chunks=2, slots=6),
        "5 slots": Wide(cluster=8, tile=256, tiles=2, chunks=2, slots=5, ahead=True),
        "2 warpgroups": Wide(cluster=8, warpgroups=2, tiles=2, chunks=2, slots=6, ahead=True),
        "2 warpgroups, not ahead": Wide(cluster=8, warpgroups=2, tiles=2, chunks=2, slots=6),
        "scale in memory": Wide(cluster=8, chunks=2, slots=4, vector=4, held=False),
    },
}


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


class Programs:
    """Compiles in the background what will be asked for, in that order."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(12)
        self._compiled: dict[object, concurrent.futures.Future] = {}

    def want(self, key: object, f: Callable, args: list[jax.ShapeDtypeStruct]) -> None:
        """Puts a program into the queue."""
        self._compiled[key] = self._pool.submit(lambda: jax.jit(f).lower(*args).compile())

    def get(self, key: object) -> jax.stages.Compiled:
        """A program, when it is ready."""
        return self._compiled[key].result()

    def stop(self) -> None:
        """Forgets what is still in the queue."""
        self._pool.shutdown(cancel_futures=True)


def check(
    programs: Programs, keys: list[object], args: list[jax.Array], exact: list[jax.Array]
) -> dict:
    """Errors against the fp32 form, beside those of XLA's bf16 form."""
    kernel, xla, wide = (programs.get(key) for key in keys)
    got, plain = jax.tree.leaves(kernel(*args)), jax.tree.leaves(xla(*args))
    want = jax.tree.leaves(wide(*exact))
    errors = [relative(g, w) for g, w in zip(got, want, strict=True)]
    plain_errors = [relative(p, w) for p, w in zip(plain, want, strict=True)]
    # Sums in fp32 of the same numbers: XLA's own may be its oracle to the last bit.
    ok = all(e <= 2 * p + 1e-6 for e, p in zip(errors, plain_errors, strict=True))
    again = jax.tree.leaves(kernel(*args))
    same = all(bool(jnp.array_equal(a, b)) for a, b in zip(got, again, strict=True))
    return {"errors": errors, "xla": plain_errors, "ok": ok, "repeats": same}


def rate(f: Callable, args: list[jax.Array], num_bytes: int, copy: float | None) -> dict:
    _, times = profiler.measure(f, iterations=9)(*args)
    assert times is not None, "the call launched no kernel"
    ms = statistics.median(times)
    row = {"ms": round(ms, 5), "gb_s": round(num_bytes / ms / 1e6, 1)}
    return row | ({"of_copy": round(row["gb_s"] / copy, 4)} if copy else {})


def as_words(x: jax.Array) -> jax.Array:
    """bf16 [R, C] as int32 [R, C / 2]: what XLA copies at the rate of the memory.

    It adds 1 to bf16 at 78% of that.
    """
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.int32)


def forms_of(name: str, columns: int, with_variants: bool) -> dict[str, Callable]:
    op = OPS[name]
    forms = {"hopper": op.kernel, "xla": op.xla}
    for variant, config in VARIANTS.get((name, columns), {}).items() if with_variants else ():
        forms[variant] = functools.partial(op.kernel, config=config)
    return forms


def groups(with_variants: bool) -> Iterator[tuple[Workload, list[str], bool]]:
    """Shapes and ops in order of importance: what comes late may find no time left."""
    others = [name for name in OPS if name not in BAR_OPS]
    for workload in BARS:
        yield workload, list(BAR_OPS), with_variants
    yield BARS[0], others, False
    yield BARS[1], others, False
    for workload in OTHERS:
        yield workload, list(OPS), False
    yield BARS[2], others, False


def widened(x):
    return jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype


def want_all(programs: Programs, with_variants: bool) -> None:
    for workload, names, variants in groups(with_variants):
        checked = Workload(rows=CHECKED_ROWS, columns=workload.columns)
        for name in names:
            letters = OPS[name].letters
            for form, f in forms_of(name, workload.columns, variants).items():
                for shape in (checked, workload):
                    made = jax.eval_shape(make_inputs, shape)
                    args = [made[letter] for letter in letters]
                    programs.want((name, form, shape), f, args)
            made = jax.eval_shape(make_inputs, checked)
            wide = [jax.ShapeDtypeStruct(made[k].shape, widened(made[k])) for k in letters]
            programs.want((name, "fp32", checked), OPS[name].xla, wide)


def measure_group(
    table: Table, programs: Programs, workload: Workload, names: list[str], variants: bool
) -> None:
    """Copy, XLA, kernels and their variants at one shape."""
    elements = workload.rows * workload.columns
    checked = Workload(rows=CHECKED_ROWS, columns=workload.columns)
    few, made = make_inputs(checked), make_inputs(workload)
    words = jax.jit(as_words)(made["x"])
    copied = table.add(
        f"copy {workload.name}", lambda: rate(lambda x: x + 1, [words], 4 * elements, None)
    ).get("gb_s")
    for name in names:
        op = OPS[name]
        args = pick(few, op.letters)
        exact = [x.astype(widened(x)) for x in args]
        for form in forms_of(name, workload.columns, variants):
            if form != "xla":
                keys: list[object] = [(name, f, checked) for f in (form, "xla", "fp32")]
                label = f"check {name} {checked.name}" + f" {form}" * (form != "hopper")
                table.add(label, functools.partial(check, programs, keys, args, exact))

            key = (name, form, workload)
            num_bytes = op.num_bytes * elements
            measure = functools.partial(
                rate_of, functools.partial(programs.get, key),
                functools.partial(pick, made, op.letters), num_bytes, copied,
            )  # fmt: skip
            table.add(f"{name} {workload.name} {form}", measure)


def pick(made: dict[str, jax.Array], letters: str) -> list[jax.Array]:
    return [made[letter] for letter in letters]


def measure_plain(table: Table) -> None:
    copied = None
    for name, (make, f, num_bytes) in PLAIN.items():
        got = table.add(
            f"plain {name}", functools.partial(rate_of, lambda f=f: f, make, num_bytes, copied)
        )
        copied = copied or got.get("gb_s")


def rate_of(get: Callable, make: Callable, num_bytes: int, copy: float | None) -> dict:
    return rate(get(), make(), num_bytes, copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--variants", action="store_true", help="other forms of the kernels too")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    programs = Programs()
    want_all(programs, args.variants)
    for i, group in enumerate(groups(args.variants)):
        measure_group(table, programs, *group)
        if i + 1 == len(BARS):
            measure_plain(table)
    programs.stop()


if __name__ == "__main__":
    main()
