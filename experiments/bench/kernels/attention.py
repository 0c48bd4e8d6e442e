"""Flash attention on a Hopper GPU: error against fp32, and time beside cuDNN in one process.

python -m experiments.bench.kernels.attention --check --time \\
    --out experiments/results/attention-h200.json
python -m experiments.bench.kernels.attention --tune --widths 128/128

FLOPs of causal cases count half; a backward counts 2.5 forwards; kernel times, medians. Processes
compile side by side and use the GPU in turn; a refusal or a hang ends one of them.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import fcntl
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
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


def plain(q, k, v, *, spec):
    """Attention from the definition in the dtype of its arguments, with fp32 softmax."""
    (B, T, N, H), K = q.shape, k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest").astype(jnp.float32)
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    seen = distance >= 0 if spec.right == 0 else jnp.ones_like(distance, bool)
    seen &= True if spec.left is None else distance <= spec.left
    p = jax.nn.softmax(jnp.where(seen[None, None, None], s * spec.scale, -jnp.inf))
    return jnp.einsum("bkgts,bskh->btkgh", p.astype(q.dtype), v, precision="highest").reshape(
        B, T, N, -1
    )


def relative(got, want) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(cases: list[Case]) -> list[dict]:
    """Errors against fp32, beside those of the plain bf16 implementation."""
    rows = []
    for case in cases:
        arrays = case.arrays()
        arrays[0] = arrays[0].at[:, ::97].mul(8)  # outliers
        exact = [x.astype(jnp.float32) for x in arrays]
        f = functools.partial(plain, spec=case.spec)
        want = jax.tree.leaves(jax.jit(functools.partial(both_by_vjp, f))(*exact))
        rough = jax.tree.leaves(jax.jit(functools.partial(both_by_vjp, f))(*arrays))
        both = jax.jit(functools.partial(ours_both, spec=case.spec))
        got = jax.tree.leaves(both(*arrays))
        errors = [relative(g, w) for g, w in zip(got, want, strict=True)]
        limits = [2 * relative(r, w) for r, w in zip(rough, want, strict=True)]
        ok = all(e <= limit for e, limit in zip(errors, limits, strict=True))
        rows.append({"case": case.name, "errors": errors, "limits": limits, "ok": ok})
        print(rows[-1], flush=True)
    return rows


def profiled(f, *args, iterations: int, aggregate: bool = True) -> list:
    """``profiler.measure``'s times of each call, or of each kernel of each call.

    Raises:
        RuntimeError: the profiler lost kernel launches, as it does now and then, in every one of
            ``PROFILER_TRIES``.
    """
    assert iterations > 1, "one call's times come in another form"
    lost: Exception | None = None
    for _ in range(PROFILER_TRIES):
        try:
            times = profiler.measure(f, iterations=iterations, aggregate=aggregate)(*args)[1]
        except RuntimeError as error:
            if not any(word in str(error) for word in ("kernel launches", "Kernel names")):
                raise
            lost = error
        else:
            if times is not None:
                return list(times)
    raise RuntimeError(f"the profiler lost launches {PROFILER_TRIES} times over") from lost


def milliseconds(f, *args, iterations: int) -> float:
    """Median kernel time of a call."""
    return statistics.median(profiled(f, *args, iterations=iterations))


def times_of(f, *args, iterations: int = 8) -> dict[str, float]:
    """Median time of each kernel of a call in ms, by its place and name."""
    runs = profiled(f, *args, iterations=iterations, aggregate=False)
    names = [name for name, _ in runs[0]]
    return {
        f"{i}:{name[:80]}": statistics.median(run[i][1] for run in runs)
        for i, name in enumerate(names)
    }


@contextlib.contextmanager
def alone(lock: pathlib.Path, limit_s: float):
    """The GPU to itself, and an end to this process if that lasts too long."""
    with lock.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


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


def measure(cases: list[Case], iterations: int, lock: pathlib.Path, emit) -> None:
    """Compiles everything in the background; times each case when its programs are there."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {
            case: {
                "arrays": pool.submit(compiled, case.arrays),
                **{key: pool.submit(compiled, f, *args) for key, (f, args) in work.items()},
            }
            for case in cases
            if (work := programs(case))
        }
        for case, futures in jobs.items():
            concurrent.futures.wait(futures.values())
            with alone(lock, limit_s=60):
                measure_case(case, futures, iterations, emit)


