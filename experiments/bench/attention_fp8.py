"""FP8 attention on a Hopper GPU beside our bf16 kernel: kernel time, and error by its sources.

python -m experiments.bench.attention_fp8 --out experiments/results/attention-fp8-h200.json

FLOPs of causal cases count half; kernel times are medians. A process measures one case (bf16, FP8
and quantizing in turns) or, with --variants, one form of the kernel on the longest cases; they
compile side by side and have the GPU one after the other. Quantizing is timed apart: a server
quantizes keys and values once, when they enter the cache.

Errors are of the output against fp64 from the bf16 operands. Beside the kernel's stand those of
rounding alone, computed without it: of the operands, and of operands and probabilities.
"""

import argparse
import concurrent.futures
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.bench.attention import alone
from experiments.bench.attention_cases import Case
from experiments.bench.environment import environment
from pallas_kernels.common import timing
from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.fp8_operands import E4M3, dequantized, quantize_fp8
from pallas_kernels.flash_attention.hopper.config import Fp8Config
from pallas_kernels.flash_attention.hopper.fp8_kernel import P_SHIFT
from pallas_kernels.flash_attention.spec import AttentionMasks

NO_MASKS = AttentionMasks()
LIMIT_S = 25  # that a process may have the GPU
ERRORS = "errors of "  # begins the name of a process that measures them
CASES = [
    Case(B=B, T=T, N=32, K=K, H=H, Hv=H, causal=causal)
    for H, K in ((128, 8), (128, 32), (64, 8))
    for causal in (False, True)
    for B, T in ((4, 4096), (2, 8192), (1, 16384))
]
CHECKED = [
    Case(B=1, T=T, N=2, K=1, H=128, Hv=128, causal=causal)
    for T, causal in ((1024, False), (16384, False), (16384, True))
]
TABLE: dict[str, Fp8Config | None] = {"fp8": None}
FREE = functools.partial(Fp8Config, promote_every=16, ping_pong=False, overlap=False)
VARIANTS: dict[str, Fp8Config | None] = {
    "kv192, no turns, no pin": FREE(block_kv=192),
    "kv192, no turns": FREE(block_kv=192, overlap=True),
    "kv192": FREE(block_kv=192, overlap=True, ping_pong=True),
    "kv128, no turns, no pin": FREE(num_stages=3),
    "kv96 of 192, no turns, no pin": FREE(block_kv=96, num_warpgroups=3, promote_every=32),
    "kv96 of 192, no pin": FREE(block_kv=96, num_warpgroups=3, promote_every=32, ping_pong=True),
}
PROMOTED: dict[str, Fp8Config | None] = {
    f"promoted every {n} tiles of 192" if n else "never promoted": FREE(
        block_kv=192, promote_every=n
    )
    for n in (0, 4, 8, 16)
}
"""Of which errors are measured: the other forms add in the same order as one of these."""


