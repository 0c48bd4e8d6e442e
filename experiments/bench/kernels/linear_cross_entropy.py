"""Projection + cross entropy with gradients on a Hopper GPU, beside XLA's.

python -m experiments.bench.kernels.linear_cross_entropy \\
    --out experiments/results/linear-cross-entropy-h200.json

Rows are value and gradient of both inputs, three products. The time "wall" includes gaps between
kernels, and temp is the compiler's count of temporaries. The "part" rows are one device's share of
a split vocabulary, or a small vocabulary, in both forms. With them, ``auto`` takes the kernel from
the least part where it is 1.15 times as fast.
"""

import collections
import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.stages
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.harness import compiled, options, table_of
from pallas_kernels.cross_entropy import linear_cross_entropy

TOKENS, WIDTH, VOCAB = (4, 4096), 2048, 128256
REGULARIZED = {"z_loss": 1e-4, "logit_soft_cap": 30.0}
# In order of importance: the time budget may end before the last ones.
LOSSES = {
    "hopper": {"implementation": "hopper"},
    "xla": {"implementation": "xla"},
    "hopper, z-loss and cap": {"implementation": "hopper", **REGULARIZED},
    "xla, z-loss and cap": {"implementation": "xla", **REGULARIZED},
    "hopper, label smoothing": {"implementation": "hopper", "label_smoothing": 0.1},
    "hopper, 1 GiB chunks": {"implementation": "hopper", "chunk_bytes": 2**30},
}
PARTS = (64128, 32064, 16032)  # a device's part of 128,256 ids on 2, 4 and 8 devices


def inputs(tokens: tuple[int, int], width: int, vocab: int, table_dtype=jnp.float32):
    """hidden, table, targets, weights: logits of deviation 3, every 16th target not counted."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (*tokens, width), jnp.bfloat16)
    table = 3 * width**-0.5 * jax.random.normal(keys[1], (vocab, width), jnp.bfloat16)
    targets = jax.random.randint(keys[2], tokens, 0, vocab)
    weights = (jnp.arange(tokens[0] * tokens[1]).reshape(tokens) % 16 != 5).astype(jnp.float32)
    return hidden, table.astype(table_dtype), targets, weights


def value_and_gradient(hidden, table, targets, weights, **options):
    def total(hidden, table):
        return linear_cross_entropy(hidden, table, targets, weights, **options).total

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, table)


def materialized(hidden, table, targets, weights):
    """Loss and gradients in plain JAX: bf16 logits of all tokens, fp32 cross entropy, autodiff."""

    def total(hidden, table):
        logits = jnp.einsum("btd,vd->btv", hidden, table.astype(hidden.dtype)).astype(jnp.float32)
        at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - at_target))

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, table)


def heaviest_kernels(f: Callable, *args: jax.Array) -> dict[str, float]:
    """Milliseconds of one call by kernel, for the eight that take most."""
    _, launches = profiler.measure(f, aggregate=False)(*args)
    assert launches is not None, "the call launched no kernel"
    total = collections.defaultdict[str, float](float)
    for name, ms in launches:
        total[name[:60]] += ms
    heaviest = sorted(total.items(), key=lambda item: -item[1])[:8]
    return {"all": sum(total.values()), **dict(heaviest)}


def wall_ms(f: Callable, *args: jax.Array, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def shapes_of(vocab: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return jax.eval_shape(functools.partial(inputs, TOKENS, WIDTH, vocab))


@functools.lru_cache(maxsize=1)
def whole_inputs(vocab: int) -> tuple[jax.Array, ...]:
    return inputs(TOKENS, WIDTH, vocab)


def whole_loss(program: Future[jax.stages.Compiled], vocab: int, products: int) -> dict:
    run, arrays = program.result(), whole_inputs(vocab)
    jax.block_until_ready(run(*arrays))
    memory = run.memory_analysis()
    assert memory is not None, "this backend counts no memory"
    wall = wall_ms(run, *arrays)
    flop = products * 2 * TOKENS[0] * TOKENS[1] * WIDTH * vocab
    return {
        "kernels_ms": heaviest_kernels(run, *arrays),
        "wall_ms": wall,
        "tflops": flop / wall / 1e9,
        "temp_gib": memory.temp_size_in_bytes / 2**30,
    }


def whole_losses() -> dict[str, tuple[Callable, int, int]]:
    """Function, ids and matrix products by name, in order of importance."""
    found: dict[str, tuple[Callable, int, int]] = {"loss: materialized": (materialized, VOCAB, 3)}
    for name, chosen in LOSSES.items():
        f = functools.partial(value_and_gradient, **chosen)
        found[f"loss: {name}"] = f, VOCAB, 3
    for vocab in PARTS:
        for name in ("hopper", "xla"):
            f = functools.partial(value_and_gradient, implementation=name)
            found[f"part: {name}, {vocab} ids"] = f, vocab, 3
    for name in ("xla", "hopper"):
        f = functools.partial(linear_cross_entropy, implementation=name)
        found[f"forward alone: {name}"] = f, VOCAB, 1
    return found


def main() -> None:
    args = options(__doc__, budget=60.0).parse_args()
    table = table_of(args)
    losses = {n: loss for n, loss in whole_losses().items() if n.startswith(tuple(args.only))}
    # The compiler tries matmuls on the GPU: beside another's trials it once took one that is a
    # fifth slower for the table's gradient. And nothing is timed before all are compiled.
    with ThreadPoolExecutor(1) as pool:
        programs = {
            n: pool.submit(compiled, f, *shapes_of(vocab)) for n, (f, vocab, _) in losses.items()
        }
    for name, (_, vocab, products) in losses.items():
        table.add(name, functools.partial(whole_loss, programs[name], vocab, products))


if __name__ == "__main__":
    main()
