"""The parts of a training step alone, and what they sum up to.

    python -m experiments.bench.training.step_parts --out experiments/results/step-parts-h200.json

Every distinct matmul of the step, attention, the loss and a copy run by themselves, in a burst
after a pause and then for --seconds on end. Beside the rates stand clock and power. The sum goes
over the step's operations (jaxinfra/planning/operations.py), each byte moved in the fewest passes
that library matmuls leave; nothing waits for anything. On a GPU at its power limit the sum of
sustained parts is no bound: within the step a matmul rests while the next passes over memory, and
then runs faster than without end.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.environment import clocks, environment
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import Remat
from jaxinfra.ops.attention import attention
from jaxinfra.ops.cross_entropy import linear_cross_entropy
from jaxinfra.planning.layout import UNROLLED, lay_out
from jaxinfra.planning.model import plan_model, total_parameters
from jaxinfra.planning.operations import (
    MemoryPass,
    Operation,
    PlannedMatmul,
    embedding_operations,
    layer_operations,
    loss_operations,
)

BURST = 10  # calls


def main() -> None:
    """Measures, prints the sum by part and writes the JSON."""
    parser = argparse.ArgumentParser(prog="jaxinfra bench step_parts", description=__doc__)
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    config = MODELS[args.preset]()
    result: dict[str, Any] = {"environment": environment(), "shapes": vars(args) | {"out": None}}
    result["parts"] = parts_of(config, args)
    result["clocks_after"] = clocks()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def parts_of(config: ModelConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the step by part, with the rows they are sums of."""
    model = plan_model(config)
    layout = lay_out(
        batch=args.batch, length=args.length, remat=Remat.NONE, zero=1, traits=UNROLLED
    )
    found: list[tuple[float, Operation]] = []
    for layer in model.layers:
        parts = layer_operations(layer, layout)
        found += [(layer.count, each) for each in (*parts.forward, *parts.backward)]
    parameters = total_parameters(model)
    ends = [
        *embedding_operations(model, layout),
        MemoryPass("cast weights", 6.0 * parameters),
        # Weights, both moments and the gradient read, the first three written; the gradient's norm.
        MemoryPass("optimizer", (7 + 1) * 4.0 * parameters),
    ]
    found += [(1, each) for each in ends]

    sums = {"layer matmuls": 0.0, "attention": 0.0, "loss": 0.0, "memory": 0.0}
    rows: dict[str, Any] = {}
    matmuls: dict[tuple, list[tuple[float, PlannedMatmul]]] = {}
    for count, each in found:
        if isinstance(each, PlannedMatmul):
            pass_ = each.name.rpartition(" ")[2] if each.name[-3:] in (" dx", " dw") else ""
            matmuls.setdefault((each.m, each.n, each.k, pass_), []).append((count, each))
    for group in matmuls.values():
        each, times = group[0][1], sum(count * each.count for count, each in group)
        flops = 2 * each.m * each.n * each.k
        row = sustained(*product(each), seconds=args.seconds)
        row |= {"a_step": times, "tflops": flops / row["ms"] / 1e9}
        row["burst_tflops"] = flops / row["burst_ms"] / 1e9
        say(" + ".join(sorted({e.name for _, e in group})), row, rows)
        sums["layer matmuls"] += times * row["ms"]
    row = sustained(*self_attention(config, args), seconds=args.seconds)
    say("attention, forward and gradients", row, rows)
    sums["attention"] = config.num_layers * row["ms"]
    row = sustained(*loss(config, args), seconds=args.seconds)
    flops = sum(
        2 * e.m * e.n * e.k for e in loss_operations(model, layout) if isinstance(e, PlannedMatmul)
    )
    say("loss, forward and gradients", row | {"tflops": flops / row["ms"] / 1e9}, rows)
    sums["loss"] = row["ms"]
    words = jnp.ones(2**28, jnp.int32)
    row = sustained(jax.jit(lambda x: x + 1), words, seconds=args.seconds)
    rate = 2 * words.nbytes / row["ms"] / 1e6
    say("copy", row | {"gb_per_s": rate}, rows)
    gigabytes = sum(count * e.size for count, e in found if isinstance(e, MemoryPass)) / 1e9
    sums["memory"] = 1e3 * gigabytes / rate
    sums["step"] = sum(sums.values())
    print({name: round(ms, 2) for name, ms in sums.items()}, f"{gigabytes:.1f} GB", flush=True)
    return {"ms": sums, "memory_gb": gigabytes, "rows": rows}


def sustained(f: Callable[..., Any], *inputs: jax.Array, seconds: float) -> dict[str, Any]:
    """Milliseconds of a call: of the first few after a pause, and of those in the second half of
    ``seconds`` seconds, with clock and power then.
    """
    jax.block_until_ready(f(*inputs))
    time.sleep(0.3)

    def run(count: int, *, look: bool = False) -> tuple[float, str | None]:
        start = time.perf_counter()
        result = None
        for _ in range(count):
            result = f(*inputs)  # one at a time: all results together would fill the memory
        seen = clocks() if look else None
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / count, seen

    burst, _ = run(BURST)
    half = max(int(500 * seconds / burst), 1)
    run(half)
    ms, seen = run(half, look=True)
    return {"ms": ms, "burst_ms": burst, "clocks": seen}


def product(each: PlannedMatmul) -> tuple[Any, ...]:
    """A jitted matmul with the step's operand layouts: weights [in, out], tokens first."""
    m, n, k = int(each.m), int(each.n), int(each.k)
    if each.name.endswith(" dw"):
        shapes, contracted = ((k, m), (k, n)), ((0,), (0,))
    elif each.name.endswith(" dx"):
        shapes, contracted = ((m, k), (n, k)), ((1,), (1,))
    else:
        shapes, contracted = ((m, k), (k, n)), ((1,), (0,))
    out = jnp.float32 if each.out == 4 else jnp.bfloat16
    keys = jax.random.split(jax.random.key(0))
    operands = (
        jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)
    )
    dot = functools.partial(
        jax.lax.dot_general, dimension_numbers=(contracted, ((), ())), preferred_element_type=out
    )
    return jax.jit(dot), *operands


def self_attention(config: ModelConfig, args: argparse.Namespace) -> tuple[Any, ...]:
    """Value and gradients of one layer's attention."""
    block = config.blocks[0].mixer
    heads = (block.num_q_heads, block.num_kv_heads, block.num_kv_heads)
    q, k, v = (
        jax.random.normal(
            jax.random.key(i), (args.batch, args.length, n, block.head_dim), jnp.bfloat16
        )
        for i, n in enumerate(heads)
    )

    def forward(q, k, v):
        return attention(q, k, v, config=block, segment_ids_BT=None)

    def both(q, k, v, cotangent):
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(cotangent)

    return jax.jit(both), q, k, v, q


def loss(config: ModelConfig, args: argparse.Namespace) -> tuple[Any, ...]:
    """Value and both gradients of the vocabulary's projection and cross entropy."""
    tokens, width = (args.batch, args.length), config.model_dim
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (*tokens, width), jnp.bfloat16)
    table = 3 * width**-0.5 * jax.random.normal(keys[1], (config.vocab_size, width))
    targets = jax.random.randint(keys[2], tokens, 0, config.vocab_size)

    def total(hidden, table):
        return linear_cross_entropy(hidden, table, targets, jnp.ones(tokens)).total

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1))), hidden, table


def say(name: str, row: dict[str, Any], rows: dict[str, Any]) -> None:
    """Prints a row and keeps it."""
    rows[name] = row
    print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


if __name__ == "__main__":
    main()
