"""Grouped products of 8-bit operands beside PyTorch's and beside the bf16 ones.

python -m experiments.bench.kernels.scaled_grouped_matmul \\
    --out experiments/results/scaled-grouped-h200.json

"check" rows hold small products of every form to fp32 ones of the dequantized operands ("beyond
rounding": the largest error that the result's rounding does not explain, over the sum of the terms'
magnitudes), and to the bits of ``scaled_matmul`` of each group. The others are sustained TFLOP/s in
turns, as in ``grouped_matmul``: 1x128 by 128x128 scales here, scales of rows and columns in
``torch._scaled_grouped_mm``, with and without its fast accumulation ("of_torch": of the faster).
"worst_row" is the largest relative error of a row beside the bf16 product of the same numbers:
rounding to 8 bits makes it 0.04, a row of another group's weight 1.4. "variants" rows are other
tiles, whose results are the same bits.
"""

import argparse
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import torch  # pyrefly: ignore[missing-import]  # of the machine that measures

from experiments.bench.kernels.grouped_matmul import (
    SHAPES,
    SMALL_ROWS,
    SMALL_SIZES,
    Run,
    compiled,
    in_tflops,
    shape_name,
    sizes_of,
    take_turns,
    wait_for_torch,
)
from experiments.bench.kernels.scaled_matmul import E4M3, E5M2, PLAINLY
from experiments.bench.table import Table
from pallas_kernels import quantize, scaled_grouped_matmul, scaled_matmul
from pallas_kernels.common.scales import Scaling
from pallas_kernels.grouped_matmul.formulas import dequantized_operands
from pallas_kernels.grouped_matmul.hopper import calls
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.quantize.xla import quantize_xla

LARGEST_ERROR = 2e-4
"""Of the sum of the terms' magnitudes: 8-bit tensor cores keep 13 bits below the largest addend."""
WORST_ROW = 0.1
LARGEST_E4M3 = 448.0
VARIANTS: dict[str, dict[str, Any]] = {
    "in turns": {"in_turns": True},
    "free": {"in_turns": False},
    "short tiles to one warpgroup": {"shares_short_tiles": False},
}
WAYS = tuple(VARIANTS)[:2]
VARIED = ((0, tuple(VARIANTS)), (1, WAYS), (2, WAYS), (3, tuple(VARIANTS)))
"""Shapes by their number, and what is timed there: always both ways of sharing the tensor cores."""
CHECKS = {
    "blocks": ((E4M3, E4M3), "bfloat16"),
    "e5m2 by e4m3, fp32": ((E5M2, E4M3), "float32"),
}
K, N = 512, 704  # of a check


def ours(shape: tuple[int, ...], **options: Any) -> Callable:
    """The kernel as it is at a shape, but for these options."""
    config = dataclasses.replace(calls.scaled_config(shape[0], shape[-1]), **options)
    return functools.partial(calls.scaled_product, out_dtype=jnp.dtype("bfloat16"), config=config)


def in_bf16(x, w_GKN, sizes):
    return calls.product(x, w_GKN, sizes, None, out_dtype=x.dtype)


