"""Flash attention on a Hopper GPU beside cuDNN, forward and backward.

python -m experiments.bench.kernels.attention --out experiments/results/attention-h200.json
python -m experiments.bench.kernels.attention --tune --widths 128/128

FLOPs of causal cases count half; a backward counts 2.5 forwards. Times are kernel times, medians of
rounds in which implementations alternate. Packed documents are compared with the portable form.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import math
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.environment import clocks, environment
from experiments.bench.kernels import attention_tune
from experiments.bench.kernels.attention_cases import EXTRA, HEADS, PACKED, Case, grid
from pallas_kernels.flash_attention import flash_attention, hopper
from pallas_kernels.flash_attention.spec import AttentionMasks, BackwardOperands

NO_MASKS = AttentionMasks()
PROFILER_TRIES = 4
ROUNDS = 3
AT_ONCE = 8  # cases that compile side by side
PORTABLE_LIMIT_S = 1.0  # slower calls of the portable implementation are not measured


def ours(q, k, v, ids=None, *, spec):
    masks = AttentionMasks(q_segment_ids=ids, kv_segment_ids=ids)
    return hopper.forward(q, k, v, masks, spec=spec)[0]


def ours_both(q, k, v, d_out, ids=None, *, spec):
    masks = AttentionMasks(q_segment_ids=ids, kv_segment_ids=ids)
    out, lse = hopper.forward(q, k, v, masks, spec=spec)
    operands = BackwardOperands(
        q=q, k=k, v=v, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=None
    )
    return out, hopper.backward(operands, spec=spec)[:3]


def portable(q, k, v, ids, *, spec):
    """Packed and causal, by the portable implementation."""
    return flash_attention(
        q, k, v, scale=spec.scale, is_causal=True, q_segment_ids=ids, kv_segment_ids=ids,
        implementation="xla",
    )  # fmt: skip


def portable_both(q, k, v, d_out, ids, *, spec):
    return both_by_vjp(lambda q, k, v: portable(q, k, v, ids, spec=spec), q, k, v, d_out)


def cudnn(q, k, v, *, spec):
    window = None if spec.left is None else (spec.left, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=spec.right is not None,
        local_window_size=window,
        implementation="cudnn",
    )


def both_by_vjp(f, q, k, v, d_out):
    out, pull = jax.vjp(f, q, k, v)
    return out, pull(d_out.astype(out.dtype))


def profiled(f, *args, iterations: int) -> list[float]:
    """Times of each call in milliseconds, as ``profiler.measure`` reports them.

    Raises:
        RuntimeError: the profiler lost kernel launches, as it does now and then, in every one of
            ``PROFILER_TRIES``.
    """
    assert iterations > 1, "one call's times come in another form"
    lost: Exception | None = None
    for _ in range(PROFILER_TRIES):
        try:
            times = profiler.measure(f, iterations=iterations)(*args)[1]
        except RuntimeError as error:
            if not any(word in str(error) for word in ("kernel launches", "Kernel names")):
                raise
            lost = error
        else:
            if times is not None:
                return list(times)
    raise RuntimeError(f"the profiler lost launches {PROFILER_TRIES} times over") from lost


def compiled(f, *args):
    """Ahead of time."""
    return jax.jit(f).lower(*args).compile()


def programs(case: Case) -> dict:
    """Function and operands (shapes) by direction and implementation."""
    shapes = list(jax.eval_shape(case.arrays))
    spec = case.spec
    if case.packed:
        ids = [jax.ShapeDtypeStruct((case.B, case.T), jnp.int32)]
        name, one = "xla", functools.partial(portable, spec=spec)
        both = functools.partial(portable_both, spec=spec)
    else:
        ids, name, one = [], "cudnn", functools.partial(cudnn, spec=spec)
        both = functools.partial(both_by_vjp, one)
    return {
        ("fwd", name): (one, [*shapes[:3], *ids]),
        ("fwd", "hopper"): (functools.partial(ours, spec=spec), [*shapes[:3], *ids]),
        ("fwd+bwd", name): (both, [*shapes, *ids]),
        ("fwd+bwd", "hopper"): (functools.partial(ours_both, spec=spec), [*shapes, *ids]),
    }


def measure(cases: list[Case], iterations: int, limit_s: float) -> tuple[list[dict], list[str]]:
    """Rows of all cases, and the cases for which no time was left."""
    deadline, rows, failures = time.monotonic() + limit_s, [], []

    def emit(row: dict) -> None:
        rows.append(row)
        print(row, flush=True)

    for some in itertools.batched(cases, AT_ONCE):
        if time.monotonic() > deadline:
            failures += [f"{case.name}: not done after {limit_s} s" for case in some]
            continue
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            # Nothing is timed while the compiler runs.
            jobs = {
                case: {
                    "arrays": pool.submit(compiled, case.arrays),
                    **{key: pool.submit(compiled, f, *args) for key, (f, args) in work.items()},
                }
                for case in some
                if (work := programs(case))
            }
        for case, futures in jobs.items():
            measure_case(case, futures, iterations, emit)
    return rows, failures


def measure_case(case: Case, futures: dict, iterations: int, emit) -> None:
    """One row for each compiled program, the median over interleaved rounds.

    A GPU at its power limit slows down as it warms up, which then costs none of them alone.
    """
    arrays = futures.pop("arrays").result()()
    ids = [case.segment_ids()] if case.packed else []
    times: dict[tuple[str, str], list[float]] = {}
    refused: dict[tuple[str, str], str] = {}
    for turn in range(ROUNDS):
        for (direction, implementation), future in futures.items():
            key = direction, implementation
            args = [*(arrays if direction == "fwd+bwd" else arrays[:3]), *ids]
            portable = implementation == "xla"
            if key in refused or (portable and turn):
                continue
            try:
                f = future.result()
                if portable and (seconds := seconds_of(f, *args)) > PORTABLE_LIMIT_S:
                    refused[key] = f"takes {seconds:.1f} s"
                    continue
                found = profiled(f, *args, iterations=2 if portable else iterations)
            except Exception as error:  # one implementation's refusal must not end the table
                refused[key] = repr(error)[:160]
            else:
                times.setdefault(key, []).extend(found)
    for direction, implementation in futures:
        row = {"case": case.name, "direction": direction, "implementation": implementation}
        if why := refused.get((direction, implementation)):
            emit({**row, "refused": why})
            continue
        ms = statistics.median(times[direction, implementation])
        flop = case.flop * (1 if direction == "fwd" else 3.5)
        emit({**row, "fields": case.fields(direction), "ms": ms, "tflops": flop / ms / 1e9})


def seconds_of(f, *args) -> float:
    """Seconds that a second call of ``f`` takes: the first one compiles."""
    jax.block_until_ready(f(*args))
    start = time.monotonic()
    jax.block_until_ready(f(*args))
    return time.monotonic() - start


def print_ratios(rows: list[dict]) -> None:
    """One line a case and direction: both rates, and ours over cuDNN's (XLA's where packed)."""
    rates = {(r["case"], r["direction"], r["implementation"]): r.get("tflops") for r in rows}
    for case, direction in dict.fromkeys((r["case"], r["direction"]) for r in rows):
        mine = rates.get((case, direction, "hopper"))
        other = rates.get((case, direction, "cudnn")) or rates.get((case, direction, "xla"))
        ratio = f"{mine / other:.3f}" if mine and other else "-"
        print(f"{case:36} {direction:8} {mine or 0:7.0f} {other or 0:7.0f} {ratio}", flush=True)


def print_means(rows: list[dict], dims: list[int]) -> None:
    """Geometric mean and least of ours over cuDNN on the bars' grid, per direction."""
    names = {case.name for case in grid(dims)}
    for direction in ("fwd", "fwd+bwd"):
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["direction"] == direction and row["case"] in names and "ms" in row:
                times.setdefault(row["case"], {})[row["implementation"]] = row["ms"]
        ratios = [t["cudnn"] / t["hopper"] for t in times.values() if len(t) == 2]
        if ratios:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            cases = f"{len(ratios)} of {len(names)} cases"
            print(f"{direction}: {cases}, mean {mean:.3f}, least {min(ratios):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dims", type=int, nargs="*", default=list(HEADS))
    parser.add_argument("--iterations", type=int, default=6, help="of a round")
    parser.add_argument("--limit_s", type=float, default=280, help="of all timing")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument(
        "--tune",
        nargs=argparse.REMAINDER,
        help="find this GPU's fastest tiles; what follows is the tuner's",
    )
    args = parser.parse_args()
    if args.tune is not None:
        attention_tune.main(args.tune)
        return
    result: dict = {"environment": environment()}
    rows, failures = measure([*grid(args.dims), *EXTRA, *PACKED], args.iterations, args.limit_s)
    result |= {"rows": rows, "failures": failures, "clocks_after": clocks()}
    print_ratios(rows)
    print_means(rows, args.dims)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
