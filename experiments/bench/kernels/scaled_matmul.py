"""Scaled matmuls on a Hopper GPU: errors of every form, times beside XLA's and PyTorch's.

python -m experiments.bench.kernels.scaled_matmul --out experiments/results/scaled-matmul-h200.json

"check" rows are largest errors over the sum of the terms' magnitudes, against fp32 products of the
dequantized operands; "repeats" says that a second run had the same bits. "time" rows are CUPTI
times of kernels, one process, in turns: our block-scaled kernel, XLA's per-tensor FP8 matmul
(cuBLASLt) and cuBLASLt's block-scaled one as PyTorch calls it where PyTorch is there. "variant"
rows are other tiles of the same kernel. What fails or comes after --budget seconds is recorded as
such.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import clocks
from experiments.bench.table import Table
from pallas_kernels.common.scales import Scaling, dequantized
from pallas_kernels.quantize import quantize
from pallas_kernels.scaled_matmul import scaled_matmul
from pallas_kernels.scaled_matmul.config import ScaledConfig
from pallas_kernels.scaled_matmul.hopper import scaled_matmul_hopper
from pallas_kernels.scaled_matmul.spec import make_scaled_spec
from pallas_kernels.scaled_matmul.workloads import LARGE, SMALL, ScaledWorkload

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BLOCKS = (Scaling.BLOCK_OF_ROW, Scaling.BLOCK)
TENSORS = (Scaling.TENSOR, Scaling.TENSOR)
Form = tuple[Scaling, Scaling]
ROUND_MS = 15.0  # of one contender in one round of the variants
SUSTAINED_MS = 200.0  # of the table: long enough for the chip to reach its power limit
L2_BYTES = 60e6
MOST_CALLS = 1000
PLAINLY = {"xla_gpu_autotune_level": 0}
"""Of programs that are not timed: finding the fastest form of an fp32 product takes ten seconds."""
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""Of XLA's 8-bit product: with it, XLA times dozens of Triton kernels at each shape, which takes
minutes and takes one of them in the place of cuBLASLt's."""

C = ScaledConfig
VARIANTS: dict[str, ScaledConfig] = {
    "alone": C(band=16),
    "cluster": C(cluster=2),
    "cluster, free": C(cluster=2, in_turns=False),
    "cluster, 3 stages": C(num_stages=3, num_out_slots=4, cluster=2),
    "cluster, bands of columns": C(cluster=2, band_of_columns=True),
    "128 columns, cluster": C(tile_n=128, cluster=2, num_stages=6),
}
CHECKS: dict[str, tuple[tuple[int, int, int], Form, dict[str, Any]]] = {
    "blocks": ((512, 768, 1024), BLOCKS, {}),
    "blocks, ragged": ((392, 832, 384), BLOCKS, {}),
    "blocks, e5m2 by e4m3": ((256, 256, 512), BLOCKS, {"dtypes": (E5M2, E4M3)}),
    "blocks, e4m3 by e5m2, fp16": (
        (256, 256, 512), BLOCKS, {"dtypes": (E4M3, E5M2), "out_dtype": jnp.float16},
    ),
    "rows of blocks, fp32": (
        (512, 768, 1024), (Scaling.BLOCK_OF_ROW,) * 2, {"out_dtype": jnp.float32},
    ),
    "rows of blocks, accumulated": (
        (392, 832, 384), (Scaling.BLOCK_OF_ROW,) * 2,
        {"out_dtype": jnp.float32, "accumulate": True},
    ),
    "blocks by rows of blocks": ((512, 768, 1024), BLOCKS[::-1], {}),
    "tensors": ((512, 768, 1024), TENSORS, {}),
    "rows": ((392, 832, 384), (Scaling.ROW, Scaling.ROW), {"out_dtype": jnp.float32}),
    "few rows": ((64, 4096, 7168), BLOCKS, {}),
    "a few more rows": ((128, 7168, 18432), BLOCKS, {}),
}  # fmt: skip


