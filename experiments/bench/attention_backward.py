"""Times forms of the Hopper attention backward on a GPU: each kernel of a call, beside cuDNN's.

python -m experiments.bench.attention_backward --out backward.json

One process a case, so that they compile side by side and one that hangs ends alone; a lock lets
one at a time use the GPU. Each form's gradients are compared with fp32 arithmetic at a small shape,
beside those of the plain bf16 implementation, and with cuDNN's at the timed one.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

from experiments.bench import attention
from experiments.bench.attention import NO_MASKS, Case, compiled, times_of
from experiments.bench.environment import clocks, environment
from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.hopper import backward_by_columns, backward_by_keys
from pallas_kernels.flash_attention.hopper.config import BackwardConfig
from pallas_kernels.flash_attention.hopper.gradients import WIDEST_BY_KEYS
from pallas_kernels.flash_attention.spec import BackwardOperands

ONE_TIMING_S = 20  # longer than what is compiled meanwhile takes, so a sure hang
FORMS: dict[int, dict[str, dict]] = {
    64: {
        "late dQ": {},
        "late dQ, dS in registers": {"register_ds": True},
        "warpgroup for dQ": {"dq_warpgroup": True, "num_stages": 3, "register_ds": True},
    },
    128: {"late dQ": {}},
    256: {"by columns": {}},
}
SHAPES = (
    (4, 4096, 1, False),
    (4, 4096, 1, True),
    (8, 2048, 1, True),
    (4, 4096, 4, True),
    (4, 4096, 4, False),
)


def cases(H: int) -> list[Case]:
    """What is timed: mostly as many heads as blocks, where order matters most."""
    N = attention.HEADS[H]
    return [
        Case(B=B, T=T, N=N, K=N // group, H=H, Hv=H, causal=causal)
        for B, T, group, causal in SHAPES
    ]


def backward(case: Case, form: dict):
    """The backward of one form: q, k, v, out, lse, d_out to the gradients."""
    if case.H > WIDEST_BY_KEYS:
        f = backward_by_columns.backward
    else:
        config = BackwardConfig(**form)
        f = functools.partial(backward_by_keys.backward, config=config)

    def run(q, k, v, out, lse, d_out):
        operands = BackwardOperands(
            q=q, k=k, v=v, masks=NO_MASKS, out=out, lse=lse, d_out=d_out, d_lse=None
        )
        return f(operands, spec=case.spec)

    return run


def forward(case: Case):
    """q, k, v to out and lse."""
    return lambda q, k, v: hopper.forward(q, k, v, NO_MASKS, spec=case.spec)


def errors(got, want) -> list[float]:
    """Relative errors of each array."""
    return [round(attention.relative(g, w), 5) for g, w in zip(got, want, strict=True)]


alone = functools.partial(attention.alone, limit_s=ONE_TIMING_S)


def check(H: int, lock: pathlib.Path, emit) -> None:
    """Each distinct kernel against fp32, beside twice the plain bf16 implementation's error."""
    for causal in (False, True):
        case = Case(B=2, T=1000, N=4, K=2, H=H, Hv=H, causal=causal)
        with alone(lock):
            q, k, v, d_out = case.arrays()
            exact = [x.astype(jnp.float32) for x in (q, k, v, d_out)]
            plain = functools.partial(attention.plain, spec=case.spec)
            both = jax.jit(functools.partial(attention.both_by_vjp, plain))
            want, rough = both(*exact)[1], both(q, k, v, d_out)[1]
            operands = (q, k, v, *jax.jit(forward(case))(q, k, v), d_out)
        for name, form in FORMS[H].items():
            f = compiled(backward(case, form), *operands)
            with alone(lock):
                got = f(*operands)
                emit(check=case.name, form=name, errors=errors(got, want),
                     limits=[2 * e for e in errors(rough, want)])  # fmt: skip


def measure(case: Case, lock: pathlib.Path, emit) -> None:
    """Compiles everything, then times it."""
    jobs = {}
    forms = FORMS[case.H]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        q, k, v, d_out = jax.eval_shape(case.arrays)
        lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
        library = functools.partial(
            attention.both_by_vjp, functools.partial(attention.cudnn, spec=case.spec)
        )
        jobs["cudnn"] = pool.submit(compiled, library, q, k, v, d_out)
        jobs["forward"] = pool.submit(compiled, forward(case), q, k, v)
        for name, form in forms.items():
            jobs[name] = pool.submit(compiled, backward(case, form), q, k, v, d_out, lse, d_out)
    print(f"{case.name} compiled at {time.monotonic() - START:.0f} s", flush=True)
    with alone(lock):
        q, k, v, d_out = case.arrays()
        library = jobs["cudnn"].result()
        operands = (q, k, v, *jobs["forward"].result()(q, k, v), d_out)
        want = library(q, k, v, d_out)[1]
        parts = times_of(library, q, k, v, d_out)
        bare = {name: ms for name, ms in parts.items() if "fprop" not in name}
        emit(case=case.name, form="cudnn", ms=sum(bare.values()), parts=parts)
    for name in forms:
        if error := jobs[name].exception():
            emit(case=case.name, form=name, refused=repr(error)[:300])
            continue
        f = jobs[name].result()
        with alone(lock):
            off = errors(f(*operands), want)
            parts = times_of(f, *operands)
            tflops = 2.5 * case.flop / sum(parts.values()) / 1e9
            emit(case=case.name, form=name, ms=sum(parts.values()), tflops=tflops,
                 off_cudnn=off, parts=parts)  # fmt: skip


START = time.monotonic()


def one_process(H: int, part: int, out: pathlib.Path, lock: pathlib.Path) -> None:
    """A process's work; every row is on disk before the next is measured."""
    rows = []

    def emit(**row):
        rows.append(row)
        out.write_text(json.dumps(rows))
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(short, flush=True)

    if part < len(SHAPES):
        measure(cases(H)[part], lock, emit)
    else:
        check(H, lock, emit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="*", default=[128, 256, 64])
    parser.add_argument("--limit_s", type=float, default=85)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        one_process(args.dims[0], args.part, args.out, args.lock)
        return
    folder = pathlib.Path(tempfile.mkdtemp())
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "experiments.bench.attention_backward"]
    children = {}
    for H, part in itertools.product(args.dims, range(len(SHAPES) + 1)):
        path = folder / f"{H}-{part}.json"
        flags = {"dims": H, "part": part, "out": path, "lock": folder / "lock"}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        children[path] = subprocess.Popen([*command, *words], env=env)
    rows = []
    for path, child in children.items():
        try:
            code = child.wait(max(0.1, args.limit_s - (time.monotonic() - START)))
        except subprocess.TimeoutExpired:
            child.kill()
            code = "out of time"
        if code:
            print(f"{path.name}: {code}", flush=True)
        rows += json.loads(path.read_text()) if path.exists() else []
    if args.out:
        result = {"environment": environment(), "clocks_after": clocks(), "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
