"""Paged decode attention on a Hopper GPU: errors first, then the rate at which the cache is read.

python -m experiments.bench.kernels.paged_attention \\
    --out experiments/results/paged-attention-h200.json

"check" rows give relative errors against the formula in fp32, beside those of the portable form in
16 bits. Other rows are CUPTI times of all kernels of a call, plan and merge among them, and
"attend" is the one that reads the cache. GB/s count the cache's keys and values once; "of_copy"
divides them by the copy of the same process, bytes read and written. Rows "cudnn" attend to a
contiguous cache of the same lengths. Candidates of a shape take turns. What fails, or comes after
--budget seconds, is recorded as such and the table goes on; the file is written after every row.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.kernels.paged_cases import WORKLOADS, PagedWorkload
from experiments.bench.table import Table
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.hopper import paged_attention_hopper
from pallas_kernels.paged_attention.hopper.config import QueryLayout, config_for
from pallas_kernels.paged_attention.validate import make_call

BF16 = jnp.dtype("bfloat16")
SIZES = (16, 32, 128)
VARIANTS: dict[str, dict[str, Any]] = {  # what differs from the default tiles
    "no teams": {"teams": False},
    "two query tiles": {"num_queries": 2},
    "3 tiles": {"num_stages": 3},
    "1 worker, 6 tiles": {"num_stages": 6, "num_workers": 1},
    "2 tiles of 128": {"block_kv": 128, "num_stages": 2},
    "3 tiles of 128": {"block_kv": 128, "num_stages": 3},
    "1 worker, 3 tiles of 128": {"block_kv": 128, "num_stages": 3, "num_workers": 1},
}
LATENT = [each for each in WORKLOADS if each.latent]
CHECKED = {
    "plain": (PagedWorkload(name="", B=5, length=1500, N=32, K=8), {}),
    "pages of 16, fp16": (PagedWorkload(name="", B=3, length=700, N=64, K=8, size=16), {}),
    "one head each": (PagedWorkload(name="", B=3, length=700, N=32, K=32, size=128), {}),
    "tokens, window, cap": (
        PagedWorkload(name="", B=4, length=900, N=32, K=8, T=5, window=300),
        {"soft_cap": 5.0},
    ),
    "sinks": (PagedWorkload(name="", B=4, length=300, N=16, K=2, H=64, V=64, size=32), {}),
    "heads of 256": (PagedWorkload(name="", B=4, length=600, N=16, K=8, H=256, V=256), {}),
    "chunk": (PagedWorkload(name="", B=2, length=900, N=32, K=8, T=300), {}),
    "latent 16": (dataclasses.replace(LATENT[0], B=3, length=900), {}),
    "latent 128": (dataclasses.replace(LATENT[1], B=3, length=900, T=2), {}),
}  # fmt: skip


def with_tiles(
    q, k_pages, v_pages, page_tables, lengths, *, changes: dict[str, Any], **options
) -> jax.Array:
    unset = ("query_lengths", "value_width", "window", "soft_cap", "sinks", "scale")
    options = dict.fromkeys(unset) | options
    call = make_call(
        q[:, None] if q.ndim == 3 else q, k_pages, v_pages, page_tables, lengths, **options
    )
    config = dataclasses.replace(config_for(QueryLayout.of(call)), **changes)
    return paged_attention_hopper(call, config=config)


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def check(name: str) -> dict:
    """Errors of the kernels and of the portable form; rows of all lengths, one of them empty."""
    workload, options = CHECKED[name]
    dtype = jnp.dtype("float16" if "fp16" in name else "bfloat16")
    options = options | workload.options()
    lengths = workload.lengths(equal=False)
    tables, num_pages = workload.tables(lengths)
    lengths[0] = 0
    arguments = [*workload.pools(jax.random.key(0), dtype, num_pages), tables, lengths]
    if name == "sinks":
        options["sinks"] = jnp.linspace(-1.0, 3.0, workload.N)

    def run(implementation: str, arguments: list) -> jax.Array:
        f = functools.partial(paged_attention, **options, implementation=implementation)
        return jax.jit(f)(*arguments)

    wide = [x if x is None or x.dtype != dtype else x.astype(jnp.float32) for x in arguments]
    want = run("reference", wide)
    got, again = run("hopper", arguments), run("hopper", arguments)
    error, plain = relative(got, want), relative(run("xla", arguments), want)
    return {
        "error": error, "xla": plain, "ok": error <= 2 * plain and not bool(jnp.any(got[0])),
        "repeats": bool(jnp.all(got == again)),
    }  # fmt: skip


def contiguous(q, k, v) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def timed(f: Callable, args: list, num_bytes: int, copy: float | None, *, calls: int = 1) -> dict:
    """Medians of all kernels of a call, and of its longest.

    Args:
        f: that many calls.
    """
    runs, longest = [], []
    for _ in range(3):
        _, launches = profiler.measure(f, aggregate=False, iterations=5)(*args)
        assert launches is not None, "the call launched no kernel"
        for launch in launches:
            runs.append(sum(ms for _, ms in launch) / calls)
            longest.append(sum(sorted(ms for _, ms in launch)[-calls:]) / calls)
    ms, attend = statistics.median(runs), statistics.median(longest)
    rate = num_bytes / ms / 1e6
    row = {"us": round(1e3 * ms, 2), "attend_us": round(1e3 * attend, 2), "gb_s": round(rate, 1)}
    row["kernels"] = [[name[:40], round(1e3 * ms, 2)] for name, ms in launch]
    return row | ({"of_copy": round(rate / copy, 4)} if copy else {})


def copied() -> float:
    """GB/s of a copy of 2 GiB, read and written."""
    x = jax.random.bits(jax.random.key(0), (2**29,), "uint32")
    _, times = profiler.measure(jax.jit(lambda x: x + 1), iterations=9)(x)
    assert isinstance(times, list), "one kernel, nine times"
    return 2 * x.nbytes / statistics.median(times) / 1e6


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A form of the call, and the tables and lengths that it is given."""

    f: Callable
    tables: list[jax.Array]  # of pages that no other call has
    lengths: list[jax.Array]

    def __call__(self, q, k, v, tables, lengths) -> list[jax.Array]:
        """As many calls as there are tables."""
        f = jax.jit(self.f)
        return [f(q, k, v, t, n) for t, n in zip(tables, lengths, strict=True)]


