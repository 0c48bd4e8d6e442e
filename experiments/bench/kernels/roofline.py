"""This device's ceilings, and where our kernels and models stand under them.

    jaxinfra bench roofline --out experiments/results/roofline-h200.json

Ceilings are what XLA's own programs reach: a large matmul in each format, a copy, a sum. Times are
medians of CUPTI kernel times, of models too: the gaps between their kernels are in ``wall_ms``.
Beside the JSON lies the picture. An operation that fails is a row with its error. Results are
printed and stored one by one; an item that would begin after the budget is a row that says so.
"""

import argparse
import concurrent.futures
import dataclasses
import gc
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench.environment import clocks, environment
from experiments.bench.kernels import roofline_work as roofline
from experiments.bench.kernels.roofline_models import CLOCK, phases, random, served
from experiments.bench.kernels.roofline_work import Point
from experiments.ladder import RUNGS, elementwise
from experiments.pictures.roofline import draw
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.inference import ridge
from pallas_kernels.flash_attention import hopper as attention
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec, BackwardOperands
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.norm import hopper as norm
from pallas_kernels.softmax import hopper as softmax

THREADS = "fp32"  # multiply-adds of the threads themselves, no tensor cores


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How large everything is."""

    matmul: int = 8192
    rung: int = 4096
    copied: int = 1 << 28  # fp32 elements
    batch: int = 4
    length: int = 4096
    tokens: int = 16_384
    width: int = 2048
    vocab: int = 128_256
    rows: tuple[int, int] = (8192, 32_768)
    model: str = "llama32_1b"
    prompts: tuple[tuple[int, int], ...] = ((1, 128), (1, 2048), (8, 2048))  # batch, length
    decodes: tuple[tuple[int, int], ...] = ((1, 2048), (16, 2048), (64, 2048))  # batch, context


SMALL = Sizes(
    matmul=256, rung=256, copied=1 << 16, batch=1, length=256, tokens=64, width=64, vocab=512,
    rows=(64, 1024), model="tiny", prompts=((1, 32),), decodes=((2, 32),),
)  # fmt: skip


def peaks(sizes: Sizes) -> Iterator[tuple[str, Callable[[], float]]]:
    """FLOP/s by format and bytes/s, each by the best of XLA's programs for it."""
    n = sizes.matmul
    flops = 2.0 * n**3

    def rate(matmul: Callable, dtype: Any) -> float:
        a, b = random(0, n, n, dtype=dtype), random(1, n, n, dtype=dtype)
        # The libraries' products: to try all of Triton's takes minutes.
        options = {"xla_gpu_enable_triton_gemm": False}
        return flops / CLOCK.seconds(jax.jit(matmul, compiler_options=options), a, b)

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
        return 2 * x.nbytes / CLOCK.seconds(lambda x: x + 1, x)

    def read() -> float:
        x = random(0, sizes.copied, dtype=jnp.float32)
        return x.nbytes / CLOCK.seconds(jnp.sum, x)

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
                seconds=CLOCK.seconds(rung.matmul, a, b),
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
            name="attention", group="kernel", work=work, seconds=CLOCK.seconds(forward, *operands())
        )

    def attention_backward() -> Point:
        q, k, v = operands()
        out, lse = jax.jit(forward)(q, k, v)
        return Point(
            name="attention backward", group="kernel",
            work=roofline.attention_backward_work(**shape),
            seconds=CLOCK.seconds(backward, q, k, v, out, lse, random(3, B, T, N, H)),
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
        taken = CLOCK.seconds(both, hidden / sizes.width**0.5, table)
        return Point(name="linear + cross entropy", group="kernel", work=work, seconds=taken)

    def rowwise(name: str, f: Callable, *, streams: int, flops_each: float) -> Point:
        R, C = sizes.rows
        inputs = [random(i, R, C) for i in range(streams // 2)]
        work = roofline.elementwise_work(R * C, streams=streams, flops_each=flops_each)
        return Point(
            name=name, group="kernel", work=work, seconds=CLOCK.seconds(f, *inputs), compute=THREADS
        )

    yield "attention", attention_forward
    yield "attention backward", attention_backward
    yield "linear + cross entropy", loss
    # Maximum, difference, exponential, sum, quotient; square, sum, two products; and so on.
    yield "softmax", lambda: rowwise("softmax", softmax.softmax, streams=2, flops_each=5)
    scale = random(9, sizes.rows[1], dtype=jnp.float32)
    yield (
        "rms_norm",
        lambda: rowwise(
            "rms_norm", lambda x: norm.rms_norm(x, scale, epsilon=1e-6), streams=2, flops_each=4
        ),
    )
    yield (
        "elu and gradient",
        lambda: rowwise("elu and gradient", elementwise.elu_and_gradient, streams=4, flops_each=5),
    )


class Results:
    """Everything found so far, on disk after every item."""

    def __init__(self, out: pathlib.Path | None, budget_s: float) -> None:
        self._out = out
        self._start = time.monotonic()
        self._budget_s = budget_s
        self.document: dict[str, Any] = {**environment(), "ceilings": {}, "points": []}

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """What an item gives, or None and a row that says why not."""
        try:
            if self.elapsed_s() > self._budget_s:
                raise TimeoutError(f"out of time: {self._budget_s:.0f} s")
            return measure()
        except Exception as error:  # one item's failure must not end the table
            self.document["points"].append({"name": name, "failed": repr(error)[:300]})
            print(f"{name}: {repr(error)[:300]}", flush=True)
            return None
        finally:
            gc.collect()

    def elapsed_s(self) -> float:
        """Since the first item, compilation and all."""
        return time.monotonic() - self._start

    def write(self) -> None:
        """What there is so far."""
        if self._out is not None:
            self.document["clocks_after"] = clocks()
            self._out.write_text(json.dumps(self.document, indent=1) + "\n")


def compile_all(sizes: Sizes, device: Device) -> None:
    """Side by side: the compiler tries matmuls on the device, beside which nothing is timed."""
    served(sizes.model)
    items = [
        *peaks(sizes), *kernels(sizes), *rungs(sizes),
        *phases(device, sizes.model, prompts=sizes.prompts, decodes=sizes.decodes),
    ]  # fmt: skip
    with CLOCK.compiling_only(), ThreadPoolExecutor(8) as pool:
        # What cannot be compiled says so when its turn comes.
        concurrent.futures.wait([pool.submit(measure) for _, measure in items])


def main() -> None:
    """Ceilings first: everything else is placed under them."""
    parser = argparse.ArgumentParser(prog="jaxinfra bench roofline", description=__doc__)
    parser.add_argument("--device", default="h200", help="whose datasheet stands beside")
    parser.add_argument("--small", action="store_true", help="sizes for a check on a CPU")
    parser.add_argument("--budget-s", type=float, default=600.0)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file; the picture is beside it")
    args = parser.parse_args()
    sizes = SMALL if args.small else Sizes()
    results, datasheet = Results(args.out, args.budget_s), find_device(args.device)
    compile_all(sizes, datasheet)
    print(f"compiled {results.elapsed_s():5.0f} s", flush=True)
    ceilings: dict[str, float] = results.document["ceilings"]
    for name, measure in peaks(sizes):
        found = results.attempt(f"ceiling {name}", measure)
        if found is not None:
            ceilings[name] = found
            print(f"{name:8s} {found / 1e12:9.3f} T/s {results.elapsed_s():5.0f} s", flush=True)
            results.write()
    bandwidth = max(ceilings["copy"], ceilings["read"])
    measured = roofline.with_ceilings(
        datasheet,
        flops={k: v for k, v in ceilings.items() if k not in ("copy", "read")},
        hbm_bytes_per_s=bandwidth,
    )
    results.document |= {
        "ridge": ridge(measured),
        "datasheet": {"flops": dict(datasheet.flops), "hbm_bytes_per_s": datasheet.hbm_bytes_per_s},
    }

    def add(point: Point, **more: Any) -> None:
        row = {**point.as_json(measured), **more}
        peak = datasheet.flops.get(point.compute)
        if peak is not None:
            row["of_datasheet"] = roofline.mfu(
                point.work.flops, seconds=point.seconds, peak_flops=peak
            )
        results.document["points"].append(row)
        print(
            f"{row['name']:34s} {row['intensity']:9.2f} FLOP/byte {row['tflops']:9.3f} TFLOP/s "
            f"{row['of_attainable']:6.1%} of the roof ({row['bound']}) "
            f"{results.elapsed_s():5.0f} s",
            flush=True,
        )
        results.write()

    def add_all(items: Iterator[tuple[str, Callable[[], Point]]]) -> None:
        for name, measure in items:
            point = results.attempt(name, measure)
            if point is not None:
                add(point)

    add_all(kernels(sizes))
    for name, measure in phases(
        datasheet, sizes.model, prompts=sizes.prompts, decodes=sizes.decodes
    ):
        found = results.attempt(name, measure)
        if found is not None:
            add(found["point"], wall_ms=found["wall_ms"])
    # Last: the ladder's own benchmark has them too.
    add_all(rungs(sizes))
    results.write()
    if args.out is not None:
        draw(results.document, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
