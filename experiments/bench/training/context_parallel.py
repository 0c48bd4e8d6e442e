"""Causal attention over a sequence on several GPUs, beside one GPU's kernel in the same process.

    jaxinfra bench context_parallel --out experiments/results/context-parallel-h200.json
    jaxinfra bench context_parallel --tokens 1024 --long-tokens 0 --implementation xla  # on CPUs

First every method is held to fp32 at a small size. Then ring, Ulysses and all-gather are
interleaved with one device's kernel on the same tokens, all by the same implementation. FLOPs are
those of the visible half, forward and backward, a backward being 2.5 forwards. At last the ring
runs once more on --long-tokens.

Rates are per device; "of one" is the rate over that of one device alone. "temp" is the compiled
program's temporaries, "peak" what the allocator had handed out at most so far.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from experiments.bench.environment import clocks, environment
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.run import AttentionImplementation, ContextMethod
from jaxinfra.ops.attention import attention
from jaxinfra.parallel.context.methods import ContextAttention
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import from_zigzag, to_zigzag

METHODS = (ContextMethod.RING, ContextMethod.ULYSSES, ContextMethod.ALL_GATHER)
GIB = 2**30


def config_of(args: argparse.Namespace) -> GroupedAttentionConfig:
    return GroupedAttentionConfig(
        num_q_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.width, rope=None
    )


def flops(args: argparse.Namespace, tokens: int) -> float:
    """FLOPs of forward and backward: 2 matmuls of 2 T^2 N H FLOPs forward, half of them visible."""
    return 3.5 * 2 * tokens**2 * args.heads * args.width


def both(attend, config: GroupedAttentionConfig, q, k, v, d_out):
    """out, dq, dk, dv."""
    out, pull = jax.vjp(
        lambda q, k, v: attend(q, k, v, config=config, segment_ids_BT=None), q, k, v
    )
    return out, *pull(d_out)


def draw(args, tokens: int, sharding, dtype=jnp.bfloat16) -> tuple[jax.Array, ...]:
    """Samples q, k, v and the output's cotangent on the devices that hold them."""
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)

    @functools.partial(jax.jit, out_shardings=sharding)
    def normal():
        keys = jax.random.split(jax.random.key(0), 4)
        return tuple(
            jax.random.normal(key, (1, tokens, n, args.width), dtype)
            for key, n in zip(keys, heads, strict=True)
        )

    return normal()


def on_mesh(args, placement: Placement, method: ContextMethod) -> jax.stages.Wrapped:
    attend = ContextAttention(
        placement=placement,
        method=method,
        implementation=AttentionImplementation(args.implementation),
    )
    sharding = sequence_sharding(placement)
    return jax.jit(functools.partial(both, attend, config_of(args)), out_shardings=sharding)


def on_one(args, implementation: AttentionImplementation) -> jax.stages.Wrapped:
    attend = functools.partial(attention, implementation=implementation)
    return jax.jit(functools.partial(both, attend, config_of(args)))


def sequence_sharding(placement: Placement) -> NamedSharding:
    return NamedSharding(placement.mesh, PartitionSpec(None, "context"))


def check(args, placement: Placement) -> list[dict[str, Any]]:
    """Relative errors of out, dq, dk, dv against fp32, at most twice those of one device."""
    num = placement.mesh.size
    operands = draw(args, args.check_tokens, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    exact = on_one(args, AttentionImplementation.XLA)(*(x.astype(jnp.float32) for x in operands))
    plain = on_one(args, AttentionImplementation(args.implementation))(*operands)

    def errors(results) -> list[float]:
        return [
            float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))
            for got, want in zip(results, exact, strict=True)
        ]

    limits = [2 * error for error in errors(plain)]
    ordered = [
        jax.device_put(to_zigzag(jax.device_get(x), num), sequence_sharding(placement))
        for x in operands
    ]
    rows = []
    for method in METHODS:
        results = on_mesh(args, placement, method)(*ordered)
        got = [jnp.asarray(from_zigzag(jax.device_get(x), num)) for x in results]
        found = errors(got)
        ok = all(error <= limit for error, limit in zip(found, limits, strict=True))
        print(
            f"check {method.value:10s} {args.check_tokens} tokens: "
            + " ".join(f"{error:.2e}" for error in found)
            + (" ok" if ok else f" ABOVE {limits}"),
            flush=True,
        )
        rows.append({"method": method.value, "errors": found, "limits": limits, "ok": ok})
    assert all(row["ok"] for row in rows), "a method is wrong; its times would mean nothing"
    return rows


