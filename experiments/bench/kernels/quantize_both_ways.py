"""Matrices cast with their transposes on a Hopper GPU: one kernel beside separate steps.

python -m experiments.bench.kernels.quantize_both_ways \\
    --out experiments/results/both-ways-h200.json \\
    --table pallas_kernels/fp8/tuned

Casts are of a plain matrix ("x"), of SwiGLU and of its gradient, by blocks of 1x128 and 128x128.
The "check" rows compare values and scales with those of the XLA form: "same" is the share with the
same bits (all of "x"), "near" says that all others are neighbours, infinities and NaN among them.
The others are CUPTI times, interleaved: "hopper", "apart" (what "auto" takes without the one
kernel), and a copy of as many bytes as the one kernel needs (``x + 1`` of int32); GB/s are of these
bytes. --table adds the times to the table that "auto" follows, if every check held.
"""

import functools
import pathlib
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp

from experiments.bench.harness import Contender, compiled, kernel_ms, options, table_of
from experiments.bench.tuned_table import add_rows
from pallas_kernels.common import tables
from pallas_kernels.common.scales import Scaling, spread
from pallas_kernels.fp8 import both_ways
from pallas_kernels.fp8.both_ways import PLAIN, SWIGLU, SWIGLU_GRADIENT, CastSource

E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
NUM_INPUTS = {PLAIN.name: 1, SWIGLU.name: 2, SWIGLU_GRADIENT.name: 3}
SHAPES = {
    PLAIN.name: ((16384, 14336), (16384, 4096), (4096, 4096), (16384, 1024)),
    SWIGLU.name: ((16384, 14336), (4096, 14336)),
    SWIGLU_GRADIENT.name: ((16384, 14336), (4096, 14336)),
}
SOURCES = (SWIGLU, SWIGLU_GRADIENT, PLAIN)
CHECK = 512, 1024
LEAST_SAME = 0.97
FORMATS = {"e4m3": (E4M3, False), "e5m2, powers of two": (E5M2, True)}


