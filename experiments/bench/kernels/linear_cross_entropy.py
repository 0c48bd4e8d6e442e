"""Projection + cross entropy on a Hopper GPU: errors, the kernel's tiles, the loss beside XLA.

python -m experiments.bench.kernels.linear_cross_entropy \\
    --out experiments/results/linear-cross-entropy.json

"kernel" rows are CUPTI times of one chunk, TFLOP/s of its single product. "loss" rows are
value and gradient of both inputs, three products; "wall" includes gaps between kernels, and temp is
the compiler's count of temporaries. "part" rows are what one device does of a vocabulary that is
split over several, or of a small one, in both forms: ``auto`` takes the kernel from the least
part where it is 1.15 times as fast. A variant that fails or comes after --budget seconds is
recorded as such and the table goes on; the file is written after every row.
"""

import argparse
import collections
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.stages
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.table import Table
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.linear_cross_entropy.hopper_exponentials import ExponentialsConfig, exponentials

TOKENS, WIDTH, VOCAB = (4, 4096), 2048, 128256
CHUNK = 2048
CONFIGS = {
    "cluster 1, turns": ExponentialsConfig(),
    "cluster 2, turns": ExponentialsConfig(cluster=2),
    "cluster 2": ExponentialsConfig(cluster=2, in_turns=False),
    "cluster 1": ExponentialsConfig(in_turns=False),
}
REGULARIZED = {"z_loss": 1e-4, "logit_soft_cap": 30.0}
# In order of importance: what comes late may find no time left.
LOSSES = {
    "hopper": {"implementation": "hopper"},
    "xla": {"implementation": "xla"},
    "hopper, z-loss and cap": {"implementation": "hopper", **REGULARIZED},
    "xla, z-loss and cap": {"implementation": "xla", **REGULARIZED},
    "hopper, label smoothing": {"implementation": "hopper", "label_smoothing": 0.1},
    "hopper, 1 GiB chunks": {"implementation": "hopper", "chunk_bytes": 2**30},
}
PARTS = (64128, 32064, 16032)  # of 128,256 ids, on 2, 4 and 8 devices


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
    """As a JAX user writes it: bf16 logits of all tokens, cross entropy in fp32, autodiff."""

    def total(hidden, table):
        logits = jnp.einsum("btd,vd->btv", hidden, table.astype(hidden.dtype)).astype(jnp.float32)
        at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - at_target))

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, table)


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(vocab: int, options: dict) -> dict:
    """Errors of value and gradients against fp32, beside the chunked XLA form's."""
    arrays = inputs((3, 700), 512, vocab)
    exact = (arrays[0].astype(jnp.float32), *arrays[1:])
    run = {
        "want": (exact, {"implementation": "reference"}),
        "xla": (arrays, {"implementation": "xla"}),
        "hopper": (arrays, {"implementation": "hopper", "chunk_bytes": 1000 * vocab * 2}),
    }
    got = {
        name: jax.tree.leaves(jax.jit(functools.partial(value_and_gradient, **f, **options))(*args))
        for name, (args, f) in run.items()
    }
    errors = {
        name: [relative(g, w) for g, w in zip(got[name], got["want"], strict=True)]
        for name in ("xla", "hopper")
    }
    # The loss is a sum of fp32 numbers in both, so it is held to a bound and not to luck.
    limits = [1e-5, *(2 * e for e in errors["xla"][1:])]
    ok = all(e <= limit for e, limit in zip(errors["hopper"], limits, strict=True))
    return {"errors": errors, "ok": ok}


def kernel_ms(f: Callable, *args: jax.Array, iterations: int = 5) -> float:
    _, times = profiler.measure(f, iterations=iterations)(*args)
    assert times is not None, "the call launched no kernel"
    return statistics.median(times)


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


def one_chunk(f: Callable, *args: jax.Array) -> dict:
    ms = kernel_ms(f, *args)
    return {"kernel_ms": ms, "tflops": 2 * CHUNK * WIDTH * VOCAB / ms / 1e9}


def compiled(f: Callable, vocab: int) -> jax.stages.Compiled:
    shapes = jax.eval_shape(functools.partial(inputs, TOKENS, WIDTH, vocab))
    return jax.jit(f).lower(*shapes).compile()


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
    for name, options in LOSSES.items():
        f = functools.partial(value_and_gradient, **options)
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all variants")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)

    losses = {n: loss for n, loss in whole_losses().items() if n.startswith(tuple(args.only))}
    # The compiler tries matmuls on the GPU: beside another's trials it once took one that is a
    # fifth slower for the table's gradient. And nothing is timed before all are compiled.
    with ThreadPoolExecutor(1) as pool:
        programs = {n: pool.submit(compiled, f, vocab) for n, (f, vocab, _) in losses.items()}
    for name, (_, vocab, products) in losses.items():
        table.add(name, functools.partial(whole_loss, programs[name], vocab, products))
    whole_inputs.cache_clear()

    hidden, weight, *_ = inputs((1, CHUNK), WIDTH, VOCAB, jnp.bfloat16)
    rows = hidden[0]
    reference = jnp.full(CHUNK, 5.0)
    product = functools.partial(jnp.einsum, "rd,vd->rv", preferred_element_type=jnp.bfloat16)
    table.add("kernel: xla product to bf16", lambda: one_chunk(product, rows, weight))
    product = functools.partial(jnp.einsum, "rd,vd->rv", preferred_element_type=jnp.float32)
    table.add("kernel: xla product to fp32", lambda: one_chunk(product, rows, weight))
    for name, config in CONFIGS.items():
        f = functools.partial(exponentials, num_ids=VOCAB, config=config)
        table.add(f"kernel: {name}", functools.partial(one_chunk, f, rows, weight, reference))
    f = functools.partial(exponentials, num_ids=VOCAB, with_matrix=False)
    table.add("kernel: sums alone", functools.partial(one_chunk, f, rows, weight, reference))

    # Last: fp32 products take the compiler longest.
    for vocab, options in ((4096, {}), (50257, REGULARIZED), (4096, {"label_smoothing": 0.1})):
        table.add(f"check {vocab} {options}", functools.partial(check, vocab, options))


if __name__ == "__main__":
    main()