def compile_timed(function: jax.stages.Wrapped, operands) -> tuple[Any, dict[str, float]]:
    start = time.perf_counter()
    compiled = function.lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "every XLA backend has it"
    return compiled, {
        "compile_s": time.perf_counter() - start,
        "temp_gib": memory.temp_size_in_bytes / GIB,
        "argument_gib": memory.argument_size_in_bytes / GIB,
        "output_gib": memory.output_size_in_bytes / GIB,
    }


def seconds(compiled: Any, operands) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*operands))
    return time.perf_counter() - start


def peak_gib() -> float | None:
    """The largest peak of any device so far; None where the allocator does not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks) / GIB if peaks else None


def report(row: dict[str, Any]) -> None:
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    share = f"{row['of_one']:6.1%} of one" if "of_one" in row else ""
    print(
        f"{row['method']:12s} {row['tokens']:8d} tokens on {row['devices']} "
        f"{row['ms']:9.1f} ms {row['tflops_per_device']:7.1f} TFLOP/s/device {share} "
        f"temp {row['temp_gib']:5.1f} peak {peak} GiB compile {row['compile_s']:.1f} s",
        flush=True,
    )


def compare(args, placement: Placement) -> list[dict[str, Any]]:
    """Times one device's kernel and each method on the same tokens, interleaved."""
    num = placement.mesh.size
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    single = draw(args, args.tokens, one)
    sharded = draw(args, args.tokens, sequence_sharding(placement))
    contenders = {
        "one device": (on_one(args, AttentionImplementation(args.implementation)), single, 1)
    }
    for method in METHODS:
        contenders[method.value] = (on_mesh(args, placement, method), sharded, num)
    compiled, facts, taken = {}, {}, {}
    for name, (function, operands, _) in contenders.items():
        compiled[name], facts[name] = compile_timed(function, operands)
        seconds(compiled[name], operands)
        facts[name]["peak_gib"], taken[name] = peak_gib(), []
    for _ in range(args.rounds):
        for name, (_, operands, _) in contenders.items():
            taken[name].append(seconds(compiled[name], operands))
    rows: list[dict[str, Any]] = []
    for name, (_, _, devices) in contenders.items():
        median = statistics.median(taken[name])
        rate = flops(args, args.tokens) / devices / median / 1e12
        row: dict[str, Any] = {
            "method": name,
            "tokens": args.tokens,
            "devices": devices,
            "ms": 1e3 * median,
            "all_ms": [1e3 * s for s in taken[name]],
            "tflops_per_device": rate,
            "of_one": rate / (rows[0]["tflops_per_device"] if rows else rate),
            **facts[name],
        }
        rows.append(row)
        report(row)
    return rows


def long(args, placement: Placement) -> dict[str, Any]:
    """The ring on --long-tokens, once after one warm call of a compiled program."""
    operands = draw(args, args.long_tokens, sequence_sharding(placement))
    compiled, facts = compile_timed(on_mesh(args, placement, ContextMethod.RING), operands)
    taken = [seconds(compiled, operands) for _ in range(args.long_calls)]
    num = placement.mesh.size
    row = {
        "method": ContextMethod.RING.value,
        "tokens": args.long_tokens,
        "devices": num,
        "ms": 1e3 * taken[-1],
        "all_ms": [1e3 * s for s in taken],
        "tflops_per_device": flops(args, args.long_tokens) / num / taken[-1] / 1e12,
        "peak_gib": peak_gib(),
        **facts,
    }
    report(row)
    return row


def main() -> None:
    """Prints a line a method and writes the JSON."""
    parser = argparse.ArgumentParser(
        prog="jaxinfra bench context_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--long-tokens", type=int, default=1_048_576, help="0 for none")
    parser.add_argument("--long-calls", type=int, default=1)
    parser.add_argument("--check-tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--implementation", default="hopper", choices=["hopper", "xla"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, help="virtual ones of a CPU")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    placement = Placement(mesh=make_mesh(MeshConfig(context=len(jax.devices()))))
    result: dict[str, Any] = {"environment": environment(), "arguments": vars(args) | {"out": None}}
    result["errors"] = check(args, placement)
    result["rows"] = compare(args, placement)
    result["clocks_after"] = clocks()
    if args.out is not None:  # before the long one, which may not fit
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.long_tokens:
        result["rows"].append(long(args, placement))
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