def by_head(q, k, v, *, spec, round_p: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Attention from the definition in the operands' dtype, one query head at a time."""
    T, N = q.shape[1:3]
    group = N // k.shape[2]

    def head(n):
        s = jnp.einsum("bth,bsh->bts", q[:, :, n], k[:, :, n // group], precision="highest")
        if spec.right == 0:
            s = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], s, -jnp.inf)
        p = jnp.exp(spec.scale * (s - s.max(axis=2, keepdims=True)))
        out = jnp.einsum("bts,bsh->bth", round_p(p), v[:, :, n // group], precision="highest")
        return out / p.sum(axis=2)[..., None]

    return jnp.moveaxis(jax.lax.map(head, jnp.arange(N)), 0, 2)


def as_stored(p: jax.Array) -> jax.Array:
    """Probabilities relative to their row's maximum, rounded as the kernel rounds them."""
    unit = 2.0**P_SHIFT
    return (p * unit).astype(E4M3).astype(p.dtype) / unit


def operands_of(case: Case) -> list[jax.Array]:
    """q, k, v of normal numbers, rounded to bf16.

    ``jax.random.normal`` in bf16 draws from a coarse grid with a mean: rounding then errs alike in
    every key, which an output that is itself a mean of many values shows.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, shape.shape, jnp.float32).astype(shape.dtype)
        for key, shape in zip(keys, jax.eval_shape(case.arrays), strict=False)
    ]


def with_outliers(arrays: list[jax.Array]) -> list[jax.Array]:
    """A few channels much larger than the rest, as trained models have."""
    large = jax.random.uniform(jax.random.key(1), arrays[0].shape[-1:]) < 0.05
    return [jnp.where(large, 8 * x, x).astype(x.dtype) for x in arrays]


def bf16(q, k, v, *, spec):
    return hopper.forward(q, k, v, NO_MASKS, spec=spec)[0]


def fp8(operands, *, spec, config=None):
    return hopper.forward_fp8(operands, spec=spec, dtype=jnp.bfloat16, config=config)[0]


def errors(case: Case, configs: dict[str, Fp8Config | None], lock: pathlib.Path, emit) -> None:
    """Of rounding alone, of the kernel, and of bf16, against fp64 from the same bf16 operands."""
    exactly = functools.partial(by_head, spec=case.spec)
    plain = jax.jit(functools.partial(exactly, round_p=lambda p: p))
    rounded = jax.jit(functools.partial(exactly, round_p=as_stored))
    forms = {
        name: jax.jit(functools.partial(fp8, spec=case.spec, config=config))
        for name, config in configs.items()
    }
    in_16_bits = jax.jit(functools.partial(bf16, spec=case.spec))
    quantize = jax.jit(quantize_fp8)

    def measure(arrays: list[jax.Array], outliers: bool) -> None:
        operands = quantize(*arrays)
        with jax.enable_x64(True):
            want = plain(*(x.astype(jnp.float64) for x in arrays))
            size = math.sqrt(float((want**2).sum()))

        def report(name: str, got: jax.Array) -> None:
            with jax.enable_x64(True):
                error = math.sqrt(float(((got.astype(jnp.float64) - want) ** 2).sum())) / size
            emit({"case": case.name, "outliers": outliers, "implementation": name,
                  "relative_error": error})  # fmt: skip

        back = dequantized(operands)
        report("rounding of operands", plain(*back))
        report("rounding of operands and probabilities", rounded(*back))
        for name, form in forms.items():
            report(name, form(operands))
        report("bf16", in_16_bits(*arrays))

    arrays = operands_of(case)
    shapes = jax.eval_shape(quantize_fp8, *arrays)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # compiled before the GPU is taken
        list(pool.map(lambda f: f.lower(shapes).compile(), forms.values()))
    in_16_bits.lower(*arrays).compile()
    with alone(lock, limit_s=LIMIT_S):
        measure(arrays, outliers=False)
        measure(with_outliers(arrays), outliers=True)


def times(cases: list[Case], forms: dict[str, Fp8Config | None], lock, emit) -> None:
    """Kernel times of each case, its implementations in turns; of several forms bf16 is one."""
    work = []
    for case in cases:
        arrays = tuple(operands_of(case))
        operands = jax.jit(quantize_fp8)(*arrays)
        programs = {}
        if forms == TABLE:
            programs["bf16"] = (jax.jit(functools.partial(bf16, spec=case.spec)), arrays)
            programs["quantize"] = (jax.jit(quantize_fp8), arrays)
        for name, config in forms.items():
            f = jax.jit(functools.partial(fp8, spec=case.spec, config=config))
            programs[name] = (f, (operands,))
        work.append((case, programs))
    lowered = [f.lower(*args) for _, programs in work for f, args in programs.values()]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda program: program.compile(), lowered))
    with alone(lock, limit_s=LIMIT_S):
        for case, programs in work:
            for name, timed in timing.measure(programs, rounds=3, iterations=4).items():
                row = {"case": case.name, "implementation": name, "ms": timed.median_ms}
                if name != "quantize":
                    row["tflops"] = case.flop / timed.median_ms / 1e9
                emit(row)


def one_process(part: str, cases: list[Case], out: pathlib.Path) -> None:
    """What a process measures; every row is on disk before the next is."""

    def emit(row: dict) -> None:
        print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()), sep=" | ",
              flush=True)  # fmt: skip
        with out.open("a") as f:
            f.write(json.dumps(row) + "\n")

    lock = out.parent / "lock"
    length = max((case.T for case in cases), default=0)
    if part.startswith(ERRORS):
        for case in CHECKED:
            if part == ERRORS + case.name:
                errors(case, PROMOTED, lock, emit)
    elif part in VARIANTS:
        longest = [case for case in cases if length == case.T]
        times(longest, {part: VARIANTS[part]}, lock, emit)
    else:
        times([case for case in cases if case.name == part], TABLE, lock, emit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", action="store_true", help="forms other than the table's too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in case.name]
    if args.part:
        one_process(args.part[0], cases, pathlib.Path(args.part[1]))
        return
    parts = [case.name for case in cases] + (list(VARIANTS) if args.variants else [])
    parts += [] if args.no_errors else [ERRORS + case.name for case in CHECKED]
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, "-m", "experiments.bench.attention_fp8", "--only", args.only]
        outs = [pathlib.Path(folder) / f"{i}.jsonl" for i in range(len(parts))]
        children = [
            subprocess.Popen([*base, "--part", part, str(out)], env=env)
            for part, out in zip(parts, outs, strict=True)
        ]
        failed = []
        for part, child in zip(parts, children, strict=True):
            if child.wait():
                failed.append(part)
            if args.out:
                lines = [path.read_text().splitlines() for path in outs if path.exists()]
                rows = [json.loads(line) for part_lines in lines for line in part_lines]
                result = {"environment": environment(), "rows": rows}
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        sys.exit(f"no complete result of: {', '.join(failed)}")


if __name__ == "__main__":
    main()