def operands(M: int, N: int, K: int, form: Form, dtypes=(E4M3, E4M3), seed: int = 0):
    """a, b, a_scale, b_scale of numbers whose rows and columns differ in size."""
    keys = jax.random.split(jax.random.key(seed), 4)

    @functools.partial(jax.jit, static_argnums=(2, 3, 4))
    def operand(key, size_key, rows, scaling, dtype):
        x = jax.random.normal(key, (rows, K), jnp.float32)
        size = jnp.exp2(jax.random.randint(size_key, (rows, 1), -8, 0).astype(jnp.float32))
        return quantize(x * size, scaling, dtype=dtype, implementation="xla")

    a = operand(keys[0], keys[1], M, form[0], dtypes[0])
    b = operand(keys[2], keys[3], N, form[1], dtypes[1])
    return a.values, b.values, a.scale, b.scale


def lowered_check(
    shape, form: Form, *, dtypes=(E4M3, E4M3), out_dtype=jnp.bfloat16, accumulate=False
):
    """The kernel of a check."""
    w = ScaledWorkload(M=shape[0], N=shape[1], K=shape[2])
    before = jax.ShapeDtypeStruct((w.M, w.N), jnp.float32) if accumulate else None

    def f(a, b, a_scale, b_scale, before):
        return scaled_matmul(
            a, b, a_scale, b_scale, out_dtype=out_dtype, accumulate=before, implementation="hopper"
        )

    return jax.jit(f).lower(*w.arrays(*form, dtypes), before)


@jax.jit
def products(a, b):
    """Of two matrices in fp32, and of their magnitudes."""
    product = functools.partial(jnp.einsum, "mk,nk->mn", precision="highest")
    return product(a, b), product(jnp.abs(a), jnp.abs(b))


def check(
    program, shape, form: Form, *, dtypes=(E4M3, E4M3), out_dtype=jnp.bfloat16, accumulate=False
):
    """The kernel's largest error, and whether a second run differs."""
    M, N, K = shape
    arrays = operands(M, N, K, form, dtypes)
    before = jax.random.normal(jax.random.key(9), (M, N)) if accumulate else None
    got, again = program(*arrays, before), program(*arrays, before)
    a, b, a_scale, b_scale = arrays
    sides = jax.jit(dequantized)(a, a_scale), jax.jit(dequantized)(b, b_scale)
    want, terms = products.lower(*sides).compile(compiler_options=PLAINLY)(*sides)
    if before is not None:
        want, terms = want + before, terms + jnp.abs(before)
    error = jnp.abs(got.astype(jnp.float32) - want)
    rounding = float(jnp.finfo(out_dtype).eps) / 2 * jnp.abs(want)
    return {
        "largest": float(jnp.max(error / terms)),
        "beyond_rounding": float(jnp.max((error - rounding) / terms)),
        "rms": float(jnp.linalg.norm(error) / jnp.linalg.norm(want)),
        "repeats": bool(jnp.all(got == again)),
    }


