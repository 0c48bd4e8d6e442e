"""Calls of paged attention that are tested everywhere, and their oracle.

The oracle walks tables in Python and shares nothing with the package. Slots that no row has, and
pages that belong to nobody, hold NaN: whoever reads them into a result is found out.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_weight import WeightCode
from tests.rounding import Rounded, rounded, stored
from tests.seeds import seeded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCase:
    name: str
    lengths: tuple[int, ...]
    T: int = 1
    query_lengths: tuple[int, ...] | None = None
    N: int = 8
    K: int = 2
    H: int = 64
    V: int | None = None
    size: int = 16
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    scale: float | None = None

    @property
    def B(self):
        return len(self.lengths)

    @property
    def value_width(self):
        return self.V or self.H

    @property
    def options(self):
        return {"window": self.window, "soft_cap": self.cap, "scale": self.scale}

    def arrays(self, dtype, *, hidden=np.nan):
        """Arguments and array options; ``hidden`` lies where nobody put anything."""
        rng = np.random.default_rng(seeded(0))
        per_row = max(-(-max(self.lengths) // self.size), 1) + 1
        pool = self.B * per_row + 3

        def random(*shape):
            return rng.standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype))

        q = random(self.B, self.T, self.N, self.H) * np.asarray(1.5, jnp.dtype(dtype))
        k = random(pool, self.size, self.K, self.H)
        v = random(pool, self.size, self.K, self.value_width)
        tables = rng.permutation(pool)[: self.B * per_row].reshape(self.B, per_row)
        there = np.zeros((pool, self.size), bool)
        for b, length in enumerate(self.lengths):
            for position in range(length):
                there[tables[b, position // self.size], position % self.size] = True
            tables[b, -(-length // self.size) :] = -1  # no page yet
        k[~there], v[~there] = hidden, hidden
        arrays = {"sinks": np.linspace(-1.0, 2.0, self.N).astype(np.float32)} if self.sinks else {}
        if self.query_lengths is not None:
            arrays["query_lengths"] = np.array(self.query_lengths, np.int32)
        lengths = np.array(self.lengths, np.int32)
        arguments = (q, k, v, tables.astype(np.int32), lengths)
        return arguments, arrays


def expected(case, arguments, arrays):
    """Attention from the definition, a query head at a time, as ``Rounded`` [B, T, N, V]."""
    q, k, v, tables, lengths = arguments
    kept = q.dtype
    counts = arrays.get("query_lengths", np.full(case.B, case.T))
    out = Rounded(np.zeros((case.B, case.T, case.N, case.value_width)))
    scale = case.H**-0.5 if case.scale is None else case.scale
    for b in range(case.B):
        for t in range(int(counts[b])):
            position = int(lengths[b]) - int(counts[b]) + t
            first = 0 if case.window is None else max(0, position - case.window + 1)
            seen = [divmod(p, case.size) for p in range(first, position + 1)]
            if not seen:
                continue
            where = ([tables[b, m] for m, _ in seen], [slot for _, slot in seen])
            for n in range(case.N):
                head = n // (case.N // case.K)
                keys = k[*where, head]
                values = v[*where, head]
                scores = (rounded(keys) @ Rounded(q[b, t, n][:, None])) * scale
                if case.cap is not None:
                    scores = np.tanh(scores / case.cap) * case.cap
                top = scores.value.max()
                p = np.exp(scores - top)
                total = np.sum(p)
                if case.sinks:
                    total = total + np.exp(Rounded(arrays["sinks"][n]) - top)
                p = stored(p, kept).reshape(1, -1)
                out[b, t, n] = ((p @ rounded(values)) / total.reshape(1, 1))[0]
    return out


def coded(arguments, code, *, rounds):
    """Arguments with codes for pages, their scales, and what the oracle reads instead.

    Where nobody put anything lies what is no number: all bits of codes, and NaN for scales.

    Args:
        rounds: whether numbers are rounded to the queries' dtype before they are multiplied.
    """
    q, k, v, tables, lengths = arguments
    scales, pools, true = {}, [], []
    for name, x in (("k_scale", k), ("v_scale", v)):
        wide = x.astype(np.float64)
        top = {WeightCode.E4M3: 448.0, WeightCode.INT8: 127.0, WeightCode.INT4: 7.0}[code]
        scale = (np.abs(wide).max(-1) / top).astype(q.dtype)
        exact = np.clip(wide / scale.astype(np.float64)[..., None], -top, top)
        hidden = np.isnan(exact)
        if code is WeightCode.E4M3:
            codes = np.where(hidden, np.nan, exact).astype(code.storage)
            numbers = codes.astype(np.float64)
        else:
            numbers = np.rint(np.where(hidden, 0, exact))
            codes = numbers.astype(np.int8)
        if code is WeightCode.INT4:
            low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
            codes = low | high << 4
        if code is not WeightCode.E4M3:
            codes[hidden[..., : codes.shape[-1]]] = -1 if code is WeightCode.INT8 else 255
        scales[name] = scale
        pools.append(codes)
        product = Rounded(numbers) * Rounded(scale.astype(np.float64)[..., None])
        true.append(stored(product, q.dtype) if rounds else product)
    return (q, *pools, tables, lengths), scales, (q, *true, tables, lengths)


CASES = [
    PagedCase(name="pages-16", lengths=(37, 1, 96, 64)),
    PagedCase(name="pages-32", lengths=(37, 130, 64), size=32, N=4, K=1),
    PagedCase(name="pages-64", lengths=(200, 63, 65), size=64, H=128),
    PagedCase(name="pages-128", lengths=(129, 300), size=128, H=128, N=4, K=4),
    PagedCase(name="empty-rows", lengths=(0, 20, 0), sinks=True),
    PagedCase(name="window", lengths=(150, 20, 33), window=33, size=16),
    PagedCase(name="window-of-one", lengths=(150, 64), window=1, size=64),
    PagedCase(name="cap", lengths=(100, 7), cap=2.0),
    PagedCase(name="sinks", lengths=(100, 7), sinks=True, N=16, K=2),
    PagedCase(name="everything", lengths=(150, 70), T=3, query_lengths=(3, 1), window=40, cap=3.0,
              sinks=True, scale=0.3, size=32),
    PagedCase(name="chunk", lengths=(90, 40, 12), T=12, query_lengths=(12, 7, 0)),
    PagedCase(name="more-queries-than-keys", lengths=(4, 30), T=8),
    PagedCase(name="wide", lengths=(70, 33), H=256, size=32),
    PagedCase(name="widths-differ", lengths=(70, 33), H=192, V=128, size=32),
    PagedCase(name="heads-of-three", lengths=(40,), N=6, K=2, T=2),
]  # fmt: skip
NAMED = {case.name: case for case in CASES}

CHUNKS = [
    PagedCase(name="chunk-everything", lengths=(300, 150), T=140, query_lengths=(130, 9), N=2, K=1,
              window=70, cap=5.0, sinks=True),
    PagedCase(name="chunk-behind", lengths=(300,), T=140, N=2, K=1, size=64),
    PagedCase(name="chunk-before-keys", lengths=(40,), T=140, N=1, K=1, H=128, size=128),
    PagedCase(name="chunk-empty", lengths=(0, 200), T=140, query_lengths=(0, 70), N=1, K=1,
              size=32),
]  # fmt: skip
"""Calls of many tokens, of few heads for the interpreter's sake."""
