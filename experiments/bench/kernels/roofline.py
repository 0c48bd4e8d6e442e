"""This device's ceilings, and where our kernels stand under them.

    jaxinfra bench roofline --out experiments/results/roofline-h200.json

Ceilings are what XLA's own programs reach: a large matmul in each format, a copy, a sum. Times are
medians of kernel times. The picture is written beside the JSON. An operation that fails, or comes
after --budget seconds, is a row that says so.
"""

import dataclasses
import functools
import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench import timing
from experiments.bench.environment import environment
from experiments.bench.harness import options
from experiments.bench.kernels import roofline_work as roofline
from experiments.bench.kernels.roofline_work import Point
from experiments.bench.table import Table
from experiments.ladder import RUNGS, elementwise
from experiments.pictures.roofline import draw
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import ridge
from pallas_kernels import rms_norm, softmax
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.flash_attention import hopper as attention
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec, BackwardOperands

THREADS = "fp32"  # multiply-adds of the threads themselves, no tensor cores


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Problem sizes of the measured operations."""

    matmul: int = 8192
    rung: int = 4096
    copied: int = 1 << 28  # fp32 elements
    batch: int = 4
    length: int = 4096
    tokens: int = 16_384
    width: int = 2048
    vocab: int = 128_256
    rows: tuple[int, int] = (8192, 32_768)


SMALL = Sizes(
    matmul=256, rung=256, copied=1 << 16, batch=1, length=256, tokens=64, width=64, vocab=512,
    rows=(64, 1024),
)  # fmt: skip


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def seconds(f: Callable, *args: Any) -> float:
    """Seconds that the kernels of one call take."""
    return timing.measure({"it": (f, args)}, rounds=2, iterations=4)["it"].median_ms / 1e3


def peaks(sizes: Sizes) -> Iterator[tuple[str, Callable[[], float]]]:
    """FLOP/s by format and bytes/s, each by the best of XLA's programs for it."""
    n = sizes.matmul
    flops = 2.0 * n**3

    def rate(matmul: Callable, dtype: Any) -> float:
        a, b = random(0, n, n, dtype=dtype), random(1, n, n, dtype=dtype)
        # The libraries' products: to try all of Triton's takes minutes.
        libraries = {"xla_gpu_enable_triton_gemm": False}
        return flops / seconds(jax.jit(matmul, compiler_options=libraries), a, b)

    def float32(preset: lax.DotAlgorithmPreset) -> Callable:
        return lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=preset)

    def fp8(a, b):
        return lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(jnp.bfloat16)

    def fp8_scaled(a, b):
        a, b = a.astype(jnp.bfloat16) * jnp.bfloat16(0.5), b.astype(jnp.bfloat16) * jnp.bfloat16(2)
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())))

    def copied() -> float:
        x = random(0, sizes.copied, dtype=jnp.float32)
        return 2 * x.nbytes / seconds(lambda x: x + 1, x)

    def read() -> float:
        x = random(0, sizes.copied, dtype=jnp.float32)
        return x.nbytes / seconds(jnp.sum, x)

    yield "bf16", lambda: rate(jnp.matmul, jnp.bfloat16)
    yield "fp8", lambda: max(rate(each, jnp.float8_e4m3fn) for each in (fp8, fp8_scaled))
    yield "tf32", lambda: rate(float32(lax.DotAlgorithmPreset.TF32_TF32_F32), jnp.float32)
    yield THREADS, lambda: rate(float32(lax.DotAlgorithmPreset.F32_F32_F32), jnp.float32)
    yield "copy", copied
    yield "read", read


def rungs(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Point]]]:
    n = sizes.rung
    for rung in RUNGS:

        def point(rung=rung) -> Point:
            a, b = random(0, n, n), random(1, n, n)
            return Point(
                name=rung.name, group="ladder", work=roofline.matmul_work(n, n, n),
                seconds=seconds(rung.matmul, a, b),
                compute="bf16" if rung.tensor_cores else THREADS,
            )  # fmt: skip

        yield f"ladder {rung.name}", point


