"""What a block's threads do between the copies of a layer's launch, in NumPy.

A block at a time runs each phase; memory that nobody wrote holds NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import inputs, stream
from pallas_kernels.decode_layer.attention import Attention
from pallas_kernels.decode_layer.attention_threads import HeadSizes, most_parts, put_attended
from pallas_kernels.decode_layer.config import DEPTH, SLICES, THREADS, WIDTH, TileForm, WorkSplit
from pallas_kernels.decode_layer.stream import QuantizedTile, TileStream
from pallas_kernels.hopper.each_thread import layer_array
from pallas_kernels.hopper.mosaic import arith
from pallas_kernels.hopper.threads import Address, constant, total
from pallas_kernels.quantized_weight import QuantizedWeight, arranged, round_weight
from tests.kernels.layer_cases import FORMS
from tests.kernels.thread_stand_in import Ref, Warpgroup, bfloat16
from tests.kernels.warp_interpreter import Memory, run

BF16 = jnp.dtype(jnp.bfloat16)
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}  # sums of some hundred numbers of size 1 in fp32


class Block:
    """The threads of a block that multiply, and memory."""

    def __init__(self):
        self.threads = Warpgroup(ml_dtypes.bfloat16, count=THREADS)

    def put(self, array: np.ndarray) -> Ref:
        return self.threads.put(np.ascontiguousarray(array))

    def nothing(self, *shape: int) -> Ref:
        return self.put(np.full(shape, np.nan, np.float32))

    def read(self, ref: Ref, *shape: int) -> np.ndarray:
        return self.threads.read(ref, shape, np.float32).astype(np.float64)

    def run(self, body, *arguments, **options):
        with self.threads.running():
            return body(*arguments, **options)


def in_parts(rng, x: np.ndarray, split: WorkSplit) -> np.ndarray:
    """Columns as blocks leave their parts: [parts, N]."""
    found = rng.normal(size=(split.parts, split.N)).astype(np.float32)
    found[-1] = x - found[:-1].sum(axis=0)
    return found


def fp32(x_smem: Ref) -> inputs.Rows:
    """What 16-bit weights are multiplied with."""
    return inputs.Rows(smem=x_smem, packed=None)


def units_of(split: WorkSplit, b: int) -> list[int]:
    """A block's, as ``Product.place`` deals them."""
    return list(range(b, split.units, split.blocks))