class KernelClock:
    """Times of kernels on the GPU, of any library's calls in this process."""

    def __init__(self):
        self.cupti: Any = importlib.import_module("jax_cuda13_plugin._mosaic_gpu_ext")

    def kernels(self, run: Callable[[], Any]) -> list[tuple[str, float]]:
        """Name and time of each kernel of what ``run`` calls and waits for."""
        self.cupti._cupti_init()
        try:
            run()
        finally:
            found = self.cupti._cupti_get_timings(True)
        return found

    def ms(self, call: Callable[[int], Any], wait: Callable[[Any], Any], count: int) -> list[float]:
        """Of each of ``count`` calls the sum of its kernels."""

        def run() -> None:
            # Results are dropped as they come: hundreds would not fit.
            last = None
            for i in range(count):
                last = call(i)
            wait(last)

        taken = [ms for _, ms in self.kernels(run)]
        each, rest = divmod(len(taken), count)
        assert each > 0, "the calls launched no kernel"
        assert rest == 0, f"{len(taken)} kernels of {count} calls"
        return [sum(taken[i * each : (i + 1) * each]) for i in range(count)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A call to time, with as many sets of arrays as pass through L2 before they repeat."""

    call: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    wait: Callable[[Any], Any] = jax.block_until_ready

    def once(self, i: int) -> Any:
        """The i-th call."""
        return self.call(*self.sets[i % len(self.sets)])


def in_turns(
    contenders: dict[str, Contender], rounds: int = 3, round_ms: float = ROUND_MS
) -> dict[str, float]:
    """Medians in ms."""
    clock = KernelClock()
    counts = {}
    for name, each in contenders.items():
        each.wait(each.once(0))
        first = clock.ms(each.once, each.wait, 2)
        counts[name] = max(4, min(MOST_CALLS, math.ceil(round_ms / first[1])))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, each in contenders.items():
            times[name] += clock.ms(each.once, each.wait, counts[name])
    return {name: statistics.median(taken) for name, taken in times.items()}


def num_sets(w: ScaledWorkload) -> int:
    """Whose bytes pass through L2 before one comes again; products of training do so alone."""
    return max(1, math.ceil(2 * L2_BYTES / (w.M * w.K + w.N * w.K))) if w in SMALL else 1


def ours(w: ScaledWorkload, form: Form, config: ScaledConfig | None, out_dtype=jnp.bfloat16):
    """Compiled for a shape, with tiles of its own if any are given."""
    shapes = w.arrays(*form)
    if config is None:
        f = functools.partial(scaled_matmul, implementation="hopper", out_dtype=out_dtype)
    else:

        def f(a, b, a_scale, b_scale):
            arrays = a, b, a_scale, b_scale
            spec = make_scaled_spec(*arrays, out_dtype=jnp.dtype(out_dtype), accumulate=None)
            return scaled_matmul_hopper(*arrays, None, spec=spec, config=config)

    return jax.jit(f).lower(*shapes)


def by_torch(sets: list[tuple[jax.Array, ...]]) -> Contender:
    """cuBLASLt's block-scaled matmul of the same numbers."""
    torch: Any = importlib.import_module("torch")  # not everywhere
    functional: Any = torch.nn.functional
    kinds = functional.ScalingType

    def values(x: jax.Array):
        bits = np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint8))
        return torch.from_numpy(bits.copy()).cuda().view(torch.float8_e4m3fn)

    def there(a, b, a_scale, b_scale):
        of_rows = torch.from_numpy(np.array(a_scale)).cuda().t()
        blocks = np.array(b_scale).T
        blocks = np.ascontiguousarray(np.pad(blocks, ((0, 0), (0, -blocks.shape[1] % 4))))
        return values(a), values(b).t(), of_rows, torch.from_numpy(blocks).cuda().t()

    def call(a, b, of_rows, blocks):
        return functional.scaled_mm(
            a, b, of_rows, kinds.BlockWise1x128, blocks, kinds.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    return Contender(
        call=call, sets=[there(*each) for each in sets], wait=lambda _: torch.cuda.synchronize()
    )


def compare(w: ScaledWorkload, compiled: Any, per_tensor: Any, round_ms: float) -> dict:
    """One shape, all contenders in turns."""
    sets: list[tuple[jax.Array, ...]] = [
        operands(w.M, w.N, w.K, BLOCKS, seed=i) for i in range(num_sets(w))
    ]
    scalar = jnp.float32(1.0)
    contenders = {
        "hopper": Contender(call=compiled, sets=sets),
        "xla per tensor": Contender(
            call=per_tensor, sets=[(a, b, scalar, scalar) for a, b, *_ in sets]
        ),
    }
    row: dict[str, Any] = {}
    if importlib.util.find_spec("torch"):
        contenders["torch blocks"] = by_torch(sets)
        peer = contenders["torch blocks"].once(0).float().cpu().numpy()
        mine = np.asarray(contenders["hopper"].once(0).astype(jnp.float32))
        row["difference_from_torch"] = float(np.linalg.norm(peer - mine) / np.linalg.norm(mine))
    row["xla_calls_f8"] = "cublas$lt$matmul$f8" in per_tensor.as_text()
    row["ms"] = in_turns(contenders, round_ms=round_ms)
    row["tflops"] = {name: w.flop / ms / 1e9 for name, ms in row["ms"].items()}
    row["over"] = {name: ms / row["ms"]["hopper"] for name, ms in row["ms"].items()}
    row["clocks"] = clocks()
    return row


def in_parallel(lowered: dict[Any, Any], options: dict | None = None) -> dict[Any, Any]:
    """Compiled, or the error that came of it."""

    def one(each):
        try:
            return each.compile(compiler_options=options)
        except Exception as error:  # one variant's failure must not end the table
            return error

    with ThreadPoolExecutor(12) as pool:
        return dict(zip(lowered, pool.map(one, lowered.values()), strict=True))


def usable(compiled: Any) -> Any:
    if isinstance(compiled, Exception):
        raise compiled
    return compiled


def per_tensor(w: ScaledWorkload) -> Any:
    """cuBLASLt's FP8 matmul at its fastest: scales of one, results in bf16."""

    def f(a, b, *_):
        return jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.bfloat16)

    return jax.jit(f).lower(*w.arrays(*TENSORS))


