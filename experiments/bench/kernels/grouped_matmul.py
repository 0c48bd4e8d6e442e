"""Grouped products beside PyTorch's and beside one dense product of the same size.

python -m experiments.bench.kernels.grouped_matmul \\
    --out experiments/results/grouped-matmul-h200.json

"check" rows hold results and gradients of the public functions to float64, bit for bit repeatable.
The others are sustained TFLOP/s, the GPU at its power limit: contenders take turns of --turn
seconds, on random normal operands and sizes from a Dirichlet(4); a figure is the median of the
turns but the first, from the host's clock around calls in a row. All contenders of a row share
their operands. "gathered" rows read the rows of x by an index; "hot" rows give half of the rows to
one group and compare with an even case. Joules are the mean power of the turns times their time.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
import numpy as np
import torch  # pyrefly: ignore[missing-import]  # of the machine that measures

from experiments.bench.table import Table
from pallas_kernels import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.hopper import calls

SHAPES = (
    (65536, 2048, 1536, 64),
    (32768, 4096, 14336, 8),
    (65536, 7168, 2048, 32),
    (65536, 2048, 768, 128),
)  # rows, width in, width out, groups
DIRECTIONS = ("forward", "input_gradient", "weight_gradient")
VARIANTS = {"every 132nd tile": {"in_any_order": False}, "bands of 16": {"band": 16}}
VARIED = ("forward", "weight_gradient")
SMALL_SIZES, SMALL_ROWS = (300, 0, 7, 1, 640, 250), 2000
type Run = tuple[Callable, Callable]
"""A call and what waits for its result."""


def sizes_of(num_rows: int, num_groups: int, *, hot: bool = False) -> np.ndarray:
    shares = np.random.default_rng(1).dirichlet([4.0] * num_groups)
    if hot:
        shares *= 0.5 / (1.0 - shares[0])
        shares[0] = 0.5
    sizes = np.floor(shares * num_rows).astype(np.int32)
    sizes[-1] += num_rows - sizes.sum()
    return sizes


def ours(direction: str, **options) -> Callable:
    """A function of (x, w, d, sizes)."""
    config = dataclasses.replace(calls.DEFAULT, **options)
    if direction == "forward":
        return lambda x, w, d, sizes: calls.product(
            x, w, sizes, None, out_dtype=x.dtype, config=config
        )
    if direction == "input_gradient":
        return lambda x, w, d, sizes: calls.input_gradient(((d, w),), sizes, config=config)
    return lambda x, w, d, sizes: calls.weight_gradient(
        x, d, sizes, None, out_dtype=x.dtype, config=config
    )


def gathered(x, w, rows, sizes, *, in_kernel: bool):
    config = dataclasses.replace(calls.DEFAULT, gather=in_kernel)
    return calls.product(x, w, sizes, rows, out_dtype=x.dtype, config=config)


def theirs(direction: str, x, w, d, ends) -> dict[str, Run]:
    """PyTorch's grouped and dense products."""
    grouped = {
        "forward": lambda: torch._grouped_mm(x, w, ends),
        "input_gradient": lambda: torch._grouped_mm(d, w.transpose(1, 2), ends),
        "weight_gradient": lambda: torch._grouped_mm(x.t(), d, ends),
    }
    dense = {
        "forward": lambda: x @ w[0],
        "input_gradient": lambda: d @ w[0].t(),
        "weight_gradient": lambda: x.t() @ d,
    }
    wait = wait_for_torch
    return {"torch": (grouped[direction], wait), "dense": (dense[direction], wait)}


def wait_for_torch(result) -> None:
    del result
    torch.cuda.synchronize()


