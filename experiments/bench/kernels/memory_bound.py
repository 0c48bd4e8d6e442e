"""Softmaxes and norms beside XLA and a copy: errors first, then GB/s of the fewest bytes.

python -m experiments.bench.kernels.memory_bound --out experiments/results/memory-bound-h200.json

Rows of other dtypes than bf16 (--dtypes) have theirs in their names; the oracle of fp32 is XLA's
own fp32, which errs by 1e-7.

"check" rows give relative errors against XLA in fp32 beside those of its bf16 form. Other rows are
CUPTI kernel times; GB/s counts each input read once and each output written once, and "of_copy"
divides it by the copy of the same process and shape (``as_words``). "plain" rows are what XLA alone
computes and no kernel is written for. What fails, or comes after --budget seconds, is recorded as
such and the table goes on; the file is written after every row.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.kernels.memory_cases import OPS, make_inputs
from experiments.bench.kernels.memory_plain import PLAIN
from experiments.bench.table import Table
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.config import RowConfig, Stream, Wide
from pallas_kernels.rows.dispatch import BARS, OTHERS, RowWorkload

DTYPES = tuple(jnp.dtype(dtype).name for dtype in dispatch.DTYPES)
BAR_OPS = ("softmax", "rms_norm", "rms_norm_gradient", "softmax_gradient")
_GRADIENTS: dict[str, Wide] = {
    "half": Wide(cluster=2, chunks=2, slots=5, vector=4, in_memory=1),
    "half, ahead": Wide(cluster=2, chunks=2, slots=5, vector=4, in_memory=1, ahead=True),
    "scale in registers": Wide(cluster=2, chunks=2, slots=6),
    "scale in registers, ahead": Wide(cluster=2, chunks=2, slots=6, ahead=True),
}
VARIANTS: dict[tuple[str, int], Mapping[str, RowConfig]] = {
    ("softmax", 32768): {
        "6 slots": Wide(tiles=2, chunks=2, slots=6),
        "a row a block of 2": Wide(warpgroups=2, tiles=2, chunks=4, slots=4, row_a_block=True),
        "5 slots, ahead": Wide(tiles=2, chunks=2, slots=5, ahead=True),
        "4 slots, ahead": Wide(tiles=2, chunks=2, slots=4, ahead=True),
        "5 slots": Wide(tiles=2, chunks=2, slots=5),
        "4 slots": Wide(tiles=2, chunks=2, slots=4),
    },
    ("softmax", 131072): {
        "6 slots": Wide(cluster=2, tiles=2, chunks=4, slots=6),
        "4 blocks, ahead": Wide(cluster=4, tiles=2, chunks=2, slots=6, ahead=True),
        "a row 4 blocks": Wide(cluster=4, chunks=4, slots=4, row_a_block=True),
        "a row 8 blocks": Wide(cluster=8, chunks=2, slots=2, row_a_block=True),
    },
    ("rms_norm", 32768): {"5 slots": Wide(tiles=2, chunks=2, slots=5)},
    ("rms_norm", 131072): {"5 slots": Wide(cluster=4, tiles=2, chunks=2, slots=5, ahead=True)},
    ("rms_norm_gradient", 32768): _GRADIENTS,
    ("rms_norm_gradient", 131072): {
        name: dataclasses.replace(config, cluster=8) for name, config in _GRADIENTS.items()
    },
    ("layer_norm", 32768): {"2 blocks": Wide(cluster=2, tiles=2, slots=6, ahead=True)},
    ("layer_norm", 131072): {"8 blocks": Wide(cluster=8, tiles=2, slots=6, ahead=True)},
    ("layer_norm_gradient", 32768): {
        "4 blocks": Wide(cluster=4, slots=6),
        "4 blocks, tiles of 256": Wide(cluster=4, tile=256, chunks=2, slots=6),
    },
    ("layer_norm+residual_gradient", 32768): {"4 blocks": Wide(cluster=4, slots=4)},
    **{
        (op, 131072): {"8 blocks": Wide(cluster=8, chunks=2, slots=6, ahead=True)}
        for op in ("softmax_gradient", "log_softmax_gradient", "rms_norm+residual")
    },
    ("softmax_gradient", 4096): {"streamed": Stream(num_stages=3)},
}


@jax.jit
def relative(got: list[jax.Array], want: list[jax.Array]) -> list[jax.Array]:
    """Of each array, the norm of the error over the norm."""
    return [
        jnp.linalg.norm(g.astype(jnp.float32) - w) / jnp.linalg.norm(w)
        for g, w in zip(got, want, strict=True)
    ]


@jax.jit
def equal(got: list[jax.Array], again: list[jax.Array]) -> jax.Array:
    """Whether two lists of arrays are equal to the last bit."""
    return jnp.stack([jnp.all(a == b) for a, b in zip(got, again, strict=True)]).all()


type Program = concurrent.futures.Future[jax.stages.Compiled]


def compiled(
    workload: RowWorkload, dtype: str, names: list[str], variants: bool, deadline: float
) -> dict[tuple[str, str], Program]:
    """All programs of a group by op and form, "fp32" XLA's; none is left to compile meanwhile."""
    made = jax.eval_shape(lambda: make_inputs(workload, dtype))
    programs = {}

    def program(f: Callable, args: list) -> jax.stages.Compiled:
        if time.monotonic() > deadline:
            raise TimeoutError("out of time")
        return jax.jit(f).lower(*args).compile()

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for name in names:
            args = pick(made, OPS[name].letters)
            for form, f in forms_of(name, workload.columns, variants).items():
                programs[name, form] = pool.submit(program, f, args)
            wide = [jax.ShapeDtypeStruct(x.shape, widened(x)) for x in args]
            programs[name, "fp32"] = pool.submit(program, OPS[name].oracle or OPS[name].xla, wide)
    return programs