def eight_bits(shape: tuple[int, ...], dtypes=(E4M3, E4M3)):
    """What a product takes, for the compiler."""
    M, K, N, G = shape
    struct, float32 = jax.ShapeDtypeStruct, jnp.float32
    return (
        struct((M, K), dtypes[0]),
        struct((G, N, K), dtypes[1]),
        struct((K // 128, M), float32),
        struct((G, K // 128, -(-N // 128)), float32),
        struct((G,), jnp.int32),
    )


def sixteen_bits(shape: tuple[int, ...]):
    M, K, N, G = shape
    struct, bf16 = jax.ShapeDtypeStruct, jnp.bfloat16
    return struct((M, K), bf16), struct((G, K, N), bf16), struct((G,), jnp.int32)


@functools.partial(jax.jit, static_argnums=2)
def quantized(x, w_GNK, dtypes=(E4M3, E4M3)):
    """a, b, a_scale, b_scale of a product."""
    a = quantize(x, "1x128", dtype=dtypes[0], implementation="xla")
    b = quantize_xla(w_GNK, Scaling.BLOCK, dtype=jnp.dtype(dtypes[1]), power_of_two=False)
    return a.values, b.values, a.scale, b.scale


def check_program(out_dtype: str) -> Callable:
    return functools.partial(scaled_grouped_matmul, out_dtype=out_dtype, implementation="hopper")


def group_by_group(a, b, a_scale, b_scale, *, out_dtype: str):
    """Each group's product by the kernel of one group, 0 beyond the groups."""
    multiply = functools.partial(scaled_matmul, out_dtype=out_dtype, implementation="hopper")
    # A loop, so that its kernel is compiled once.
    products = jax.lax.map(lambda each: multiply(a, each[0], a_scale, each[1]), (b, b_scale))
    starts = [sum(SMALL_SIZES[:g]) for g in range(len(SMALL_SIZES) + 1)]
    parts = [y[i:j] for y, i, j in zip(products, starts, starts[1:], strict=False)]
    beyond = jnp.zeros((SMALL_ROWS - starts[-1], N), out_dtype)
    return jnp.concatenate([*parts, beyond])


def errors(got, a, b, a_scale, b_scale, sizes):
    """The largest one beyond rounding, over the terms' magnitudes; the root mean square."""
    x, w = dequantized_operands(a, b, a_scale, b_scale)
    w = jnp.swapaxes(w, 1, 2)
    want = grouped_matmul_reference(x, w, sizes)
    terms = grouped_matmul_reference(jnp.abs(x), jnp.abs(w), sizes)
    error = jnp.abs(got.astype(jnp.float32) - want)
    rounding = float(jnp.finfo(got.dtype).eps) / 2 * jnp.abs(want)
    beyond = jnp.max((error - rounding) / jnp.maximum(terms, 1e-30))
    return beyond, jnp.linalg.norm(error) / jnp.linalg.norm(want)


def check(programs: dict[str, Future], dtypes, out_dtype: str) -> dict:
    """Errors of a small product, its bits and those of a second run."""
    keys = jax.random.split(jax.random.key(0), 3)
    size = jnp.exp2(jax.random.randint(keys[2], (SMALL_ROWS, 1), -8, 0).astype(jnp.float32))
    x = jax.random.normal(keys[0], (SMALL_ROWS, K)) * size
    w = jax.random.normal(keys[1], (len(SMALL_SIZES), N, K))
    sizes = jnp.asarray(SMALL_SIZES, jnp.int32)
    a, b, a_scale, b_scale = quantized(x, w, dtypes)
    a_scale = a_scale.at[:, sum(SMALL_SIZES) :].set(jnp.nan)
    arrays = a, b, a_scale, b_scale
    got, again = (programs["hopper"].result()(*arrays, sizes) for _ in range(2))
    alone = programs["alone"].result()(*arrays)
    beyond, rms = map(float, programs["errors"].result()(got, *arrays, sizes))
    row = {
        "beyond_rounding": beyond,
        "rms": rms,
        "repeats": bool(jnp.array_equal(got, again)),
        "bits_of_scaled_matmul": bool(jnp.array_equal(got, alone)),
        "zero_beyond": not bool(jnp.any(got[sum(SMALL_SIZES) :])),
    }
    return {**row, "ok": beyond < LARGEST_ERROR and row["repeats"] and row["zero_beyond"]}


def operands(shape: tuple[int, ...]):
    """x [M, K] and w [G, N, K] in bf16."""
    M, K, N, G = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    return tuple(
        torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for size in ((M, K), (G, N, K))
    )


def theirs(x, w_GNK, ends) -> dict[str, Run]:
    """PyTorch's product of operands with a scale a row of a and a row of each w."""

    def by_rows(x):
        scale = x.abs().amax(dim=-1).float() / LARGEST_E4M3
        return (x / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale

    (a, a_scale), (b, b_scale) = by_rows(x), by_rows(w_GNK)

    def call(*, fast: bool):
        return torch._scaled_grouped_mm(
            a, b.transpose(1, 2), a_scale, b_scale, ends,
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip

    return {
        name: (functools.partial(call, fast=fast), wait_for_torch)
        for name, fast in (("torch", False), ("torch, fast accumulation", True))
    }


def measure(shape, programs: dict[str, Future], args) -> dict:
    M, K, N, G = shape
    x, w = operands(shape)
    sizes = sizes_of(M, G)
    ends = torch.tensor(sizes.cumsum(), dtype=torch.int32, device="cuda")
    runs = theirs(x, w, ends)
    torch.cuda.synchronize()
    x, w, sizes = jnp.from_dlpack(x), jnp.from_dlpack(w), jnp.asarray(sizes)
    mine = (*quantized(x, w), sizes)
    w_GKN = jnp.swapaxes(w, 1, 2)
    runs["hopper"] = functools.partial(programs["hopper"].result(), *mine), jax.block_until_ready
    bf16 = functools.partial(programs["bf16"].result(), x, w_GKN, sizes)
    runs["bf16"] = bf16, jax.block_until_ready
    want, got, again = (runs[name][0]() for name in ("bf16", "hopper", "hopper"))
    worst = float(worst_row(got, want))
    peer = float(worst_row(jnp.from_dlpack(runs["torch"][0]()), want))
    repeats = bool(jnp.array_equal(got, again))
    del want, got, again
    row = in_tflops(take_turns(runs, turn=args.turn, rounds=args.rounds), 2 * M * K * N)
    rates = row["tflops"]
    row["of_torch"] = rates["hopper"] / max(v for name, v in rates.items() if "torch" in name)
    row["of_bf16"] = rates["hopper"] / rates["bf16"]
    row |= {"worst_row": worst, "worst_row_of_torch": peer, "repeats": repeats}
    return {**row, "ok": repeats and worst < WORST_ROW}


@jax.jit
def worst_row(got, want):
    got, want = (x.astype(jnp.float32) for x in (got, want))
    norm = functools.partial(jnp.linalg.norm, axis=1)
    return jnp.max(norm(got - want) / norm(want))


def measure_variants(shape, programs: dict[str, Future], args) -> dict:
    """Forms of the kernel beside each other."""
    M, K, N, G = shape
    x, w = operands(shape)
    torch.cuda.synchronize()
    mine = (*quantized(jnp.from_dlpack(x), jnp.from_dlpack(w)), jnp.asarray(sizes_of(M, G)))
    runs: dict[str, Run] = {
        name: (functools.partial(program.result(), *mine), jax.block_until_ready)
        for name, program in programs.items()
    }
    results = [call() for call, _ in runs.values()]
    equal = all(bool(jnp.array_equal(results[0], other)) for other in results[1:])
    del results
    found = take_turns(runs, turn=args.turn, rounds=args.rounds)
    return {**in_tflops(found, 2 * M * K * N), "equal": equal}


def submitted(pool: ThreadPoolExecutor) -> tuple[dict, dict, dict]:
    """Programs that are being compiled: of checks, of shapes, of variants."""
    small = (SMALL_ROWS, K, N, len(SMALL_SIZES))
    checks = {
        name: {
            "hopper": pool.submit(compiled, check_program(out), *eight_bits(small, dtypes)),
            "alone": pool.submit(
                compiled,
                functools.partial(group_by_group, out_dtype=out),
                *eight_bits(small, dtypes)[:4],
            ),
            "errors": pool.submit(
                compiled,
                errors,
                jax.ShapeDtypeStruct((SMALL_ROWS, N), jnp.dtype(out)),
                *eight_bits(small, dtypes),
                options=PLAINLY,
            ),
        }
        for name, (dtypes, out) in CHECKS.items()
    }
    shapes = {
        shape: {
            "hopper": pool.submit(compiled, ours(shape), *eight_bits(shape)),
            "bf16": pool.submit(compiled, in_bf16, *sixteen_bits(shape)),
        }
        for shape in SHAPES
    }
    variants = {
        SHAPES[i]: {
            name: pool.submit(compiled, ours(SHAPES[i], **VARIANTS[name]), *eight_bits(SHAPES[i]))
            for name in names
        }
        for i, names in VARIED
    }
    return checks, shapes, variants


def print_summary(rows: list[dict]) -> None:
    """TFLOP/s, one line a row."""
    for row in rows:
        rates = row.get("tflops", {})
        figures = {name: round(rate) for name, rate in rates.items()}
        ratios = {n: round(row[n], 3) for n in ("of_torch", "of_bf16") if n in row}
        said = {n: row[n] for n in ("ok", "equal", "failed", "skipped") if n in row}
        print(row["name"], figures, ratios, said, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=75.0, help="seconds for all rows")
    parser.add_argument("--turn", type=float, default=0.06, help="seconds of a contender's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)
    # Nothing is timed while the compiler runs.
    with ThreadPoolExecutor(16) as pool:
        checks, shapes, variants = submitted(pool)
    for name, programs in checks.items():
        table.add(f"check {name}", functools.partial(check, programs, *CHECKS[name]))
    for shape, programs in shapes.items():
        table.add(shape_name(shape), functools.partial(measure, shape, programs, args))
    for shape, programs in variants.items():
        name = f"variants of {shape_name(shape)}"
        table.add(name, functools.partial(measure_variants, shape, programs, args))
    print_summary(table.rows)


if __name__ == "__main__":
    main()