def inputs(num: int, rows: int, columns: int) -> tuple[jax.Array, ...]:
    """Rows of different sizes; some zeros, infinities and NaN."""

    def one(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        size = jnp.exp2(jax.random.randint(keys[1], (rows, 1), -8, 5).astype(jnp.float32))
        x = jax.random.normal(keys[0], (rows, columns), jnp.float32) * size
        odd = jax.random.uniform(keys[2], (rows, columns))
        x = jnp.where(odd < 1e-4, jnp.inf, jnp.where(odd < 2e-4, jnp.nan, x))
        return x.at[: rows // 8, : columns // 2].set(0.0).astype(jnp.bfloat16)

    return tuple(one(key) for key in jax.random.split(jax.random.key(0), num))


def program(source: CastSource, scaling: Scaling, how: str, dtype=E4M3, power_of_two: bool = False):
    """Function of the inputs that gives each quantized result with its transpose."""

    def one_kernel(*x):
        return both_ways.both_ways_hopper(
            source.in_kernel,
            x,
            scaling,
            num_results=source.num_results,
            dtype=dtype,
            power_of_two=power_of_two,
        )

    def steps(*x):
        implementation = "auto" if how == "apart" else "xla"
        return both_ways.apart(
            source,
            x,
            scaling,
            implementation=implementation,
            num=1,
            dtype=dtype,
            power_of_two=power_of_two,
        )

    return one_kernel if how == "hopper" else steps


def struct(num: int, rows: int, columns: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)] * num


@functools.partial(jax.jit, static_argnums=2)
def beside(mine, theirs, scaling):
    """Share of values and scales with the same bits, and whether all others are neighbours."""
    same, near = [], []
    for a, b in zip(mine, theirs, strict=True):
        info = jnp.finfo(a.values.dtype)
        x, y = (
            each.values.astype(jnp.float32) * spread(scaling, each.scale, *each.values.shape)
            for each in (a, b)
        )
        step = spread(scaling, b.scale, *b.values.shape) * float(info.smallest_subnormal)
        both_nan = jnp.isnan(x) & jnp.isnan(y)
        within = jnp.abs(x - y) <= 1.1 * (float(info.eps) * jnp.abs(y) + step)
        near.append(jnp.all(both_nan | within))
        same += [jnp.mean((x == y) | both_nan), jnp.mean(a.scale == b.scale)]
    return jnp.min(jnp.stack(same)), jnp.all(jnp.stack(near))


def check(source: CastSource, scaling: Scaling, programs: dict[str, Future]) -> dict:
    given = jax.jit(inputs, static_argnums=(0, 1, 2))(NUM_INPUTS[source.name], *CHECK)
    mine, again, theirs = (programs[how].result()(*given) for how in ("hopper", "hopper", "xla"))
    flat = [[x for both in found for x in both] for found in (mine, theirs)]
    same, near = beside(*flat, scaling)

    def bits(tree):
        return [x.view(jnp.uint8) for x in jax.tree.leaves(tree)]

    repeats = all(bool(jnp.array_equal(a, b)) for a, b in zip(bits(mine), bits(again), strict=True))
    least = 1.0 if source is PLAIN else LEAST_SAME
    ok = bool(near) and repeats and float(same) >= least
    return {"same": float(same), "near": bool(near), "repeats": repeats, "ok": ok}


def measure(source: CastSource, programs: dict[str, Future], rows: int, columns: int) -> dict:
    num = NUM_INPUTS[source.name]
    given = jax.jit(inputs, static_argnums=(0, 1, 2))(num, rows, columns)
    fewest = (2 * num + 2 * source.num_results) * rows * columns
    words = jnp.zeros((fewest // 8,), jnp.int32)  # read once, written once
    contenders = {
        name: Contender(call=programs[name].result(), sets=[given]) for name in ("hopper", "apart")
    }
    contenders["copy"] = Contender(call=jax.jit(lambda x: x + 1), sets=[(words,)])
    ms = kernel_ms(contenders)
    return {
        "ms": ms,
        "gb_per_s": {name: fewest / taken / 1e6 for name, taken in ms.items()},
        "of_copy": ms["copy"] / ms["hopper"],
        "faster": ms["apart"] / ms["hopper"],
    }


def measured_rows(
    found: list[tuple[CastSource, Scaling, tuple[int, int], dict]],
) -> list[tables.Row]:
    """Rows of the tuned table that "auto" reads."""
    return [
        tables.Row.of(
            case=both_ways.case_of(source, scaling, shape),
            choice={"implementation": name},
            ms=round(row["ms"][name], 5),
        )
        for source, scaling, shape, row in found
        if "ms" in row
        for name in ("hopper", "apart")
    ]


def main() -> None:
    parser = options(__doc__, budget=50.0)
    parser.add_argument("--table", type=pathlib.Path, help="folder of the table to add to")
    args = parser.parse_args()
    table = table_of(args)
    checks, timed = {}, {}
    # Nothing is timed while the compiler runs.
    with ThreadPoolExecutor(16) as pool:
        for source in SOURCES:
            num = NUM_INPUTS[source.name]
            for scaling in Scaling:
                for shape in SHAPES[source.name]:
                    timed[source, scaling, shape] = {
                        how: pool.submit(
                            compiled, program(source, scaling, how), *struct(num, *shape)
                        )
                        for how in ("hopper", "apart")
                    }
                for name, (dtype, power_of_two) in FORMATS.items():
                    form = dtype, power_of_two and scaling is Scaling.BLOCK_OF_ROW
                    checks[source, scaling, name] = {
                        how: pool.submit(
                            compiled, program(source, scaling, how, *form), *struct(num, *CHECK)
                        )
                        for how in ("hopper", "xla")
                    }
    held = [
        table.add(f"check {s.name} {form} {name}", functools.partial(check, s, form, each))
        for (s, form, name), each in checks.items()
    ]
    found = [
        (s, form, shape, table.add(f"{s.name} {form} {shape[0]}x{shape[1]}",
                                   functools.partial(measure, s, each, *shape)))
        for (s, form, shape), each in timed.items()
    ]  # fmt: skip
    are_right = all(row.get("ok", False) for row in held)
    if args.table is not None and are_right:
        add_rows(args.table, measured_rows(found), op="quantize", question=both_ways.QUESTION)
    for *_, row in found:
        print(row.get("name"), row.get("ms"), row.get("of_copy"), row.get("faster"), flush=True)
    print("all checks held" if are_right else "A CHECK FAILED", flush=True)


if __name__ == "__main__":
    main()