def candidates(workload: PagedWorkload, *, variants: Sequence[str]) -> dict[str, Candidate]:
    """By name: the kernels at equal and at random lengths, and in other forms.

    Calls on a small cache rotate through several, as what L2 holds is no measure of the memory.
    """
    options, calls = workload.options(), 4 if workload.cache_bytes() < 2**29 else 1

    def candidate(f: Callable, *, equal: bool = True, in_order: bool = False) -> Candidate:
        lengths = workload.lengths(equal=equal)
        tables, num_pages = workload.tables(lengths, in_order=in_order)
        return Candidate(
            f=f,
            tables=[jnp.asarray(tables + i * num_pages) for i in range(calls)],
            lengths=[jnp.asarray(lengths) for _ in range(calls)],
        )

    kernels = functools.partial(paged_attention, **options, implementation="hopper")
    found = {
        "hopper": candidate(kernels), "hopper, random lengths": candidate(kernels, equal=False)
    }  # fmt: skip
    if variants:
        found["hopper, pages in order"] = candidate(kernels, in_order=True)
        for name in variants if not workload.latent else ():
            changes = VARIANTS[name]
            f = functools.partial(with_tiles, changes=changes, **options)
            found[name] = candidate(f)
    return found


class Shape:
    """A workload and its programs, which compile side by side."""

    def __init__(self, workload: PagedWorkload, pool, *, variants: Sequence[str]):
        self.workload = workload
        self.candidates = candidates(workload, variants=variants)
        tables = [t for each in self.candidates.values() for t in each.tables]
        num_pages = 1 + max(int(t.max()) for t in tables)
        self.make = jax.jit(lambda: workload.pools(jax.random.key(0), BF16, num_pages))
        shapes = jax.eval_shape(self.make)
        self.programs = {
            name: pool.submit(compiled, each, [*shapes, each.tables, each.lengths])
            for name, each in self.candidates.items()
        }

    def measure(self, table: Table, copy: float | None, *, cudnn: bool) -> None:
        """All candidates, and cuDNN on a contiguous cache of equal lengths."""
        w, arrays = self.workload, self.make()
        num_bytes = w.cache_bytes()
        for name, each in self.candidates.items():
            args = [*arrays, each.tables, each.lengths]
            measure = functools.partial(self.time, name, args, num_bytes, copy)
            table.add(f"{w.title}: {name}", measure)
        if cudnn:
            q, *pools = arrays
            whole = -(-w.B * w.length // w.size)
            k, v = (x[:whole].reshape(w.B, w.length, w.K, w.H) for x in pools)
            measure = functools.partial(timed, jax.jit(contiguous), [q, k, v], num_bytes, copy)
            table.add(f"{w.title}: cudnn, contiguous", measure)

    def time(self, name: str, args: list, num_bytes: int, copy: float | None) -> dict:
        """Times of a candidate, and how far a variant is from the form that is checked."""
        program = self.programs[name].result()
        row = timed(program, args, num_bytes, copy, calls=len(args[-1]))
        if name in VARIANTS:
            row["differs"] = relative(program(*args)[0], self.programs["hopper"].result()(*args)[0])
        return row


def compiled(f: Callable, args: list) -> jax.stages.Compiled:
    return jax.jit(f).lower(*args).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds in all")
    parser.add_argument("--variants", nargs="+", default=[], choices=[*VARIANTS])
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        wanted = [n for n in CHECKED if f"check {n}".startswith(tuple(args.only))]
        checks = {name: pool.submit(check, name) for name in wanted}
        sizes = [dataclasses.replace(WORKLOADS[0], size=size) for size in SIZES]
        shapes = [
            Shape(workload, pool, variants=args.variants if workload.size == 64 else ())
            for workload in (*WORKLOADS, *sizes)
            if workload.title.startswith(tuple(args.only))
        ]
    # Compilers try kernels on the GPU: nothing is timed before they are done.
    for name, row in checks.items():
        table.add(f"check {name}", row.result)
    copy = table.add("copy", lambda: {"gb_s": round(copied(), 1)}).get("gb_s")
    for shape in shapes:
        w = shape.workload
        shape.measure(table, copy, cudnn=w.size == 64 and not w.latent and w.B > 1)


if __name__ == "__main__":
    main()
