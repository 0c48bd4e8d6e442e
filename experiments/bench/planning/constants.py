"""Measures the constants of the planner's cost model on this machine's GPU.

    jaxinfra bench constants        # minutes; jaxinfra plan then reads what it wrote

Rates of matmuls by shape, of elementwise passes, of attention by head width and length, and the
time of the smallest kernel; links come from ``jaxinfra bench collectives``. Each operation runs
back to back for a while, on random operands, so that the power limit acts as it does in a step.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.environment import clocks, environment
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.attention import attention
from jaxinfra.ops.multiply import multiply
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.operations import PlannedMatmul
from jaxinfra.planning.step import matmul_s

COMPUTE, ACCUM = jnp.dtype("bfloat16"), jnp.dtype("float32")

# Tokens, width and hidden width of mlps that are trained: Llama-3.2-1B, Llama-3-8B, 70B over 8.
SHAPES = ((16_384, 2048, 8192), (16_384, 4096, 14_336), (8192, 8192, 3584))
WIDTHS = {64: (32, 8), 128: (32, 8), 256: (16, 8)}
LENGTHS = ((4, 4096), (1, 16_384))
_TINY = 200


def seconds(run: Callable[[], Any], *, budget_s: float) -> float:
    """Seconds per call, queued behind others of its kind for about ``budget_s``."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    jax.block_until_ready([run() for _ in range(3)])
    count = max(3, int(budget_s / max((time.perf_counter() - begin) / 3, 1e-6)))
    last = None
    begin = time.perf_counter()
    for _ in range(count):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / count


def random(seed: int, *shape: int, dtype: jnp.dtype = COMPUTE) -> jax.Array:
    """Normally distributed: zeros would take less power than what is trained on."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def matmuls(device: Device, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict]]:
    """The share of the peak that the cost model's own arithmetic needs to give these times."""
    ideal = dataclasses.replace(
        device, matmul_efficiency={**device.matmul_efficiency, "bf16": 1.0}, kernel_s=0.0
    )
    einsum = functools.partial(multiply, recipe=Recipe(compute=COMPUTE, accum=ACCUM))
    rows, expected, taken = [], 0.0, 0.0
    for tokens, width, hidden in args.shapes:
        x, w = random(0, tokens, width), random(1, width, hidden)
        dy = random(2, tokens, hidden)
        forms: dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...], PlannedMatmul]] = {
            "forward": (
                lambda x, w: einsum("tk,kn->tn", x, w),
                (x, w),
                PlannedMatmul("forward", tokens, hidden, width),
            ),
            "input gradient": (
                lambda dy, w: einsum("tn,kn->tk", dy, w),
                (dy, w),
                PlannedMatmul("input gradient", tokens, width, hidden),
            ),
            "weight gradient": (
                lambda x, dy: einsum("tk,tn->kn", x, dy, out=ACCUM),
                (x, dy),
                PlannedMatmul("weight gradient", width, hidden, tokens, out=4),
            ),
        }
        for name, (function, operands, each) in forms.items():
            run = functools.partial(jax.jit(function), *operands)
            found = seconds(run, budget_s=args.budget_s)
            best = matmul_s(ideal, each)
            expected, taken = expected + best, taken + found
            rate = 2.0 * tokens * width * hidden / found
            rows.append(
                {
                    "operation": f"{name} {tokens} x {width} x {hidden}",
                    "seconds": found,
                    "tflops": rate / 1e12,
                    "share": best / found,
                }
            )
            print(f"{rows[-1]['operation']:44s} {rate / 1e12:7.1f} TFLOP/s", flush=True)
    return {"matmul_efficiency": {"bf16": expected / taken}}, rows


def passes(device: Device, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict]]:
    """A norm, a gated activation and a residual sum, as layers have them."""
    tokens, width, _ = args.shapes[0]

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(ACCUM)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True))).astype(COMPUTE)

    def gate(a: jax.Array, b: jax.Array) -> jax.Array:
        return (jax.nn.silu(a.astype(ACCUM)) * b.astype(ACCUM)).astype(COMPUTE)

    x, y = random(0, tokens, 4 * width), random(1, tokens, 4 * width)
    size = 2 * x.size
    rows, total, taken = [], 0, 0.0
    for name, function, operands, moved in (
        ("norm", norm, (x,), 2 * size),
        ("gated activation", gate, (x, y), 3 * size),
        ("residual sum", lambda a, b: a + b, (x, y), 3 * size),
    ):
        run = functools.partial(jax.jit(function), *operands)
        found = seconds(run, budget_s=args.budget_s)
        total, taken = total + moved, taken + found
        rows.append({"operation": name, "seconds": found, "bytes_per_s": moved / found})
        print(f"{name:44s} {moved / found / 1e9:7.0f} GB/s", flush=True)
    return {"memory_efficiency": total / taken / device.hbm_bytes_per_s}, rows