def kernels(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Point]]]:
    """Our fused kernels at the shapes of their bars."""
    B, T, N, K, H = sizes.batch, sizes.length, 32, 8, 128
    shape = {"batch": B, "length": T, "q_heads": N, "kv_heads": K, "width": H, "causal": True}
    spec, masks = AttentionSpec(scale=H**-0.5, right=0), AttentionMasks()

    def forward(q, k, v):
        return attention.forward(q, k, v, masks, spec=spec)

    def backward(q, k, v, out, lse, d_out):
        operands = BackwardOperands(
            q=q, k=k, v=v, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=None
        )
        return attention.backward(operands, spec=spec)[:3]

    def operands() -> tuple[jax.Array, ...]:
        return random(0, B, T, N, H), random(1, B, T, K, H), random(2, B, T, K, H)

    def attention_forward() -> Point:
        work = roofline.attention_work(**shape)
        return Point(
            name="attention", group="kernel", work=work, seconds=seconds(forward, *operands())
        )

    def attention_backward() -> Point:
        q, k, v = operands()
        out, lse = jax.jit(forward)(q, k, v)
        return Point(
            name="attention backward", group="kernel",
            work=roofline.attention_backward_work(**shape),
            seconds=seconds(backward, q, k, v, out, lse, random(3, B, T, N, H)),
        )  # fmt: skip

    def loss() -> Point:
        hidden, table = random(0, 1, sizes.tokens, sizes.width), random(1, sizes.vocab, sizes.width)
        targets = jax.random.randint(jax.random.key(2), (1, sizes.tokens), 0, sizes.vocab)
        weights = jnp.ones((1, sizes.tokens))

        def both(hidden, table):
            return jax.value_and_grad(
                lambda h, t: linear_cross_entropy(h, t, targets, weights).total, argnums=(0, 1)
            )(hidden, table)

        work = roofline.linear_cross_entropy_work(
            tokens=sizes.tokens, width=sizes.width, vocab=sizes.vocab
        )
        taken = seconds(both, hidden / sizes.width**0.5, table)
        return Point(name="linear + cross entropy", group="kernel", work=work, seconds=taken)

    def rowwise(name: str, f: Callable, *, streams: int, flops_each: float) -> Point:
        R, C = sizes.rows
        inputs = [random(i, R, C) for i in range(streams // 2)]
        work = roofline.elementwise_work(R * C, streams=streams, flops_each=flops_each)
        return Point(
            name=name, group="kernel", work=work, seconds=seconds(f, *inputs), compute=THREADS
        )

    yield "attention", attention_forward
    yield "attention backward", attention_backward
    yield "linear + cross entropy", loss
    # Maximum, difference, exponential, sum, quotient; square, sum, two products; and so on.
    yield "softmax", lambda: rowwise("softmax", softmax, streams=2, flops_each=5)
    scale = random(9, sizes.rows[1], dtype=jnp.float32)
    yield (
        "rms_norm",
        lambda: rowwise(
            "rms_norm", lambda x: rms_norm(x, scale, epsilon=1e-6), streams=2, flops_each=4
        ),
    )
    yield (
        "elu and gradient",
        lambda: rowwise("elu and gradient", elementwise.elu_and_gradient, streams=4, flops_each=5),
    )


def main() -> None:
    """Measures ceilings first: everything else is placed under them."""
    parser = options(__doc__, budget=600.0)
    parser.add_argument("--device", default="h200", help="whose datasheet stands beside")
    parser.add_argument("--small", action="store_true", help="sizes for a check on a CPU")
    args = parser.parse_args()
    sizes, datasheet = SMALL if args.small else Sizes(), find_device(args.device)
    table = Table(out=None, deadline=time.monotonic() + args.budget, only=args.only)
    ceilings: dict[str, float] = {}
    for name, measure in peaks(sizes):
        found = table.add(f"ceiling {name}", lambda measure=measure: {"per_s": measure()})
        if "per_s" in found:
            ceilings[name] = found["per_s"]
    bandwidth = max(ceilings["copy"], ceilings["read"])
    measured = roofline.with_ceilings(
        datasheet,
        flops={k: v for k, v in ceilings.items() if k not in ("copy", "read")},
        hbm_bytes_per_s=bandwidth,
    )

    def row(measure: Callable[[], Point]) -> dict[str, Any]:
        point = measure()
        found = {name: x for name, x in point.as_json(measured).items() if name != "name"}
        peak = datasheet.flops.get(point.compute)
        if peak is not None:
            flops = point.work.flops
            found["of_datasheet"] = roofline.mfu(flops, seconds=point.seconds, peak_flops=peak)
        return found

    points = Table(out=None, deadline=table.deadline, only=args.only)
    for name, measure in [*kernels(sizes), *rungs(sizes)]:
        points.add(name.removeprefix("ladder "), functools.partial(row, measure))
        gc.collect()
    document = {
        **environment(), "ceilings": ceilings, "points": points.rows, "ridge": ridge(measured),
        "datasheet": {"flops": dict(datasheet.flops), "hbm_bytes_per_s": datasheet.hbm_bytes_per_s},
    }  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
        draw(document, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
