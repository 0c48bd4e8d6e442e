"""Attention to pages on a Hopper GPU: decode steps, quantized caches, and chunks of prompts.

python -m experiments.bench.kernels.paged_attention \\
    --out experiments/results/paged-attention-h200.json

Times are kernel times of whole calls, plan and merge among them, medians of rounds in which
candidates alternate. GB/s count the cache's keys and values once (codes and scales, where it is
quantized); "of_copy" divides them by the copy of the same process. "cudnn" attends to a contiguous
cache of the same lengths. Chunks count the FLOPs of pairs that see each other: "heads" is the
kernel of decode steps, "chunk" the one for 128 tokens and more, "whole" ``flash_attention`` of the
same keys in an array.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import copied, options, table_of
from experiments.bench.table import Table
from experiments.bench.timing import measure
from jaxinfra.config.cache import CacheFormat
from jaxinfra.ops.cached_attention import stored_tokens
from pallas_kernels import flash_attention, paged_attention
from pallas_kernels.paged_attention.hopper.chunk import attend_chunk
from pallas_kernels.paged_attention.hopper.config import QueryLayout, config_for
from pallas_kernels.paged_attention.hopper.forward import paged_attention_hopper
from pallas_kernels.paged_attention.validate import make_call

BF16 = jnp.dtype("bfloat16")
ROTATED = 4
"""Calls of a candidate on a small cache, each on pages of its own: L2 is no measure of memory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Rows of one step, each with ``length`` positions or random ones of the same sum."""

    name: str
    B: int
    length: int
    N: int
    K: int
    H: int = 128
    V: int = 128
    size: int = 64
    T: int = 1

    def lengths(self, *, equal: bool = True) -> np.ndarray:
        """int32 [B]."""
        if equal:
            return np.full(self.B, self.length, np.int32)
        share = np.random.default_rng(0).dirichlet(np.full(self.B, 2.0))
        lengths = np.maximum(self.T, (share * self.B * self.length).astype(np.int32))
        lengths[np.argmax(lengths)] += self.B * self.length - lengths.sum()
        return lengths

    @property
    def elements(self) -> int:
        """Elements of keys and values that each step reads at least."""
        return self.B * self.length * self.K * (self.H + self.V)

    def pools(self, num_pages: int) -> list[jax.Array]:
        """Queries and pools."""
        keys = jax.random.split(jax.random.key(0), 3)
        pages = (num_pages, self.size, self.K)
        q = jax.random.normal(keys[0], (self.B, self.T, self.N, self.H), BF16)
        k = jax.random.normal(keys[1], (*pages, self.H), BF16)
        return [q, k, jax.random.normal(keys[2], (*pages, self.V), BF16)]

    def tables(self, lengths: np.ndarray) -> tuple[np.ndarray, int]:
        """int32 [B, M] of pages in random order, and how many there are."""
        counts = -(-lengths // self.size)
        tables = np.full((self.B, counts.max()), -1, np.int32)
        order = np.random.default_rng(1).permutation(np.arange(counts.sum()))
        for row, pages in zip(tables, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            row[: len(pages)] = pages
        return tables, int(counts.sum())


DECODE = (
    Workload(name="b64 x 8192 x 32/8", B=64, length=8192, N=32, K=8),
    Workload(name="b16 x 32768 x 64/8", B=16, length=32768, N=64, K=8),
    Workload(name="b128 x 2048 x 32/32", B=128, length=2048, N=32, K=32),
    Workload(name="b1 x 32768 x 32/8", B=1, length=32768, N=32, K=8),
    Workload(name="b256 x 2048 x 32/8", B=256, length=2048, N=32, K=8),
    Workload(name="b64 x 2048 x 32/8 of 64", B=64, length=2048, N=32, K=8, H=64, V=64),
)
QUANTIZED = (DECODE[1], DECODE[0])
TOKENS, BEFORE = (64, 128, 256, 512, 1024), (0, 2048, 30720)
CHUNKS = tuple(
    Workload(name=f"t{T} behind {before}", B=1, length=before + T, T=T, N=32, K=8)
    for before in BEFORE
    for T in TOKENS
)


def decode(w: Workload, copy: float) -> dict[str, dict]:
    """A row for each form of a decode step."""
    attend = functools.partial(paged_attention, implementation="hopper")
    num_calls = ROTATED if 2 * w.elements < 2**29 else 1

    def several(q, k, v, tables, lengths):
        return [attend(q, k, v, each, lengths) for each in tables]

    given = {}
    for name, equal in (("hopper", True), ("hopper, random lengths", False)):
        lengths = w.lengths(equal=equal)
        tables, num_pages = w.tables(lengths)
        tables = [jnp.asarray(tables + i * num_pages) for i in range(num_calls)]
        given[name] = tables, jnp.asarray(lengths), num_calls * num_pages
    arrays = jax.jit(w.pools, static_argnums=0)(max(pages for *_, pages in given.values()))
    candidates: dict[str, tuple[Callable, tuple]] = {
        name: (jax.jit(several), (*arrays, tables, lengths))
        for name, (tables, lengths, _) in given.items()
    }
    q, *pools = arrays
    if w.B > 1:
        whole = -(-w.B * w.length // w.size)
        k, v = (x[:whole].reshape(w.B, w.length, w.K, w.H) for x in pools)
        cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        candidates["cudnn, contiguous"] = jax.jit(cudnn), (q, k, v)
    rows = {}
    for name, taken in measure(candidates).items():
        ms = taken.median_ms / (num_calls if name in given else 1)
        rate = 2 * w.elements / ms * 1e3
        rows[name] = {"us": 1e3 * ms, "gb_s": rate / 1e9, "of_copy": rate / copy}
    return rows


def coded(arrays: list, form: CacheFormat) -> dict[str, Any]:
    """Queries, pools, and scales of a cache in this format."""
    names = dict(zip(("q", "k_pages", "v_pages"), arrays, strict=True))
    if form is CacheFormat.PLAIN:
        return names
    for pool, scale in (("k_pages", "k_scale"), ("v_pages", "v_scale")):
        names[pool], names[scale] = stored_tokens(names[pool], form, BF16)
    return names


def quantized(w: Workload, copy: float) -> dict[str, dict]:
    """A row for each format of a cache."""
    lengths = w.lengths()
    tables, num_pages = w.tables(lengths)
    given = {"page_tables": jnp.asarray(tables), "lengths": jnp.asarray(lengths)}
    pools = jax.jit(w.pools, static_argnums=0)(num_pages)
    code = jax.jit(coded, static_argnums=1)
    attend = jax.jit(lambda arrays: paged_attention(**arrays, implementation="hopper"))
    times = measure(
        {form.value: (attend, (dict(code(pools, form)) | given,)) for form in CacheFormat}
    )
    rows = {}
    for form in CacheFormat:
        ms = times[form.value].median_ms
        scales = 0 if form is CacheFormat.PLAIN else 2 * 2 * w.B * w.length * w.K
        rate = (w.elements * (form.bits or 16) // 8 + scales) / ms * 1e3
        rows[form.value] = {
            "us": 1e3 * ms,
            "speedup": times[CacheFormat.PLAIN.value].median_ms / ms,
            "gb_s": rate / 1e9,
            "of_copy": rate / copy,
        }
    return rows


def chunk_forms() -> dict[str, Callable]:
    """Functions of (q, k, v, tables, lengths)."""

    def heads(*arrays):
        made = make_call(*arrays)
        return paged_attention_hopper(made, config=config_for(QueryLayout.of(made)))

    def whole(q, k, v, tables, lengths):
        del lengths  # rows are as many whole pages, one after another
        B, M = tables.shape
        k, v = (x[: B * M].reshape(B, -1, *x.shape[2:]) for x in (k, v))
        return flash_attention(q, k, v, is_causal=True, implementation="hopper")

    return {
        "heads": heads,
        "chunk": lambda *arrays: attend_chunk(make_call(*arrays)),
        "whole": whole,
    }


def chunks(w: Workload, copy: float) -> dict[str, dict]:
    """A row of a chunk, with the times and rates of each kernel."""
    del copy
    lengths = w.lengths()
    tables, num_pages = w.tables(lengths)
    arrays = jax.jit(w.pools, static_argnums=0)(num_pages)
    given = *arrays, jnp.asarray(tables), jnp.asarray(lengths)
    forms = {n: f for n, f in chunk_forms().items() if n != "whole" or max(TOKENS) == w.T}
    times = measure({name: (f, given) for name, f in forms.items()})
    flops = 4 * w.B * w.T * (w.length - w.T + (w.T + 1) / 2) * w.N * w.H
    row: dict[str, float] = {}
    for name, taken in times.items():
        row[f"{name}_us"] = 1e3 * taken.median_ms
        row[f"{name}_tflop_s"] = flops / taken.median_ms / 1e9
    return {"": row}


PARTS = {"decode": (decode, DECODE), "formats": (quantized, QUANTIZED), "chunks": (chunks, CHUNKS)}


def add(table: Table, name: str, rows: Callable[[], dict[str, dict]]) -> None:
    """Adds the rows of one workload; its failure is one row."""
    if not name.startswith(tuple(table.only)):
        return
    found: dict[str, dict] = {}
    failed = table.add(name, lambda: found.update(rows()) or {"candidates": len(found)})
    if "candidates" in failed:
        for candidate, row in found.items():
            table.add(f"{name}: {candidate}", lambda row=row: row)


def main() -> None:
    args = options(__doc__, budget=300.0).parse_args()
    table = table_of(args)
    copy = copied()
    table.add("copy", lambda: {"gb_s": copy / 1e9})
    for part, (f, workloads) in PARTS.items():
        for w in workloads:
            add(table, f"{part} {w.name}", functools.partial(f, w, copy))


if __name__ == "__main__":
    main()