def rows_of(split: WorkSplit, b: int) -> np.ndarray:
    """Rows of the weight in a block's units."""
    rows = split.rows
    parts = [u // split.across for u in units_of(split, b)]
    return np.concatenate([np.arange(rows) + part * rows for part in parts])


def test_a_product_of_all_blocks_is_whole():
    rng, split = np.random.default_rng(0), WorkSplit(K=768, N=320, blocks=4)
    x, w = rng.normal(size=split.K).astype(np.float32), bfloat16(rng, split.K, split.N)
    block, stream = Block(), stream_of(layers=2)
    x_ref, sums_ref = block.put(x), block.nothing(2, SLICES, WIDTH)
    ring, barriers = block.nothing(3, DEPTH, WIDTH // 2), block.nothing(16)
    weights = block.put(np.stack([w * 0, w]))
    everywhere = [block.nothing(split.parts, split.N) for _ in range(2)]  # two devices' memory
    assert split.parts > 1
    for b in range(split.blocks):
        for j, u in enumerate(units_of(split, b)):
            part, column = divmod(u, split.across)
            sums = [np.zeros(THREADS, np.float32)] * 8
            for turn in range(split.down):
                row = part * split.down + turn
                weight = block.run(layer_array, weights, 1, w.nbytes)
                block.run(stream.fetch, barriers, ring, [weight], turn, row, column, split)
                place = block.run(stream.slots.place, ring, turn)
                sums = block.run(stream.tile, sums, place, x_ref, row * DEPTH)
            block.run(stream.put, sums, sums_ref, everywhere, j, part, column, split)
    want = x.astype(np.float64) @ w.astype(np.float64)
    for parts in everywhere:
        got = block.read(parts, split.parts, split.N).sum(axis=0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1 << 20, (1 << 31) + 256, (1 << 33) + 128])
def test_a_layer_may_begin_far_into_a_stack(size):
    base, layers = np.full(128, 1 << 46, np.uint64), np.arange(128, dtype=np.uint32)

    def body(base, layer):
        return [[layer_array(Address(base), layer, size).value]]

    [[found]] = run(body, [base, layers], Memory(0))
    assert found.tolist() == [(1 << 46) + size * i for i in range(128)]


def stream_of(*, layers: int) -> TileStream:
    """A ring of three tiles, of products that nobody asks for."""
    return TileStream(
        products=(), attention=attention_of(64), num_layers=layers, num_stages=3, dtype=BF16
    )


def attention_of(H: int) -> Attention:
    """A small one."""
    split = WorkSplit(K=256, N=8 * H, blocks=7)
    sizes = HeadSizes(N=4, K=2, H=H, scale=0.2, dtype=BF16, split=split)
    return Attention(sizes=sizes, num_pages=11, page=32, table=12, blocks=3)


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_normalized_stream(is_summed):
    rng, split = np.random.default_rng(1), WorkSplit(K=512, N=1152, blocks=7)
    x, product = bfloat16(rng, split.N), rng.normal(size=split.N)
    scale = rng.normal(size=split.N).astype(np.float32)
    norm = RmsNorm(scale=jnp.asarray(scale), epsilon=1e-3, offset=1.0)
    block = Block()
    own, parts = block.put(x), block.put(in_parts(rng, product, split))
    before = np.full((2, split.N), np.nan, np.float32)
    before[0] = x
    for b in range(split.blocks):
        x_smem, stream = block.nothing(split.N), block.put(before)
        block.run(
            inputs.put_normed, None if is_summed else own, parts if is_summed else None, stream,
            block.put(scale), block.nothing(SLICES), fp32(x_smem), b, row=1,
            split=split if is_summed else None, norm=norm, blocks=split.blocks, dtype=BF16,
        )  # fmt: skip
        before = block.threads.read(stream, (2, split.N), np.float32).copy()
        want = x.astype(np.float64) + (product if is_summed else 0.0)
        normed = want / np.sqrt(np.mean(want**2) + 1e-3) * (scale.astype(np.float64) + 1.0)
        np.testing.assert_allclose(block.read(x_smem, split.N), normed, **TOLERANCE)
    np.testing.assert_allclose(before[1], want, **TOLERANCE)  # of all blocks


def test_hidden_values_of_a_blocks_units():
    rng, blocks = np.random.default_rng(2), 7
    down, wide = WorkSplit(K=640, N=256, blocks=blocks), WorkSplit(K=512, N=1280, blocks=blocks)
    gates, ups = rng.normal(size=(2, down.K))
    hidden = gates / (1 + np.exp(-gates)) * ups
    block = Block()
    parts = block.put(in_parts(rng, np.concatenate([gates, ups]), wide))
    x_smem = block.nothing(down.most_rows)
    for b in range(blocks):
        block.run(inputs.put_hidden, parts, fp32(x_smem), b, down, wide)
        rows = rows_of(down, b)
        got = block.read(x_smem, down.most_rows)[: len(rows)]
        np.testing.assert_allclose(got, hidden[rows], **TOLERANCE)


@pytest.mark.parametrize("form", list(FORMS))
def test_tiles_of_codes_and_their_scales(form):
    """As the loading warpgroup copies them, and as warps multiply them."""
    rng, depth = np.random.default_rng(5), TileForm.of(stream_weight(form, 64, 64)).depth
    K, N = 2 * depth, 192
    weight = stream_weight(form, K, N)
    codes = QuantizedTile(form=TileForm.of(weight), dtype=BF16, scale_dtype=weight.scales.dtype)
    split = WorkSplit(K=K, N=N, blocks=4, depth=depth)
    stream = dataclasses.replace(stream_of(layers=1), codes=codes)
    block, stage = Block(), codes.form.stage_bytes
    arrays = [block.put(np.asarray(each)) for each in (weight.data, weight.scales)]
    ring, barriers = block.put(np.zeros(3 * stage, np.uint8)), block.nothing(16)
    x = bfloat16(rng, K)
    numbers = np.asarray(weight.dequantize(jnp.float32), np.float64)
    for row, column in ((0, 0), (1, 2)):
        block.run(stream.fetch, barriers, ring, arrays, 1, row, column, split)
        tile = block.threads.read(Ref(ring.base + stage), (stage,), np.uint8)
        rows, columns = slice(row * depth, (row + 1) * depth), slice(column * 64, column * 64 + 64)
        got = multiplied_by_warps(codes, tile, x[rows])
        want = x[rows].astype(np.float64) @ numbers[rows, columns]
        size = np.abs(x[rows].astype(np.float64)) @ np.abs(numbers[rows, columns])
        assert (np.abs(got - want) <= 2e-5 * size).all()


def multiplied_by_warps(codes: QuantizedTile, tile: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The sums of all warps, by MLIR of two warpgroups."""
    place, x_place, sums = 0, 1 << 15, 1 << 17
    memory = Memory(1 << 18)
    memory.shared[place : place + len(tile)] = tile
    memory.shared[x_place : x_place + 2 * len(x)] = x.view(np.uint8)
    for group in range(THREADS // 128):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream, "address", lambda ref: ref)

            def body(thread, *totals, patch=patch):
                warp, lane = (f(thread, constant(32)) for f in (arith.divui, arith.remui))
                patch.setattr(stream, "warp_and_lane", lambda: (warp, lane))
                zero = constant(0)
                found = codes.tile(list(totals), constant(place), constant(x_place), zero)
                codes.keep(found, total(constant(sums), (warp, 4 * WIDTH)))

            threads = np.arange(128, dtype=np.uint32) + np.uint32(128 * group)
            run(body, [threads, *[np.zeros(128, np.float32)] * 8], memory)
    found = memory.shared[sums : sums + 4 * SLICES * WIDTH].view(np.float32)
    return found.reshape(SLICES, WIDTH).astype(np.float64).sum(axis=0)


def stream_weight(form: str, K: int, N: int) -> QuantizedWeight:
    """A random one, as kernels read it; small ones for their format alone."""
    whole = max(K, 128), max(N, 64)
    w = np.random.default_rng(6).normal(size=whole).astype(np.float32)
    return jax.jit(lambda w: arranged(round_weight(w, FORMS[form])))(w)


def test_the_result_is_written_once():
    rng, split = np.random.default_rng(3), WorkSplit(K=512, N=1152, blocks=7)
    x, product = rng.normal(size=(2, split.N)).astype(np.float32), rng.normal(size=split.N)
    block = Block()
    parts, stream = block.put(in_parts(rng, product, split)), block.put(x)
    out = block.put(np.full(split.N, np.nan, ml_dtypes.bfloat16))
    for b in range(split.blocks):
        block.run(inputs.write_result, parts, stream, out, b, row=1, split=split, dtype=BF16)
    got = block.threads.read(out, (split.N,), ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(got, x[1] + product, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(("H", "length"), [(64, 300), (128, 129), (64, 1), (128, 0)])
def test_attention_of_all_blocks(H, length):
    rng, attention, slots = np.random.default_rng(4), attention_of(H), stream_of(layers=1).slots
    sizes, page, blocks = attention.sizes, attention.page, attention.blocks
    N, K = sizes.N, sizes.K
    heads = rng.normal(size=(N + 2 * K, H))
    angles = rng.uniform(0, 6, H // 2)
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    block = Block()
    refs = [block.put(in_parts(rng, heads.ravel(), sizes.split)), block.put(cos), block.put(sin)]
    table = np.full(attention.table, -1, np.int32)
    table[: -(-length // page)] = rng.permutation(attention.num_pages)[: -(-length // page)]
    rows = [table[p // page] * page + p % page for p in range(length)]
    kept = bfloat16(rng, 2, attention.num_pages * page, K, H)
    seen = np.zeros(kept.shape[1], bool)
    seen[rows[:-1]] = True
    kept[:, ~seen] = np.nan
    pools, tables = [block.put(each) for each in kept], block.put(table)
    x_smem, parts = block.nothing(sizes.x_numbers), most_parts(K, blocks)
    attended, stats = block.nothing(parts, N, H), block.nothing(parts, N, 2)
    ring, barriers = block.nothing(3, DEPTH, WIDTH // 2), block.nothing(16)
    tiles = -(-length // sizes.keys)
    line = tiles * K
    used = min(blocks, line)
    for b in range(used):
        mine = range(b * line // used, (b + 1) * line // used)
        for h in sorted({i // tiles for i in mine}):
            is_last = mine[-1] >= (h + 1) * tiles - 1
            block.run(sizes.put_heads, *refs, x_smem, pools, h, rows[-1] if is_last else -1)
            held = block.run(sizes.nothing)
            for i in [i % tiles for i in mine if i // tiles == h]:
                block.run(attention.fetch, tables, pools, barriers, ring, slots, 1, h, i)
                k, v = block.run(attention.wait, ring, barriers, slots, 1)
                left = length - i * sizes.keys
                if i == tiles - 1:
                    block.run(sizes.put_token, x_smem, k, v, left - 1)
                held = block.run(sizes.tile, held, x_smem, k, v, left)
            part = b - ((h * tiles + 1) * used - 1) // line
            block.run(sizes.write_partial, held, x_smem, attended, stats, h, part)
    got = np.zeros(N * H)
    out = WorkSplit(K=N * H, N=256, blocks=blocks)
    x_smem = block.nothing(out.most_rows + out.most_rows // H * parts)
    for b in range(blocks):
        plan = tiles, line, used
        block.run(put_attended, attended, stats, fp32(x_smem), b, plan, sizes, out)
        got[rows_of(out, b)] = block.read(x_smem, out.most_rows)[: len(rows_of(out, b))]
    if length == 0:
        assert (got == 0).all()
        return
    first, second = np.split(heads, 2, axis=1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    wanted = kept.copy()
    for pool, want, new in zip(pools, wanted, (turned[N : N + K], heads[N + K :]), strict=True):
        want[rows[-1]] = new
        appended = block.threads.read(pool, want.shape, ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_allclose(appended, want.astype(np.float64), rtol=2.0**-8, atol=1e-6)
    k, v = (each[rows].astype(np.float64) for each in wanted)
    scores = 0.2 * np.einsum("kgh,lkh->kgl", turned[:N].reshape(K, -1, H), k)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    want = np.einsum("kgl,lkh->kgh", powers, v).ravel()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
