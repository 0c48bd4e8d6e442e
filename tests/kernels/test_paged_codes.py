"""Paged attention of a cache in few bits: instructions of the kernel's threads, run on a CPU."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention.hopper.attend import NO_MAXIMUM
from pallas_kernels.paged_attention.hopper.code_tile import CodeResult, CodeTile
from pallas_kernels.paged_attention.hopper.config import RESULT_PADDING, ROWS
from pallas_kernels.paged_attention.spec import PagedSpec
from pallas_kernels.quantized_weight import WeightCode
from pallas_kernels.quantized_weight.fragments import Dequantizer
from tests.kernels.warp_interpreter import THREADS, Memory, run
from tests.rounding import Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

BF16 = ml_dtypes.bfloat16
HEADS = 4  # whose scales lie side by side


def codes_of(rng, code, rows, width):
    """Bytes [rows, *] as a cache has them, and the numbers that they mean."""
    if code is WeightCode.INT4:
        numbers = rng.integers(-7, 8, (rows, width))
        low, high = np.split((numbers + 8).astype(np.uint8), 2, axis=1)
        return low | high << 4, numbers.astype(np.float64)
    if code is WeightCode.INT8:
        numbers = rng.integers(-127, 128, (rows, width)).astype(np.int8)
    else:
        numbers = rng.normal(0, 60, (rows, width)).astype(ml_dtypes.float8_e4m3fn)
        numbers[:, :3] = [448.0, -(2.0**-9), 0.0]  # the largest, and a subnormal one
    return numbers.view(np.uint8), numbers.astype(np.float64)


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Bytes of rows as the copy engine leaves them: bits 4 to 6 of addresses xor bits 7 to 9."""
    count, width = rows.shape
    at = np.arange(count * width)
    out = np.zeros(count * width, np.uint8)
    out[at ^ (((at >> 7) & (width // 16 - 1)) << 4)] = rows.reshape(-1)
    return out


def tile_of(code, width, *, keys=128, rows=8, tokens=1, **options):
    return CodeTile(
        H=width, V=width, keys=keys, rows=rows, tokens=tokens, span=8, scale_heads=HEADS,
        spec=PagedSpec(scale=width**-0.5, **options),
        dequantizer=Dequantizer(code=code, dtype=jnp.dtype(jnp.bfloat16)),
    )  # fmt: skip


@dataclasses.dataclass
class Tiles:
    """Random queries, and tiles of keys and values, one after another."""

    tile: CodeTile
    count: int = 2
    head: int = 3

    def __post_init__(self):
        rng = np.random.default_rng(seeded(0))
        t, total = self.tile, self.tile.keys * self.count
        code = t.dequantizer.code
        self.q = (1.5 * rng.standard_normal((t.rows, t.H))).astype(BF16)
        self.k_bytes, self.k = codes_of(rng, code, total, t.H)
        self.v_bytes, self.v = codes_of(rng, code, total, t.V)
        largest = 7 if code is WeightCode.INT4 else 127
        self.scales = (rng.uniform(0.2, 2, (2, total, HEADS)) / largest).astype(BF16)

    def result(self, positions: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [rows, V] and logsumexps, as the kernel's threads make them.

        Args:
            positions: of the first token, and how many tokens there are.
        """
        t = self.tile
        sizes = [2 * t.rows * t.H, t.keys * t.key_bytes, t.keys * t.value_bytes]
        sizes += [2 * t.keys * HEADS] * 2
        sizes += [4 * 8 * t.rows, 16 * t.rows * (t.V + RESULT_PADDING)]
        q, k, v, ks, vs, numbers, parts, end = np.cumsum(
            [0, *(-(-n // 1024) * 1024 for n in sizes)]
        )
        memory = Memory(int(end), 4 * t.rows * t.V + 4 * ROWS)
        thread = np.arange(THREADS, dtype=np.uint32)

        def put(at, data):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            memory.shared[at : at + len(data)] = data

        def number(x):
            return np.full(THREADS, x % 2**32, np.uint32)

        for strip in range(t.rows // 8):
            for panel in range(t.H // 64):
                part = self.q[8 * strip : 8 * strip + 8, 64 * panel : 64 * panel + 64]
                put(q + strip * 16 * t.H + 1024 * panel, swizzled(part.view(np.uint8)))
        (queries,) = run(lambda *a: (t.queries(*a),), [thread, number(q)], memory)
        softmax = [np.full(THREADS, NO_MAXIMUM, np.float32)] * t.num_softmax
        softmax += [np.zeros(THREADS, np.float32)] * t.num_softmax
        sums = [np.zeros(THREADS, np.float32)] * t.num_sums
        for i in range(self.count):
            here = slice(t.keys * i, t.keys * (i + 1))
            put(k, swizzled(self.k_bytes[here]))
            put(v, swizzled(self.v_bytes[here]))
            put(ks, self.scales[0, here])
            put(vs, self.scales[1, here])

            def attend(thread, k, ks, vs, v, *rest):
                known, rest = rest[:4], list(rest[4:])
                queries, rest = rest[: t.num_queries], rest[t.num_queries :]
                softmax, sums = rest[: 2 * t.num_softmax], rest[2 * t.num_softmax :]
                softmax, alphas, right = t.probabilities(
                    thread, (k, ks, vs), known, queries, softmax
                )
                return softmax, t.add_values(thread, v, right, alphas, sums)

            places = [number(int(x)) for x in (k, ks, vs, v)]
            known = [number(x) for x in (t.keys * i, self.head, *positions)]
            softmax, sums = run(
                attend, [thread, *places, *known, *queries, *softmax, *sums], memory
            )

        def leave(thread, numbers, parts, out, lse, partial, *rest):
            split = 2 * t.num_softmax
            CodeResult(tile=t).write(
                thread, (numbers, parts), (out, lse, partial), list(rest[:split]),
                list(rest[split:]), lambda: None,
            )  # fmt: skip

        out_places = [np.full(THREADS, x, np.uint64) for x in (0, 4 * t.rows * t.V)]
        places = [number(int(numbers)), number(int(parts))]
        run(leave, [thread, *places, *out_places, number(0), *softmax, *sums], memory)
        out, lse = np.split(memory.out.view(np.float32), [t.rows * t.V])
        return out.reshape(t.rows, t.V), lse[: t.rows]

    def expected(self, positions: tuple[int, int]) -> tuple[Rounded, Rounded]:
        """From the definition, a query at a time; probabilities times scales are bfloat16."""
        t, (first, tokens) = self.tile, positions
        out = Rounded(np.zeros((t.rows, t.V)))
        lse = Rounded(np.full(t.rows, -np.inf))
        for row in range(t.rows):
            token = row // t.span if t.tokens > 1 else 0
            position = first + token
            if t.tokens > 1 and token >= tokens:
                continue
            begin = 0 if t.spec.window is None else max(0, position - t.spec.window + 1)
            seen = slice(begin, position + 1)
            scales = self.scales[:, seen, self.head].astype(np.float64)
            scores = Rounded(self.k[seen]) @ Rounded(self.q[row].astype(np.float64)[:, None])
            scores = scores[:, 0] * Rounded(scales[0]) * t.spec.scale
            if t.spec.soft_cap is not None:
                scores = np.tanh(scores / t.spec.soft_cap) * t.spec.soft_cap
            p = np.exp(scores - scores.value.max())
            weights = stored(p * Rounded(scales[1]), jnp.dtype(jnp.bfloat16)).reshape(1, -1)
            out[row] = ((weights @ Rounded(self.v[seen])) / np.sum(p).reshape(1, 1))[0]
            lse[row] = (np.log(np.sum(p)) + scores.value.max()) / np.log(2.0)
        return out, lse


CASES = {
    "fp8-128": (tile_of(WeightCode.E4M3, 128), (200, 1)),
    "int8-128": (tile_of(WeightCode.INT8, 128, window=70), (255, 1)),
    "int4-128": (tile_of(WeightCode.INT4, 128, rows=16, tokens=2), (129, 2)),
    "fp8-64": (tile_of(WeightCode.E4M3, 64, soft_cap=2.0), (131, 1)),
    "int4-64": (tile_of(WeightCode.INT4, 64, keys=64, rows=16, tokens=2), (100, 1)),
}


@pytest.mark.slow_cases("int4-128", "fp8-64")
@pytest.mark.parametrize("name", CASES)
def test_threads_compute_the_definition(name):
    tile, positions = CASES[name]
    tiles = Tiles(tile)
    out, lse = tiles.result(positions)
    want, want_lse = tiles.expected(positions)
    assert_within_rounding(out, want)
    is_there = np.isfinite(want_lse.value)
    assert (lse[~is_there] == -np.inf).all()
    assert_within_rounding(lse[is_there], want_lse[is_there])


FAULTS = {
    "a scale of another token": lambda tiles: np.copyto(
        tiles.scales, np.roll(tiles.scales, 1, axis=1)
    ),
    "halves of bytes": lambda tiles: np.copyto(
        tiles.v_bytes, tiles.v_bytes >> 4 | tiles.v_bytes << 4
    ),
    "two keys for each other": lambda tiles: np.copyto(
        tiles.k_bytes[:2], tiles.k_bytes[1::-1].copy()
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault):
    tile, positions = CASES["int4-64"]
    tiles = Tiles(tile)
    want, _ = tiles.expected(positions)
    FAULTS[fault](tiles)
    with pytest.raises(AssertionError, match=r"are rounding|root mean"):
        assert_within_rounding(tiles.result(positions)[0], want)
