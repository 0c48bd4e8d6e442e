"""Chunks of prompts that attend to pages on a Hopper GPU: two kernels, and one of whole arrays.

python -m experiments.bench.kernels.paged_chunks --out experiments/results/paged-chunks-h200.json

A row is a prompt, of which T tokens attend to those before them and to each other. "heads" takes a
token's query heads of a kv head together and splits rows over multiprocessors, as in decoding;
"chunk" takes 128 tokens of a head; "whole", of the longest chunks, is ``flash_attention`` of the
same keys in an array.
Times are of all kernels of a call, in turns, medians. TFLOP/s count pairs that see each other.
"chunk_error" and "heads_error" are relative to the formula in fp32, where that fits.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.kernels.paged_attention import BF16, relative
from experiments.bench.kernels.paged_cases import PagedWorkload
from experiments.bench.table import Table
from pallas_kernels import flash_attention, paged_attention
from pallas_kernels.paged_attention.hopper.chunk import attend_chunk
from pallas_kernels.paged_attention.hopper.config import QueryLayout, config_for
from pallas_kernels.paged_attention.hopper.forward import paged_attention_hopper
from pallas_kernels.paged_attention.validate import make_call

TOKENS = (64, 128, 256, 512, 1024)
BEFORE = (0, 2048, 30720)
HEADS = {"32/8 d128": (32, 8, 128), "32/8 d64": (32, 8, 64), "64/8 d128": (64, 8, 128)}
CHECKED_SCORES = 2**31  # bytes of the formula's scores at most


def workloads() -> list[PagedWorkload]:
    """All heads at one size, the first at all."""
    found = []
    for heads, (N, K, H) in HEADS.items():
        for before in BEFORE:
            for T in TOKENS:
                if heads == next(iter(HEADS)) or (T, before) == (1024, 2048):
                    name, sizes = f"{heads} t{T} behind {before}", {"N": N, "K": K, "H": H, "V": H}
                    found.append(PagedWorkload(name=name, B=1, length=before + T, T=T, **sizes))
    return found


def forms() -> dict[str, Callable]:
    def call(q, k, v, tables, lengths):
        unset = ("query_lengths", "value_width", "window", "soft_cap", "sinks", "scale")
        return make_call(q, k, v, tables, lengths, **dict.fromkeys(unset))

    def heads(*arrays):
        made = call(*arrays)
        return paged_attention_hopper(made, config=config_for(QueryLayout.of(made)))

    def whole(q, k, v, tables, lengths):
        del lengths  # rows are as many whole pages, one after another
        B, M = tables.shape
        k, v = (x[: B * M].reshape(B, -1, *x.shape[2:]) for x in (k, v))
        return flash_attention(q, k, v, is_causal=True, implementation="hopper")

    return {"heads": heads, "chunk": lambda *arrays: attend_chunk(call(*arrays)), "whole": whole}


class Shape:
    """A workload, its arrays and programs."""

    def __init__(self, workload: PagedWorkload, pool: concurrent.futures.Executor):
        self.workload = workload
        self.lengths = jnp.asarray(workload.lengths())
        tables, self.num_pages = workload.tables(workload.lengths())
        self.tables = jnp.asarray(tables)
        self.make = jax.jit(lambda: workload.pools(jax.random.key(0), BF16, self.num_pages))
        shapes = [*jax.eval_shape(self.make), self.tables, self.lengths]
        self.programs = {
            name: pool.submit(lambda f=f: jax.jit(f).lower(*shapes).compile())
            for name, f in forms().items()
            if name != "whole" or max(TOKENS) == workload.T
        }

    def row(self) -> dict:
        """Times, rates and errors."""
        w, args = self.workload, [*self.make(), self.tables, self.lengths]
        programs = {name: each.result() for name, each in self.programs.items()}
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(3):
            for name, f in programs.items():
                _, launches = profiler.measure(f, aggregate=False, iterations=5)(*args)
                assert launches is not None
                times[name] += [sum(ms for _, ms in launch) for launch in launches]
        us = {name: 1e3 * statistics.median(each) for name, each in times.items()}
        pairs = w.B * w.T * (w.length - w.T + (w.T + 1) / 2)
        flops = 4 * pairs * w.N * w.H
        row = {f"{name}_us": round(t, 2) for name, t in us.items()}
        row |= {f"{name}_tflop_s": round(flops / t / 1e6, 1) for name, t in us.items()}
        if 4 * w.B * w.T * w.N * w.length <= CHECKED_SCORES:
            wide = [x.astype(jnp.float32) if x.dtype == BF16 else x for x in args]
            f = functools.partial(paged_attention, implementation="reference")
            want = jax.jit(f)(*wide)
            for name in ("heads", "chunk"):
                row[f"{name}_error"] = relative(programs[name](*args), want)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds in all")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        chosen = [w for w in workloads() if w.name.startswith(tuple(args.only))]
        shapes = [Shape(workload, pool) for workload in chosen]
        # Compilers try kernels on the GPU: nothing is timed before they are done.
        concurrent.futures.wait([p for shape in shapes for p in shape.programs.values()])
    for shape in shapes:
        table.add(shape.workload.name, shape.row)


if __name__ == "__main__":
    main()