def check(programs: list[Program], args: list[jax.Array], compared: Callable) -> dict:
    """Errors of the first program against the third's, beside those of the second.

    Args:
        compared: ``Op.compared``.
    """
    kernel, xla, wide = (program.result() for program in programs)
    want = jax.tree.leaves(wide(*(x.astype(widened(x)) for x in args)))
    got = compared(kernel(*args))
    errors = [float(e) for e in relative(got, want)]
    same = bool(equal(got, compared(kernel(*args))))
    del got
    plain_errors = [float(e) for e in relative(compared(xla(*args)), want)]
    # Sums in fp32 of the same numbers: XLA's own may be its oracle to the last bit.
    ok = all(e <= 2 * p + 1e-6 for e, p in zip(errors, plain_errors, strict=True))
    return {"errors": errors, "xla": plain_errors, "ok": ok, "repeats": same}


def rate(f: Callable, args: list[jax.Array], num_bytes: int, copy: float | None) -> dict:
    _, times = profiler.measure(f, iterations=9)(*args)
    assert times is not None, "the call launched no kernel"
    ms = statistics.median(times)
    row = {"ms": round(ms, 5), "gb_s": round(num_bytes / ms / 1e6, 1)}
    return row | ({"of_copy": round(row["gb_s"] / copy, 4)} if copy else {})


def as_words(x: jax.Array) -> jax.Array:
    """[R, C] as int32, of 16 bits two in one: what XLA copies at the rate of the memory.

    It adds 1 to bf16 at 78% of that.
    """
    if x.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int32)


def forms_of(name: str, columns: int, with_variants: bool) -> dict[str, Callable]:
    op = OPS[name]
    forms = {"hopper": op.kernel, "xla": op.xla}
    for variant, config in VARIANTS.get((name, columns), {}).items() if with_variants else ():
        forms[variant] = functools.partial(op.kernel, config=config)
    return forms


def groups() -> Iterator[tuple[RowWorkload, list[str]]]:
    """Shapes and ops in order of importance: what comes late may find no time left."""
    others = [name for name in OPS if name not in BAR_OPS]
    for workload in BARS:
        yield workload, list(BAR_OPS)
    for workload in BARS[:2]:
        yield workload, others
    for workload in reversed(OTHERS):
        yield workload, list(BAR_OPS)
    for workload in (OTHERS[-1], BARS[2]):
        yield workload, others


def widened(x):
    return jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def measure_group(
    table: Table, workload: RowWorkload, dtype: str, names: list[str], variants: bool
) -> None:
    """Copy, XLA, kernels and their variants at one shape."""
    elements, itemsize = workload.rows * workload.columns, jnp.dtype(dtype).itemsize
    shape = workload.name if dtype == "bfloat16" else f"{dtype} {workload.name}"
    programs = compiled(workload, dtype, names, variants, table.deadline)
    made = make_inputs(workload, dtype)
    words = jax.jit(as_words)(made["x"])
    copied = table.add(
        f"copy {shape}", lambda: rate(lambda x: x + 1, [words], 2 * itemsize * elements, None)
    ).get("gb_s")
    for name in names:
        op = OPS[name]
        args = pick(made, op.letters)
        for form in forms_of(name, workload.columns, variants):
            if form != "xla":
                three = [programs[name, f] for f in (form, "xla", "fp32")]
                label = f"check {name} {shape}" + f" {form}" * (form != "hopper")
                table.add(label, functools.partial(check, three, args, op.compared))
            get = programs[name, form].result
            num_bytes = (op.num_arrays * itemsize + op.other_bytes) * elements
            table.add(
                f"{name} {shape} {form}",
                functools.partial(rate_of, get, lambda args=args: args, num_bytes, copied),
            )


def pick(made: dict, letters: str) -> list:
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
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    for dtype in args.dtypes:
        for i, (workload, names) in enumerate(groups()):
            # The variants are of 16 bits.
            measure_group(table, workload, dtype, names, args.variants and dtype == "bfloat16")
            if i + 1 == len(BARS) and dtype == "bfloat16":
                measure_plain(table)


if __name__ == "__main__":
    main()
