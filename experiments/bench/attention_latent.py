"""Times orders of the loop of the backward of heads of 192/128, in turns in one process on a GPU.

python -m experiments.bench.attention_latent --out latent.json

Each form's gradients are held to fp32 arithmetic first, within twice the error of the plain bf16
implementation, and to the form in use at the timed shapes. A form that is wrong is not timed. The
rate of a backward counts 2.5 times its forward's FLOPs, as ``attention_backward`` does.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp

from experiments.bench import attention
from experiments.bench.attention import NO_MASKS, Case, compiled, times_of
from experiments.bench.environment import clocks, environment
from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.hopper import gradients
from pallas_kernels.flash_attention.hopper.config import ColumnsConfig
from pallas_kernels.flash_attention.spec import BackwardOperands

IN_USE = "each product in its turn"
FORMS = {IN_USE: ColumnsConfig(), "dQ late, scores early": ColumnsConfig(ahead=True)}
LATENT = functools.partial(Case, H=192, Hv=128)
CHECKED = tuple(
    LATENT(B=2, T=1000, N=4, K=K, causal=causal) for K, causal in ((4, True), (2, True), (4, False))
)
TIMED = (
    LATENT(B=2, T=8192, N=32, K=32, causal=True),
    LATENT(B=4, T=4096, N=16, K=16, causal=True),
    LATENT(B=4, T=4096, N=16, K=16, causal=False),
)
REPEATS = 2


def backward(case: Case, form: ColumnsConfig):
    """q, k, v, out, lse, d_out to the gradients of q, k and v."""

    def run(q, k, v, out, lse, d_out):
        o = BackwardOperands(
            q=q, k=k, v=v, masks=NO_MASKS, out=out, lse=lse, d_out=d_out, d_lse=None
        )
        found = gradients.backward(o, spec=case.spec, deterministic=False, config=form)
        return found.dq, found.dk, found.dv

    return run


def forward(case: Case):
    """q, k, v to out and lse."""
    return lambda q, k, v: hopper.forward(q, k, v, NO_MASKS, spec=case.spec)


def compile_all(
    case: Case, pool: concurrent.futures.Executor
) -> dict[str, concurrent.futures.Future]:
    """Programs of a case by form; "forward" is its forward."""
    q, k, v, d_out = jax.eval_shape(case.arrays)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    out = jax.ShapeDtypeStruct((*q.shape[:3], case.Hv), q.dtype)
    jobs = {"forward": pool.submit(compiled, forward(case), q, k, v)}
    for name, form in FORMS.items():
        jobs[name] = pool.submit(compiled, backward(case, form), q, k, v, out, lse, d_out)
    return jobs


def errors(got, want) -> list[float]:
    """Relative errors of dQ, dK and dV."""
    return [round(attention.relative(g, w), 5) for g, w in zip(got, want, strict=True)]


def check(case: Case, jobs) -> list[dict]:
    """A row for each form: errors against fp32, and their limits."""
    arrays = case.arrays()
    q, k, v, d_out = arrays
    plain = functools.partial(attention.plain, spec=case.spec)
    both = jax.jit(functools.partial(attention.both_by_vjp, plain))
    want = both(*(x.astype(jnp.float32) for x in arrays))[1]
    limits = [2 * e for e in errors(both(*arrays)[1], want)]
    operands = (q, k, v, *jobs["forward"].result()(q, k, v), d_out)
    rows = []
    for name in FORMS:
        off = errors(jobs[name].result()(*operands), want)
        right = all(e <= limit for e, limit in zip(off, limits, strict=True))
        rows.append(dict(case=case.name, form=name, errors=off, limits=limits, right=right))
        print(f"{case.name:34} {name:26} {off} of {limits} {'' if right else 'WRONG'}", flush=True)
    return rows


def measure(case: Case, jobs, names: list[str]) -> list[dict]:
    """A row for the forward and for each form and repeat."""
    q, k, v, d_out = case.arrays()
    forward_ms = sum(times_of(jobs["forward"].result(), q, k, v).values())
    operands = (q, k, v, *jobs["forward"].result()(q, k, v), d_out)
    want = jobs[IN_USE].result()(*operands)
    rows = []
    for repeat in range(REPEATS):
        for name in names:
            off = errors(jobs[name].result()(*operands), want)
            parts = times_of(jobs[name].result(), *operands)
            ms = sum(parts.values())
            both = 3.5 * case.flop / (ms + forward_ms) / 1e9
            rows.append(
                dict(case=case.name, form=name, repeat=repeat, ms=ms, forward_ms=forward_ms,
                     backward_tflops=2.5 * case.flop / ms / 1e9, both_tflops=both,
                     off_in_use=off, parts=parts)
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit_s", type=float, default=50, help="no case begins after it")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {case: compile_all(case, pool) for case in (*CHECKED, *TIMED)}
        checks = [row for case in CHECKED for row in check(case, jobs[case])]
        wrong = {row["form"] for row in checks if not row["right"]}
        rows = []
        for case in TIMED:
            if time.monotonic() - start < args.limit_s:
                rows += measure(case, jobs[case], [name for name in FORMS if name not in wrong])
    for row in rows:
        print(
            f"{row['case']:34} {row['form']:26} {row['ms']:.3f} ms"
            f" {row['backward_tflops']:.0f} TFLOP/s, with the forward {row['both_tflops']:.0f}"
        )
    if args.out:
        result = {"environment": environment(), "clocks_after": clocks(), "checks": checks}
        args.out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"wrong gradients: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