def measure_case(case: Case, futures: dict, iterations: int, emit) -> None:
    """One row for each compiled program, the median over rounds in which they take turns.

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
    """Of a second call."""
    jax.block_until_ready(f(*args))
    start = time.monotonic()
    jax.block_until_ready(f(*args))
    return time.monotonic() - start


def parts(dims: list[int]) -> list[list[Case]]:
    """The cases of each process, slowest to compile first; a window beside the call without it."""
    quarters = [
        [c for c in grid([H]) if c.causal == causal and (c.K < c.N) == grouped]
        for H in dims
        for causal in (True, False)
        for grouped in (True, False)
    ]
    alone = []
    for case in (*EXTRA, *PACKED):
        whole = dataclasses.replace(case, window=None)
        homes = [cases for cases in quarters if whole in cases]
        (homes[0] if homes and case.window else alone).append(case)
    return [*quarters, *([case] for case in alone)]


def measure_part(part: int, dims: list[int], iterations: int, out: pathlib.Path) -> None:
    """One process's cases; every row is on disk before the next is measured."""
    rows: list[dict] = []

    def emit(row: dict) -> None:
        rows.append(row)
        out.write_text(json.dumps(rows))

    lock = out.parent / f"lock-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    measure(parts(dims)[part], iterations, lock, emit)


def measure_all(
    dims: list[int], iterations: int, limit_s: float, gpus: list[str]
) -> tuple[list[dict], list[str]]:
    """Rows of all processes, and a line for each that did not end well.

    Each process has one of ``gpus``; what is compared is measured by one process.
    """
    start = time.monotonic()
    folder = pathlib.Path(tempfile.mkdtemp())
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    base = [sys.executable, "-m", "experiments.bench.kernels.attention", "--dims", *map(str, dims)]
    children = {}
    for part in range(len(parts(dims))):
        out = folder / f"{part}.json"
        flags = ["--part", str(part), "--out", str(out), "--iterations", str(iterations)]
        own = {"CUDA_VISIBLE_DEVICES": gpus[part % len(gpus)]} if gpus else {}
        children[out] = subprocess.Popen([*base, *flags], env=env | own)
    rows, failures = [], []
    for part, (out, child) in enumerate(children.items()):
        try:
            code = child.wait(max(0.1, limit_s - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            child.kill()
            code = f"not done after {limit_s} s"
        if code:
            failures.append(f"{', '.join(c.name for c in parts(dims)[part])}: {code}")
        rows += json.loads(out.read_text()) if out.exists() else []
    print(f"measured in {time.monotonic() - start:.0f} s", *failures, sep="\n", flush=True)
    return rows, failures


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--dims", type=int, nargs="*", default=list(HEADS))
    parser.add_argument("--iterations", type=int, default=6, help="of a round")
    parser.add_argument("--limit_s", type=float, default=280, help="of all timing")
    parser.add_argument("--gpus", nargs="*", default=[], help="share the cases out: 0 1 2")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--tune",
        nargs=argparse.REMAINDER,
        help="find this GPU's fastest tiles and keep them; what follows is the tuner's",
    )
    args = parser.parse_args()
    if args.tune is not None:
        attention_tune.main(args.tune)
        return
    if args.part is not None:
        measure_part(args.part, args.dims, args.iterations, args.out)
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share the GPU
    result: dict = {"environment": environment()}
    if args.check:
        small = [
            Case(B=2, T=1000, N=4, K=2, H=H, Hv=H, causal=causal, window=window)
            for H in args.dims
            for causal, window in ((False, None), (True, None), (True, 300))
        ]
        result["errors"] = check(small)
    if args.time:
        rows, failures = measure_all(args.dims, args.iterations, args.limit_s, args.gpus)
        result |= {"rows": rows, "failures": failures, "clocks_after": clocks()}
        print_ratios(rows)
        print_means(rows, args.dims)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