def attentions(device: Device, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict]]:
    """Causal rates of long sequences, by the half length of the cost model."""
    rates: dict[str, list[float]] = {}
    rows = []
    for width, (heads, kv_heads) in WIDTHS.items():
        times, works = [0.0, 0.0], [0.0, 0.0]
        for batch, length in args.lengths:
            call = functools.partial(
                attention,
                config=GroupedAttentionConfig(
                    num_q_heads=heads, num_kv_heads=kv_heads, head_dim=width, rope=None
                ),
                segment_ids_BT=jnp.zeros((batch, length), jnp.int32),
                implementation=AttentionImplementation(args.attention),
            )
            q = random(0, batch, length, heads, width)
            k, v = (random(seed, batch, length, kv_heads, width) for seed in (1, 2))
            forward = seconds(functools.partial(jax.jit(call), q, k, v), budget_s=args.budget_s)

            def both(q, k, v, call=call, q0=q):
                out, pull = jax.vjp(call, q, k, v)
                return pull((out + q0).astype(out.dtype))

            gradient = functools.partial(jax.jit(both), q, k, v)
            backward = seconds(gradient, budget_s=args.budget_s) - forward
            flops = 2.0 * batch * length * (length + 1) * heads * width
            long = (length + device.attention_half_length) / length
            for i, (work, taken) in enumerate(((flops, forward), (2.5 * flops, backward))):
                works[i] += work * long
                times[i] += taken
            rows.append(
                {
                    "operation": f"attention {batch} x {length}, {heads} heads of {width}",
                    "forward_tflops": flops / forward / 1e12,
                    "backward_tflops": 2.5 * flops / backward / 1e12,
                }
            )
            print(
                f"{rows[-1]['operation']:44s} {rows[-1]['forward_tflops']:7.1f} forward, "
                f"{rows[-1]['backward_tflops']:7.1f} backward TFLOP/s",
                flush=True,
            )
        rates[str(width)] = [work / taken for work, taken in zip(works, times, strict=True)]
    return {"attention_flops": rates}, rows


def smallest_kernel(device: Device, args: argparse.Namespace) -> tuple[dict[str, Any], list[dict]]:
    """One of many small dependent matmuls in a program."""
    del device
    x = random(0, 64, 64)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_TINY):
            x = multiply("ij,jk->ik", x, x, recipe=Recipe(compute=COMPUTE, accum=ACCUM))
        return x

    run = functools.partial(jax.jit(chain), x)
    found = seconds(run, budget_s=args.budget_s) / _TINY
    print(f"{'smallest kernel':44s} {1e6 * found:7.2f} us", flush=True)
    return {"kernel_s": found}, [{"operation": "smallest kernel", "seconds": found}]


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="jaxinfra bench constants", description=__doc__)
    parser.add_argument("--device", default="h200", help="whose datasheet peaks rates are given of")
    parser.add_argument("--attention", default="auto", choices=list(AttentionImplementation))
    parser.add_argument("--budget-s", type=float, default=0.4, help="of each operation")
    parser.add_argument("--small", action="store_true", help="sizes for a check on a CPU")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    args.shapes, args.lengths = SHAPES, LENGTHS
    if args.small:
        args.shapes, args.lengths = ((64, 32, 128),), ((1, 64),)
    device = find_device(args.device)
    constants: dict[str, Any] = {}
    rows: list[dict] = []
    for part in (matmuls, passes, attentions, smallest_kernel):
        values, measured = part(device, args)
        constants |= values
        rows += measured
        if args.out is not None:
            result = {
                "environment": environment(),
                "constants": constants,
                "rows": rows,
                "clocks_after": clocks(),
            }
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(constants))


if __name__ == "__main__":
    main()
