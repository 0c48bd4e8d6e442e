"""Paged decode attention of caches in few bits on a Hopper GPU: errors, then times beside bf16's.

python -m experiments.bench.kernels.paged_formats --out experiments/results/paged-formats-h200.json

"check" rows give relative errors against the formula in fp32, of the kernels and of the portable
form. Other rows are medians of CUPTI times of all kernels of a call; formats of a shape take turns,
and "speedup" is of the plain cache's median. "gb_s" counts codes and scales once. --variants adds
other tiles of one shape. A minute in all, most of it compiling.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.kernels.paged_attention import copied, relative, with_tiles
from experiments.bench.kernels.paged_cases import WORKLOADS, PagedWorkload
from experiments.bench.table import Table
from jaxinfra.config.cache import CacheFormat
from jaxinfra.ops.cache_format import stored_tokens
from pallas_kernels import paged_attention
from pallas_kernels.common.timing import measure

BF16 = jnp.dtype("bfloat16")
FORMATS = tuple(CacheFormat)
CODES = tuple(form for form in FORMATS if form is not CacheFormat.PLAIN)
SHAPES = ("b16 x 32768 x 64/8", "b64 x 8192 x 32/8")
CHECKED = {  # workloads, options, and some of the formats
    "plain": (PagedWorkload(name="", B=5, length=1500, N=64, K=8), {}, CODES),
    "tokens, window, cap": (
        PagedWorkload(name="", B=4, length=900, N=32, K=8, T=3, size=16, window=300),
        {"soft_cap": 5.0},
        (CacheFormat.FP8, CacheFormat.INT4),
    ),
    "heads of 64, sinks": (
        PagedWorkload(name="", B=3, length=700, N=16, K=16, H=64, V=64),
        {},
        (CacheFormat.INT8, CacheFormat.INT4),
    ),
    "chunk": (
        PagedWorkload(name="", B=2, length=900, N=32, K=8, T=100),
        {},
        (CacheFormat.INT4,),
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {  # what differs from the default tiles
    "3 workers, 3 tiles of 64": {"num_workers": 3, "num_stages": 3, "block_kv": 64},
    "4 tiles of 64": {"block_kv": 64, "num_stages": 4},
    "2 tiles": {"num_stages": 2},
    "no teams": {"teams": False},
}


def coded(arrays: list, form: CacheFormat) -> dict[str, Any]:
    """Queries, pools, and scales of a cache in this format."""
    names = dict(zip(("q", "k_pages", "v_pages"), arrays, strict=True))
    if form is CacheFormat.PLAIN:
        return names
    for pool, scale in (("k_pages", "k_scale"), ("v_pages", "v_scale")):
        names[pool], names[scale] = stored_tokens(names[pool], form, BF16)
    return names


def check(name: str, form: CacheFormat) -> dict:
    """Errors of the kernels and of the portable form; rows of all lengths, one of them empty."""
    workload, options, _ = CHECKED[name]
    options = options | workload.options()
    lengths = workload.lengths(equal=False)
    tables, num_pages = workload.tables(lengths)
    lengths[0] = 0
    arrays = jax.jit(lambda: coded(workload.pools(jax.random.key(0), BF16, num_pages), form))()
    arrays |= {"page_tables": jnp.asarray(tables), "lengths": jnp.asarray(lengths)}
    if "sinks" in name:
        arrays["sinks"] = jnp.linspace(-1.0, 3.0, workload.N)

    def by(implementation: str):
        return jax.jit(functools.partial(paged_attention, **options, implementation=implementation))

    wide: dict[str, Any] = {
        n: x.astype(jnp.float32) if x.dtype == BF16 else x for n, x in arrays.items()
    }
    want, kernels = by("reference")(**wide), by("hopper")
    got, again = kernels(**arrays), kernels(**arrays)
    error, plain = relative(got, want), relative(by("xla")(**arrays), want)
    return {
        "error": error, "xla": plain, "ok": error <= 2 * plain and not bool(jnp.any(got[0])),
        "repeats": bool(jnp.all(got == again)),
    }  # fmt: skip


def attend(changes: dict[str, Any], arrays: dict[str, Any]) -> jax.Array:
    """One call, with the default tiles or others."""
    if changes:
        return with_tiles(**arrays, changes=changes)
    return paged_attention(**arrays, implementation="hopper")


class Shape:
    """A workload in all formats, compiled and run once as soon as a thread is free."""

    def __init__(self, workload: PagedWorkload, pool, *, variants: bool):
        self.workload = workload
        lengths = workload.lengths()
        tables, num_pages = workload.tables(lengths)
        rows = {"page_tables": jnp.asarray(tables), "lengths": jnp.asarray(lengths)}
        pools = jax.jit(lambda: workload.pools(jax.random.key(0), BF16, num_pages))()
        code = jax.jit(coded, static_argnums=1)
        self.arrays = {form: dict(code(pools, form)) | rows for form in FORMATS}
        self.candidates = {}
        for form in FORMATS:
            changed = VARIANTS if variants and form in CODES else {}
            for name, changes in {"": {}, **changed}.items():
                f = jax.jit(functools.partial(attend, changes))
                self.candidates[f"{form} {name}".strip()] = f, (self.arrays[form],)
        self.ready = {
            name: pool.submit(lambda f=f, args=args: jax.block_until_ready(f(*args)))
            for name, (f, args) in self.candidates.items()
        }

    def num_bytes(self, form: CacheFormat) -> int:
        """Of codes and scales, or of elements, that a step reads."""
        w = self.workload
        elements = w.cache_bytes(itemsize=1)
        if form is CacheFormat.PLAIN:
            return 2 * elements
        assert form.bits is not None
        return elements * form.bits // 8 + 2 * 2 * w.B * w.length * w.K

    def measure(self, table: Table, copy: float | None) -> None:
        """All candidates in turns."""
        candidates, failed = {}, {}
        for name, each in self.candidates.items():
            error = self.ready[name].exception()
            if error is None:
                candidates[name] = each
            else:
                failed[name] = error
        times = measure(candidates, rounds=7, iterations=4)
        plain = times[CacheFormat.PLAIN].median_ms
        result = self.ready[CacheFormat.PLAIN].result()

        def row(name: str) -> dict:
            if name in failed:
                raise failed[name]
            ms = times[name].median_ms
            rate = self.num_bytes(CacheFormat(name.split()[0])) / ms / 1e6
            return {
                "us": round(1e3 * ms, 1),
                "speedup": round(plain / ms, 3),
                "gb_s": round(rate, 1),
                "of_copy": round(rate / copy, 4) if copy else None,
                "from_plain": round(relative(self.ready[name].result(), result), 4),
            }

        for name in self.candidates:
            table.add(f"{self.workload.name}: {name}", functools.partial(row, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds in all")
    parser.add_argument("--variants", action="store_true", help="other tiles too")
    parser.add_argument("--no-checks", action="store_true")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        every = [(name, form) for name, (*_, forms) in CHECKED.items() for form in forms]
        wanted = [] if args.no_checks else every
        checks = {(name, form): pool.submit(check, name, form) for name, form in wanted}
        chosen = [w for w in WORKLOADS if w.name in SHAPES]
        # Other tiles of one shape: compiling is what takes time.
        shapes = [Shape(w, pool, variants=args.variants and w.name == SHAPES[0]) for w in chosen]
    # Compilers try kernels on the GPU: nothing is timed before they are done.
    for (name, form), row in checks.items():
        table.add(f"check {form}, {name}", row.result)
    copy = table.add("copy", lambda: {"gb_s": round(copied(), 1)}).get("gb_s")
    for shape in shapes:
        shape.measure(table, copy)
    print(f"\n{'':44}{'us':>9}{'speedup':>9}{'GB/s':>9}")
    for row in table.rows:
        if "speedup" in row:
            print(f"{row['name']:44}{row['us']:9.1f}{row['speedup']:9.2f}{row['gb_s']:9.0f}")
        elif "failed" in row or not row.get("ok", True):
            print(f"{row['name']:44} {row.get('failed', 'WRONG')}")


if __name__ == "__main__":
    main()
