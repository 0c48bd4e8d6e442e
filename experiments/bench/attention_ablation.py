"""What each technique of the Hopper attention forward buys: each taken away alone, on one GPU.

python -m experiments.bench.attention_ablation --out ablation.json

b4 s4096, bf16. Every form of a case is timed in one process, beside cuDNN, ``REPEATS`` times over
in turn; a causal call counts half the FLOPs. Overlap is a pin that keeps the softmax under the
value product: where the shipped table leaves it out, the form has it. Two techniques are not
switches and stay: warp specialization, and scores of the next tile before the value product.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from experiments.bench import attention
from experiments.bench.attention import NO_MASKS, Case
from experiments.bench.environment import clocks, environment
from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.hopper import forward_block, forward_kernel, value_sum
from pallas_kernels.flash_attention.hopper.config import ForwardConfig, forward_config

REPEATS = 2
GROUPS = {64: 1, 128: 4, 256: 1}  # query heads a key head
SMALLER_TILES = {64: {"num_warpgroups": 2}, 128: {"block_kv": 64}}
"""The tile that a width would have without its own entry in the table; 256 has no smaller one."""


def shortest_first(kernel: Any, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``tile_of`` with the tiles of a head in the opposite order."""
    head, q_tile = TILE_OF(kernel, block)
    return head, kernel.num_q_tiles - 1 - q_tile


TILE_OF: Callable[..., tuple[jax.Array, jax.Array]] = forward_kernel.ForwardKernel.tile_of


@contextlib.contextmanager
def every_tile_rescales() -> Iterator[None]:
    """A row's reference follows its maximum; the sum is multiplied whether that grew or not."""

    def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x * jax.lax.broadcast_in_dim(factor, x.shape, [0])

    with (
        mock.patch.object(forward_kernel, "RESCALE_ABOVE", 0.0),
        mock.patch.object(value_sum, "scale_rows_if_needed", scale),
    ):
        yield


def forms(case: Case) -> Iterator[tuple[str, ForwardConfig, contextlib.AbstractContextManager]]:
    """Name, configuration, and what to replace while tracing."""
    shipped = forward_config(case.H, case.Hv)
    with_change = functools.partial(dataclasses.replace, shipped)
    nothing = contextlib.nullcontext()
    yield "shipped", shipped, nothing
    yield "no turns at the tensor cores", with_change(ping_pong=False), nothing
    yield "every tile rescales", shipped, every_tile_rescales()
    pin = "without" if shipped.overlap else "with"
    yield f"{pin} the pin of the softmax", with_change(overlap=not shipped.overlap), nothing
    yield "one tile of K and V in flight", with_change(num_stages=1), nothing
    if case.H in SMALLER_TILES:
        yield "smaller tile", with_change(**SMALLER_TILES[case.H]), nothing
    all_heads = mock.patch.object(forward_block, "heads_per_wave", lambda heads, *_: heads)
    yield "all heads side by side", shipped, all_heads
    if case.causal:
        order = mock.patch.object(forward_kernel.ForwardKernel, "tile_of", shortest_first)
        yield "shortest rows first", shipped, order


def forward(case: Case, config: ForwardConfig):
    """q, k, v to out."""

    def run(q, k, v):
        return hopper.forward(q, k, v, NO_MASKS, spec=case.spec, config=config)[0]

    return run


def measure(case: Case, pool: concurrent.futures.Executor) -> list[dict]:
    """A row for each form and repeat; errors are against cuDNN's values."""
    shapes = jax.eval_shape(case.arrays)[:3]
    library = functools.partial(attention.cudnn, spec=case.spec)
    jobs = {"cudnn": pool.submit(attention.compiled, library, *shapes)}
    for name, config, replaced in forms(case):
        with replaced:  # tracing happens here, compiling in the pool
            jobs[name] = pool.submit(jax.jit(forward(case, config)).lower(*shapes).compile)
    arrays = case.arrays()[:3]
    want = jobs["cudnn"].result()(*arrays)
    rows = []
    for repeat in range(REPEATS):
        for name, job in jobs.items():
            off = attention.relative(job.result()(*arrays), want)
            ms = attention.milliseconds(job.result(), *arrays, iterations=6)
            tflops = case.flop / ms / 1e9
            row = {"case": case.name, "form": name, "repeat": repeat, "ms": ms, "tflops": tflops}
            rows.append({**row, "off_cudnn": round(off, 5)})
            print(f"{case.name:32} {name:32} {ms:.4f} ms {tflops:.0f} TFLOP/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="*", default=list(GROUPS))
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    cases = [
        Case(B=4, T=4096, N=attention.HEADS[H], K=attention.HEADS[H] // GROUPS[H], H=H, Hv=H,
             causal=causal)
        for H in args.dims
        for causal in (False, True)
    ]  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        rows = [row for case in cases for row in measure(case, pool)]
    if args.out:
        result = {"environment": environment(), "clocks_after": clocks(), "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