def variants(
    table: Table, shapes: list[ScaledWorkload], chosen: dict[str, ScaledConfig], round_ms: float
) -> None:
    """All tiles at a shape in turns."""
    lowered = {(w, name): ours(w, BLOCKS, c) for w in shapes for name, c in chosen.items()}
    compiled = in_parallel(lowered)
    for w in shapes:
        sets = [operands(w.M, w.N, w.K, BLOCKS, seed=i) for i in range(num_sets(w))]
        good = {}
        for name in chosen:
            program = compiled[w, name]
            if isinstance(program, Exception):
                table.rows.append({"name": f"variant {w.name} {name}", "failed": repr(program)})
                print(table.rows[-1], flush=True)
            else:
                good[name] = Contender(call=program, sets=sets)
        done: dict[str, float] = {}

        def measure(name, good=good, done=done, w=w):
            if not done:
                done.update(in_turns(good, round_ms=round_ms))
            return {"ms": done[name], "tflops": w.flop / done[name] / 1e9}

        for name in good:
            table.add(f"variant {w.name} {name}", functools.partial(measure, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=200.0)
    parser.add_argument("--parts", nargs="*", default=["check", "time"])
    parser.add_argument("--shapes", nargs="*", default=[w.name for w in (*LARGE, *SMALL)])
    parser.add_argument("--round-ms", type=float, default=SUSTAINED_MS)
    args = parser.parse_args()
    table = Table(args.out, deadline=time.monotonic() + args.budget)
    shapes = [w for w in (*LARGE, *SMALL) if w.name in args.shapes]
    if "check" in args.parts:
        programs = in_parallel(
            {name: lowered_check(*case[:2], **case[2]) for name, case in CHECKS.items()}
        )
        for name, (shape, form, options) in CHECKS.items():
            table.add(
                f"check {name} {'x'.join(map(str, shape))}",
                lambda name=name, shape=shape, form=form, options=options: check(
                    usable(programs[name]), shape, form, **options
                ),
            )
    if "variant" in args.parts:
        variants(table, [w for w in shapes if w in LARGE], VARIANTS, args.round_ms)
    if "time" in args.parts:
        lowered = {("ours", w): ours(w, BLOCKS, None) for w in shapes}
        compiled = in_parallel(lowered)
        compiled |= in_parallel({("tensor", w): per_tensor(w) for w in shapes}, WITHOUT_TRITON)
        for w in shapes:
            mine, theirs = compiled["ours", w], compiled["tensor", w]
            table.add(
                f"time {w.name}",
                lambda w=w, mine=mine, theirs=theirs: compare(
                    w, usable(mine), usable(theirs), args.round_ms
                ),
            )


if __name__ == "__main__":
    main()
