"""A stage of a product with a weight in few bits: what the kernel's threads do, run on a CPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.few_rows_matmul import hopper_quantized
from pallas_kernels.few_rows_matmul.config import ProductShape, QuantizedConfig
from pallas_kernels.few_rows_matmul.hopper_quantized import QuantizedKernel
from pallas_kernels.quantized_weight import arranged
from pallas_kernels.quantized_weight.fragments import Dequantizer
from tests.kernels.few_rows_cases import FORMATS, exact_and_bound, weight_of
from tests.kernels.warp_interpreter import THREADS, Memory, run

BF16, K = jnp.dtype(jnp.bfloat16), 128
CASES = [(1, 1, "int4"), (1, 1, "e4m3"), (1, 3, "int4 of 64"), (5, 1, "int8"), (8, 2, "int4")]


def in_panels(x: np.ndarray, places: int) -> np.ndarray:
    """Rows of 128 as ``ResidentRows`` puts them: two halves, chunks of 16 bytes xor the row."""
    found = np.full((2, places, 8, 8), np.nan, x.dtype)
    for m, half, chunk in np.ndindex(len(x), 2, 8):
        at = 64 * half + 8 * chunk
        found[half, m, chunk ^ m] = x[m, at : at + 8]
    return found


def accumulators(matrix: np.ndarray) -> list[np.ndarray]:
    """[8, columns] as threads hold it: of each tile four numbers."""
    thread = np.arange(THREADS)
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    return [
        matrix[2 * t + e, 64 * tile + 16 * warp + 8 * half + g].astype(np.float32)
        for tile in range(matrix.shape[1] // 64)
        for half in (0, 1)
        for e in (0, 1)
    ]


@pytest.mark.parametrize(("rows", "tiles", "form"), CASES)
def test_a_stage_adds_its_product(rows, tiles, form, monkeypatch):
    rng, columns = np.random.default_rng(6), 64 * tiles
    weight = weight_of(FORMATS[form], shape=(K, columns))
    found = jax.jit(arranged)(weight)
    shape = ProductShape.of(rows, found)
    kernel = QuantizedKernel(
        c=QuantizedConfig(tiles=tiles, split=1, groups=1, stages=2), s=shape,
        dequantizer=Dequantizer(code=FORMATS[form].code, dtype=BF16),
        scale_dtype=jnp.dtype(jnp.float32), out_dtype=BF16,
    )  # fmt: skip
    x = rng.normal(size=(rows, K)).astype(ml_dtypes.bfloat16)
    before = rng.normal(size=(8, columns)).astype(np.float32)
    memory, arguments = Memory(1 << 17), [np.arange(THREADS, dtype=np.uint32)]
    scales = np.asarray(found.scales, np.float32)
    parts = [np.asarray(found.data), in_panels(x, shape.places)]
    parts += [scales] if shape.scaled_parts else []
    for i, part in enumerate(parts):
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        memory.shared[i << 15 : (i << 15) + len(data)] = data
        arguments.append(np.full(THREADS, i << 15, np.uint32))
    sums = accumulators(before)
    monkeypatch.setattr(hopper_quantized, "address", lambda ref: ref)

    def emit(thread, *values):
        monkeypatch.setattr(hopper_quantized, "thread", lambda: thread)
        refs, totals = values[: len(parts)], values[len(parts) :]
        return (kernel.stage(list(totals), *refs),)

    (got,) = run(emit, [*arguments, *sums], memory)
    numbers = np.asarray(weight.dequantize(jnp.float32), np.float64)
    if not shape.scaled_parts:  # scales of columns come in the end
        numbers = numbers / scales.reshape(1, -1).astype(np.float64)
    exact, bound = exact_and_bound(x, numbers)
    pad = ((0, 8 - rows), (0, 0))
    want = accumulators(np.pad(exact, pad) + before)
    bounds = accumulators(
        np.pad(bound + 2.0**-22 * np.abs(before[:rows]), pad, constant_values=np.inf)
    )
    for one, true, most in zip(got, want, bounds, strict=True):
        assert (np.abs(one - true) <= most)[np.isfinite(most)].all()