def take_turns(runs: dict[str, Run], *, turn: float, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a call and watts, of each contender."""
    counts = {}
    for name, (call, wait) in runs.items():
        wait(call())
        start = time.perf_counter()
        wait([call() for _ in range(3)])
        counts[name] = max(1, round(3 * turn / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    watts: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (call, wait) in runs.items():
            start = time.perf_counter()
            result = call()
            for _ in range(counts[name] - 1):
                result = call()
            watts[name].append(_watts())
            wait(result)
            times[name].append(1e3 * (time.perf_counter() - start) / counts[name])
    return {
        name: {"ms": statistics.median(times[name][1:]), "watts": statistics.mean(watts[name])}
        for name in runs
    }


@functools.cache
def _has_power_meter() -> bool:
    try:
        torch.cuda.power_draw()
    except (ModuleNotFoundError, RuntimeError) as error:
        print(f"no joules: {error}", flush=True)
        return False
    return True


def _watts() -> float:
    return torch.cuda.power_draw() / 1e3 if _has_power_meter() else float("nan")


def in_tflops(found: dict[str, dict[str, float]], flop: float) -> dict:
    rates = {name: flop / one["ms"] / 1e9 for name, one in found.items()}
    row: dict = {"ms": {n: f["ms"] for n, f in found.items()}, "tflops": rates}
    row["joules"] = {n: f["ms"] * f["watts"] / 1e3 for n, f in found.items()}
    for other in ("torch", "dense"):
        if other in rates:
            row[f"of_{other}"] = rates["hopper"] / rates[other]
    return row


def operands(shape: tuple[int, ...]):
    M, K, N, G = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    return tuple(
        torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for size in ((M, K), (G, K, N), (M, N))
    )


def measure(shape, program: Future, direction: str, args) -> dict:
    M, K, N, G = shape
    x, w, d = operands(shape)
    sizes = sizes_of(M, G)
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    runs = theirs(direction, x, w, d, ends)
    mine = (*(jnp.from_dlpack(a) for a in (x, w, d)), jnp.asarray(sizes))
    runs["hopper"] = functools.partial(program.result(), *mine), jax.block_until_ready
    want, got, again = (runs[name][0]() for name in ("torch", "hopper", "hopper"))
    some = slice(want.shape[0] // 8)
    error = torch.linalg.vector_norm(torch.from_dlpack(got)[some].float() - want[some].float())
    errors = {
        "from_torch": float(error / torch.linalg.vector_norm(want[some].float())),
        "repeats": bool(jnp.array_equal(got, again)),
    }
    del want, got, again
    row = in_tflops(take_turns(runs, turn=args.turn, rounds=args.rounds), 2 * M * K * N)
    hot = (*mine[:3], jnp.asarray(sizes_of(M, G, hot=True)))
    found = take_turns(
        {
            name: (functools.partial(program.result(), *given), jax.block_until_ready)
            for name, given in (("even", mine), ("hot", hot))
        },
        turn=args.turn,
        rounds=args.rounds,
    )
    return {**row, **errors, "hot_over_even": found["hot"]["ms"] / found["even"]["ms"]}


def measure_variants(shape, programs: dict[str, Future], args) -> dict:
    """Forms of the kernel beside each other; their results are the same bits."""
    M, K, N, G = shape
    given = (*(jnp.from_dlpack(a) for a in operands(shape)), jnp.asarray(sizes_of(M, G)))
    runs: dict[str, Run] = {
        name: (functools.partial(program.result(), *given), jax.block_until_ready)
        for name, program in programs.items()
    }
    results = [call() for call, _ in runs.values()]
    equal = all(bool(jnp.array_equal(results[0], other)) for other in results[1:])
    del results
    found = take_turns(runs, turn=args.turn, rounds=args.rounds)
    return {**in_tflops(found, 2 * M * K * N), "equal": equal}


def measure_gathered(shape, programs: dict[str, Future], args) -> dict:
    """Eight rows of each token, in random order."""
    M, K, N, G = shape
    x, w, _ = operands(shape)
    rows = np.random.default_rng(2).permutation(np.arange(M) % (M // 8)).astype(np.int32)
    given = jnp.from_dlpack(x)[: M // 8], jnp.from_dlpack(w), jnp.asarray(rows)
    given = *given, jnp.asarray(sizes_of(M, G))
    runs: dict[str, Run] = {
        name: (functools.partial(program.result(), *given), jax.block_until_ready)
        for name, program in programs.items()
    }
    results = [call() for call, _ in runs.values()]
    found = take_turns(runs, turn=args.turn, rounds=args.rounds)
    equal = all(bool(jnp.array_equal(results[0], other)) for other in results[1:])
    return {**in_tflops(found, 2 * M * K * N), "equal": equal}


def check_inputs():
    M, K, N, G = SMALL_ROWS, 512, 704, len(SMALL_SIZES)
    rng = np.random.default_rng(0)
    x, w, up, d = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16)
        for size in ((M, K), (G, K, N), (G, K, N), (M, N))
    )
    return x, w / 16, up / 16, d, jnp.asarray(SMALL_SIZES, jnp.int32)


def check_program(kind: str, implementation: str) -> Callable:
    """Value and gradients, of rows as they are or of every row twice, the first ones."""
    rows = jnp.arange(SMALL_ROWS, dtype=jnp.int32) // 2 if "gathered" in kind else None

    def run(x, w, up, d, sizes):
        options: dict[str, Any] = {"rows": rows, "implementation": implementation}

        def f(x, w, up):
            if "gated" in kind:
                return grouped_swiglu(x, w, up, sizes, **options)
            return grouped_matmul(x, w, sizes, **options)

        y, pull = jax.vjp(f, x, w, up)
        return y, pull(d.astype(y.dtype))

    return run


def check(programs: dict[str, Future]) -> dict:
    """Errors beside those of XLA's form in the same dtype, against it in fp32."""
    x, w, up, d, sizes = check_inputs()
    exact = tuple(a.astype(jnp.float32) for a in (x, w, up, d))
    want = jax.tree.leaves(programs["exact"].result()(*exact, sizes))
    got = jax.tree.leaves(programs["hopper"].result()(x, w, up, d, sizes))
    again = jax.tree.leaves(programs["hopper"].result()(x, w, up, d, sizes))
    errors = [
        float(jnp.linalg.norm(g.astype(jnp.float32) - e) / jnp.maximum(jnp.linalg.norm(e), 1e-30))
        for g, e in zip(got, want, strict=True)
    ]
    repeats = all(bool(jnp.array_equal(g, a)) for g, a in zip(got, again, strict=True))
    # Two roundings to bf16 of 2**-9 / sqrt(3) each, and what the gate's slope makes of them.
    return {"errors": errors, "repeats": repeats, "ok": repeats and max(errors) < 6e-3}


def shaped(shape, *, gather: bool):
    M, K, N, G = shape
    struct, bf16, int32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.int32
    x = struct((M // 8 if gather else M, K), bf16)
    third = struct((M,), int32) if gather else struct((M, N), bf16)
    return x, struct((G, K, N), bf16), third, struct((G,), int32)


def shape_name(shape: tuple[int, ...]) -> str:
    return f"{'x'.join(map(str, shape[:3]))} x{shape[3]}"


def compiled(f: Callable, *shapes, options: dict | None = None) -> jax.stages.Compiled:
    return jax.jit(f).lower(*shapes).compile(compiler_options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all rows")
    parser.add_argument("--turn", type=float, default=0.06, help="seconds of a contender's turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)
    # Nothing is timed while the compiler runs.
    with ThreadPoolExecutor(16) as pool:
        given = jax.eval_shape(check_inputs)
        exact = (*(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in given[:4]), given[4])
        checks = {
            kind: {
                "hopper": pool.submit(compiled, check_program(kind, "hopper"), *given),
                "exact": pool.submit(compiled, check_program(kind, "xla"), *exact),
            }
            for kind in ("plain", "gathered", "gated, gathered")
        }
        programs = {
            (shape, direction): pool.submit(compiled, ours(direction), *shaped(shape, gather=False))
            for shape in SHAPES
            for direction in DIRECTIONS
        }
        variants = {
            (shape, direction): {
                name: pool.submit(
                    compiled, ours(direction, **options), *shaped(shape, gather=False)
                )
                for name, options in VARIANTS.items()
            }
            for shape in SHAPES
            for direction in VARIED
        }
        gathers = {
            name: pool.submit(
                compiled,
                functools.partial(gathered, in_kernel=in_kernel),
                *shaped(SHAPES[-1], gather=True),
            )
            for name, in_kernel in (("hopper", True), ("copied first", False))
        }
    table.add("check plain", functools.partial(check, checks.pop("plain")))
    for (shape, direction), program in programs.items():
        name = f"{direction} {shape_name(shape)}"
        table.add(name, functools.partial(measure, shape, program, direction, args))
    for (shape, direction), each in variants.items():
        each = {"hopper": programs[shape, direction], **each}
        name = f"variants of {direction} {shape_name(shape)}"
        table.add(name, functools.partial(measure_variants, shape, each, args))
    for kind, each in checks.items():
        table.add(f"check {kind}", functools.partial(check, each))
    table.add("gathered", functools.partial(measure_gathered, SHAPES[-1], gathers, args))


if __name__ == "__main__":
    main()
