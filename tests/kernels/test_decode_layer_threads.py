"""What a block's threads do between the copies of a layer's launch, in NumPy.

A block at a time runs each phase; memory that nobody wrote holds NaN.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.decode_layer import inputs
from pallas_kernels.decode_layer.attention_threads import HeadSizes, most_parts, put_attended
from pallas_kernels.decode_layer.config import DEPTH, SLICES, THREADS, WIDTH, Share
from pallas_kernels.decode_layer.stream import WeightStream
from tests.kernels.thread_stand_in import Ref, Warpgroup, bfloat16

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


def in_parts(rng, x: np.ndarray, share: Share) -> np.ndarray:
    """Columns as blocks leave their parts: [parts, N]."""
    found = np.full((share.parts, share.N), np.nan, np.float32)
    for t in range(share.N // WIDTH):
        columns = slice(t * WIDTH, (t + 1) * WIDTH)
        count = share.last_block(t) - share.first_block(t) + 1
        cuts = rng.normal(size=(count - 1, WIDTH)).astype(np.float32)
        found[: count - 1, columns] = cuts
        found[count - 1, columns] = x[columns] - cuts.sum(axis=0)
    return found


def test_a_product_of_all_blocks_is_whole():
    rng, share = np.random.default_rng(0), Share(K=384, N=320, blocks=4)
    stream = WeightStream(products=(), num_stages=2, dtype=BF16)
    x, w = rng.normal(size=share.K).astype(np.float32), bfloat16(rng, share.K, share.N)
    block = Block()
    x_ref, sums_ref = block.put(x), block.nothing(2, SLICES, WIDTH)
    parts = block.nothing(share.parts, share.N)
    for b in range(share.blocks):
        tiles = range(share.start(b), share.start(b + 1))
        for t in sorted({i // share.down for i in tiles}):
            sums = [np.zeros(THREADS, np.float32)] * 8
            for row in [i % share.down * DEPTH for i in tiles if i // share.down == t]:
                tile = block.put(w[row : row + DEPTH, t * WIDTH : (t + 1) * WIDTH])
                sums = block.run(stream.tile, sums, tile, x_ref, row)
            block.run(stream.put, sums, sums_ref, parts, t, b, share)
    got = block.read(parts, share.parts, share.N)
    for t in range(share.N // WIDTH):
        count = share.last_block(t) - share.first_block(t) + 1
        columns = slice(t * WIDTH, (t + 1) * WIDTH)
        want = x.astype(np.float64) @ w[:, columns].astype(np.float64)
        np.testing.assert_allclose(got[:count, columns].sum(axis=0), want, rtol=1e-5, atol=1e-4)
        assert np.isnan(got[count:, columns]).all()


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_normalized_stream(is_summed):
    rng, share = np.random.default_rng(1), Share(K=256, N=1152, blocks=7)
    x, product = bfloat16(rng, share.N), rng.normal(size=share.N)
    scale = rng.normal(size=share.N).astype(np.float32)
    norm = RmsNorm(scale=jnp.asarray(scale), epsilon=1e-3, offset=1.0)
    block = Block()
    x_smem = block.nothing(share.N)
    parts = block.put(in_parts(rng, product, share)) if is_summed else None
    block.run(
        inputs.put_normed, block.put(x), parts, block.put(scale), block.nothing(SLICES), x_smem,
        share if is_summed else None, norm, dtype=BF16,
    )  # fmt: skip
    want = x.astype(np.float64) + (product if is_summed else 0.0)
    want = want / np.sqrt(np.mean(want**2) + 1e-3) * (scale.astype(np.float64) + 1.0)
    np.testing.assert_allclose(block.read(x_smem, share.N), want, **TOLERANCE)


def test_rows_and_hidden_values_of_a_blocks_tiles():
    rng, down, wide = (
        np.random.default_rng(2),
        Share(K=640, N=256, blocks=7),
        Share(K=256, N=1280, blocks=7),
    )
    gates, ups, rows = rng.normal(size=(3, down.K))
    rows = rows.astype(ml_dtypes.bfloat16)
    hidden = gates / (1 + np.exp(-gates)) * ups
    block = Block()
    parts = block.put(in_parts(rng, np.concatenate([gates, ups]), wide))
    source, x_smem = block.put(rows), block.nothing(down.most * DEPTH)
    for b in range(down.blocks):
        start, stop = down.start(b), down.start(b + 1)
        order = np.concatenate(
            [np.arange(DEPTH) + i % down.down * DEPTH for i in range(start, stop)]
        )
        block.run(inputs.put_rows, source, x_smem, start, stop, down, dtype=BF16)
        got = block.read(x_smem, down.most * DEPTH)[: len(order)]
        np.testing.assert_array_equal(got, rows.astype(np.float64)[order])
        block.run(inputs.put_hidden, parts, x_smem, start, stop, down, gates_and_ups=wide)
        got = block.read(x_smem, down.most * DEPTH)[: len(order)]
        np.testing.assert_allclose(got, hidden[order], **TOLERANCE)


def test_the_result_is_written_once():
    rng, share = np.random.default_rng(3), Share(K=256, N=1152, blocks=7)
    x, products = bfloat16(rng, share.N), rng.normal(size=(2, share.N))
    block = Block()
    sources = [(block.put(in_parts(rng, each, share)), share) for each in products]
    out, x_ref = block.put(np.full(share.N, np.nan, ml_dtypes.bfloat16)), block.put(x)
    for b in range(share.blocks):
        block.run(inputs.write_sums, x_ref, sources, out, b, dtype=BF16)
    got = block.threads.read(out, (share.N,), ml_dtypes.bfloat16).astype(np.float64)
    want = x.astype(np.float64) + products.sum(axis=0)
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(("H", "length"), [(64, 300), (128, 129), (64, 1), (128, 0)])
def test_attention_of_all_blocks(H, length):
    rng, N, K, blocks = np.random.default_rng(4), 4, 2, 3
    share = Share(K=256, N=(N + 2 * K) * H, blocks=7)
    sizes = HeadSizes(N=N, K=K, H=H, scale=0.2, dtype=BF16, share=share)
    heads = rng.normal(size=(N + 2 * K, H))
    angles = rng.uniform(0, 6, H // 2)
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    keys, values = (bfloat16(rng, K, max(length, 1), H) for _ in range(2))
    block = Block()
    refs = [block.put(in_parts(rng, heads.ravel(), share)), block.put(cos), block.put(sin)]
    pools = [block.put(np.full((1, K, H), np.nan, ml_dtypes.bfloat16)) for _ in range(2)]
    x_smem, parts = block.nothing(sizes.x_numbers), most_parts(K, blocks)
    attended, stats = block.nothing(parts, N, H), block.nothing(parts, N, 2)
    tiles = -(-length // sizes.keys)
    line = tiles * K
    used = min(blocks, line)
    for b in range(used):
        mine = range(b * line // used, (b + 1) * line // used)
        for h in sorted({i // tiles for i in mine}):
            is_last = mine[-1] >= (h + 1) * tiles - 1
            place = 0 if is_last else -1
            block.run(sizes.put_heads, *refs, x_smem, *pools, h, place)
            held = block.run(sizes.nothing)
            for i in [i % tiles for i in mine if i // tiles == h]:
                tile = []
                for kept in (keys, values):
                    rows = np.full((sizes.keys, H), np.nan, ml_dtypes.bfloat16)
                    there = kept[h, i * sizes.keys : min((i + 1) * sizes.keys, length - 1)]
                    rows[: len(there)] = there
                    halves = np.moveaxis(rows.reshape(sizes.keys, -1, WIDTH), 1, 0)
                    tile.append(block.put(halves))
                left = length - i * sizes.keys
                if i == tiles - 1:
                    block.run(sizes.put_token, x_smem, *tile, left - 1)
                held = block.run(sizes.tile, held, x_smem, *tile, left)
            part = b - ((h * tiles + 1) * used - 1) // line
            block.run(sizes.leave, held, x_smem, attended, stats, h, part)
    got = np.zeros(N * H)
    out = Share(K=N * H, N=256, blocks=blocks)
    x_smem = block.nothing(out.most * DEPTH)
    for b in range(blocks):
        start, stop = out.start(b), out.start(b + 1)
        block.run(put_attended, attended, stats, x_smem, start, stop, tiles, line, used, sizes, out)
        for j, i in enumerate(range(start, stop)):
            rows = slice(i % out.down * DEPTH, (i % out.down + 1) * DEPTH)
            got[rows] = block.read(x_smem, out.most * DEPTH)[j * DEPTH : (j + 1) * DEPTH]
    if length == 0:
        assert (got == 0).all()
        return
    first, second = np.split(heads, 2, axis=1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    new = turned[N : N + K], heads[N + K :]
    for pool, kept, each in zip(pools, (keys, values), new, strict=True):
        kept[:, length - 1] = each.astype(ml_dtypes.bfloat16)
        appended = block.threads.read(pool, (K, H), ml_dtypes.bfloat16)
        np.testing.assert_allclose(appended.astype(np.float64), each, rtol=2.0**-8, atol=1e-6)
    k, v = (kept.astype(np.float64) for kept in (keys, values))
    scores = 0.2 * np.einsum("kgh,klh->kgl", turned[:N].reshape(K, -1, H), k)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    want = np.einsum("kgl,klh->kgh", powers, v).ravel()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
