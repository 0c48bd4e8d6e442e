"""What threads put into shared memory, and what they make of a cluster's sums, in NumPy."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.cluster_sums import STRIP, WIDTH, ClusterSums
from pallas_kernels.hopper.machine import WARPGROUP
from pallas_kernels.hopper.resident_rows import DEPTH, MOST_ROWS, ResidentRows
from tests.kernels.thread_stand_in import Warpgroup, bfloat16

BF16 = jnp.dtype(jnp.bfloat16)
UNIT = 2.0**-8


def placed(rows: ResidentRows, x: np.ndarray, *, first: int, scale: np.ndarray | None = None):
    """[M, columns of the block]: what the block's warpgroups have, by the place it must be in."""
    found = np.zeros((rows.M, rows.steps * DEPTH), np.float64)
    for group in range(rows.groups):
        threads = Warpgroup(ml_dtypes.bfloat16)
        refs = [threads.put(x), threads.put(np.zeros((rows.turns, 2, rows.places, 64), np.uint16))]
        if scale is not None:
            refs += [threads.put(scale), threads.put(np.zeros((MOST_ROWS, 4), np.float32))]
        with threads.running():
            rows.put(first, group, *refs)
        shape = (rows.turns, 2, rows.places, 8, 8)
        x_smem = threads.read(refs[1], shape, ml_dtypes.bfloat16).astype(np.float64)
        for turn, half, m, chunk in itertools.product(
            range(rows.turns), (0, 1), range(rows.M), range(8)
        ):
            step = group + turn * rows.groups
            if step < rows.steps:
                at = step * DEPTH + half * 64 + 8 * chunk
                # 16 bytes of a row of 128 lie where their number xor the row's says.
                found[m, at : at + 8] = x_smem[turn, half, m, chunk ^ m]
    return found


@pytest.mark.parametrize(
    ("M", "K", "split", "groups", "places"),
    [(1, 2048, 4, 1, 8), (1, 1280, 2, 2, 1), (3, 1280, 2, 2, 8), (8, 512, 1, 1, 8)],
)
@pytest.mark.parametrize("kind", ["plain", "normed", "offset", "gated"])
def test_rows_are_put_where_products_read_them(M, K, split, groups, places, kind):
    rng = np.random.default_rng(1)
    width = 2 * K if kind == "gated" else K
    x = bfloat16(rng, M, width)
    scale, norm = None, None
    if kind in ("normed", "offset"):
        scale = rng.normal(size=K).astype(np.float32)
        scale = scale if kind == "offset" else scale.astype(ml_dtypes.bfloat16)
        norm = RmsNorm(
            scale=jnp.asarray(scale), epsilon=1e-3, offset=1.0 if kind == "offset" else 0.0
        )
    rows = ResidentRows(
        M=M, K=K, dtype=BF16, steps=K // DEPTH // split, groups=groups, norm=norm,
        gated=kind == "gated", places=places,
    )  # fmt: skip
    true = x.astype(np.float64)
    if norm is not None and scale is not None:
        true = true / np.sqrt(np.mean(true**2, axis=1, keepdims=True) + norm.epsilon)
        true = true * (scale.astype(np.float64) + norm.offset)
    if kind == "gated":
        gate, up = np.split(true, 2, axis=1)
        true = gate / (1 + np.exp(-gate)) * up
    for block in range(split):
        first = block * rows.steps
        got = placed(rows, x, first=first, scale=scale)
        want = true[:, first * DEPTH : (first + rows.steps) * DEPTH]
        # Rounded to bfloat16; what was computed before in fp32 is far below its unit.
        assert (np.abs(got - want) <= (0 if kind == "plain" else 1.01 * UNIT) * np.abs(want)).all()


@pytest.mark.parametrize(
    ("M", "tiles", "split", "groups", "gated"),
    [(1, 1, 4, 1, False), (8, 2, 1, 1, True), (3, 4, 2, 1, True), (5, 3, 4, 2, False)],
)
def test_sums_of_a_cluster_are_added_and_written(M, tiles, split, groups, gated):
    rng = np.random.default_rng(2)
    width, blocks = WIDTH * tiles, 2
    columns = blocks * width // (2 if gated else 1)
    sums = ClusterSums(
        rows=M, rows_at_a_time=M, columns=columns, tiles=tiles, split=split, groups=groups,
        out_dtype=BF16, gated=gated, has_residual=True,
    )  # fmt: skip
    threads = Warpgroup(ml_dtypes.bfloat16)
    residual = bfloat16(rng, M, columns)
    residual_ref, out_ref = threads.put(residual), threads.put(np.zeros((M, columns), np.uint16))
    parts = rng.normal(size=(blocks, split, groups, STRIP, width)).astype(np.float32)
    at = threads.used
    for block in range(blocks):
        refs = []
        for rank in range(split):
            threads.used = at
            refs.append(
                threads.put(np.zeros((groups, sums.count * WARPGROUP), np.float32), rank=rank)
            )
            for group in range(groups):
                ref = type(refs[rank])(refs[rank].base + 4 * group * sums.count * WARPGROUP)
                with threads.running():
                    sums.keep(fragments(parts[block, rank, group], tiles), ref)
        for rank, group in itertools.product(range(split), range(groups)):
            threads.rank = rank
            with threads.running():
                sums.write(block * sums.width, 0, group, refs[rank], out_ref, None, residual_ref)
    total = parts.astype(np.float64).sum(axis=(1, 2))[:, :M]
    if gated:
        gate, up = np.split(total, 2, axis=-1)
        total = gate / (1 + np.exp(-gate)) * up
    want = np.moveaxis(total, 0, 1).reshape(M, columns) + residual.astype(np.float64)
    got = threads.read(out_ref, (M, columns), ml_dtypes.bfloat16).astype(np.float64)
    # Sums of a few numbers of size 1 in fp32, rounded to bfloat16 once.
    assert (np.abs(got - want) <= UNIT * np.abs(want) + 2.0**-18).all()


def fragments(sums: np.ndarray, tiles: int) -> list[np.ndarray]:
    """[8 rows, columns] as accumulators of m64n8 have it: of each tile, threads' four numbers."""
    thread = np.arange(WARPGROUP)
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    return [
        sums[2 * t + e, WIDTH * tile + 16 * warp + 8 * half + g]
        for tile in range(tiles)
        for half in (0, 1)
        for e in (0, 1)
    ]
