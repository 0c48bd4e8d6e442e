"""Products that split K over warps: what a block's threads do, run on a CPU; which tiles fit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hopper.threads import assembly, constant, total
from pallas_kernels.quantized_matmul import arranged, hopper_sliced
from pallas_kernels.quantized_matmul.choice import choice_of, tiles_or_slices_of
from pallas_kernels.quantized_matmul.config import ProductShape, QuantizedConfig
from pallas_kernels.quantized_matmul.fragments import Dequantizer, load_number
from pallas_kernels.quantized_matmul.hopper_sliced import SlicedKernel
from pallas_kernels.quantized_matmul.sliced_config import SlicedConfig, sliced_configs
from tests.kernels.test_quantized_matmul_hopper import FORMATS, exact_and_bound, weight_of
from tests.kernels.test_quantized_stage import in_panels
from tests.kernels.warp_interpreter import THREADS, Memory, run

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
CASES = [  # rows, fragments, warpgroups
    (1, 4, 1, "int4"), (1, 4, 2, "e4m3"), (8, 4, 1, "int4 of 64"), (5, 4, 1, "int8"),
]  # fmt: skip
SPACE = 1 << 16


def kernel_of(rows, fragments, groups, form, found) -> SlicedKernel:
    return SlicedKernel(
        c=SlicedConfig(fragments=fragments, groups=groups, stages=1),
        s=ProductShape.of(rows, found),
        dequantizer=Dequantizer(code=FORMATS[form].code, dtype=BF16),
        scale_dtype=F32, out_dtype=F32,
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "fragments", "groups", "form"), CASES)
def test_a_block_computes_its_columns(rows, fragments, groups, form, monkeypatch):
    rng, depth, columns = np.random.default_rng(8), 512 * groups, 16 * fragments
    weight = weight_of(FORMATS[form], shape=(depth, columns))
    found = jax.jit(arranged)(weight)
    kernel = kernel_of(rows, fragments, groups, form, found)
    x = rng.normal(size=(rows, depth)).astype(ml_dtypes.bfloat16)
    scales = np.asarray(found.scales, np.float32)
    panels = [in_panels(x[:, at : at + 128], kernel.s.places) for at in range(0, depth, 128)]
    memory = Memory(6 * SPACE, out=4 * rows * columns)
    words, rest, sums = 0, 2 * SPACE, 4 * SPACE
    for start, part in [(words, found.data), (rest, scales)] + [
        (3 * SPACE + g * SPACE // 2, np.stack(panels[g::groups])) for g in range(groups)
    ]:
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        memory.shared[start : start + len(data)] = data
    monkeypatch.setattr(hopper_sliced, "address", lambda ref: ref)
    monkeypatch.setattr(
        hopper_sliced, "global_number",
        lambda ref, at, offset, dtype: load_number(total(ref, (at, 4)), 4 * offset, dtype),
    )  # fmt: skip
    monkeypatch.setattr(
        hopper_sliced, "store_number",
        lambda ref, at, x, dtype: assembly(
            None, [total(ref, (at, 4)), x], "st.global.f32 [$0], $1;", "l,f", pure=False
        ),
    )  # fmt: skip
    zeros = [np.zeros(THREADS, np.float32)] * (4 * fragments)

    def multiply(thread, group, *totals):
        monkeypatch.setattr(hopper_sliced, "thread", lambda: thread)
        at = total(constant(3 * SPACE), (group, SPACE // 2))
        staged = [constant(rest)] if kernel.s.scaled_parts else []
        kernel.keep(
            kernel.stage(list(totals), group, constant(words), at, *staged), group, constant(sums)
        )

    def write(thread, group):
        monkeypatch.setattr(hopper_sliced, "thread", lambda: thread)
        kernel.write(constant(0), group, constant(sums), constant(0), constant(rest))

    threads = np.arange(THREADS, dtype=np.uint32)
    ranks = [np.full(THREADS, g, np.uint32) for g in range(groups)]
    for group in ranks:
        run(multiply, [threads, group, *zeros], memory)
    for group in ranks:
        run(write, [threads, group], memory)
    got = memory.out.view(np.float32).reshape(rows, columns)
    numbers = np.asarray(weight.dequantize(jnp.float32), np.float64)
    exact, bound = exact_and_bound(x, numbers)
    assert (np.abs(got - exact) <= bound).all()
    # A warp's rows left out, or of another warp, are no rounding.
    numbers[128:256] = 0
    assert not (np.abs(got - exact_and_bound(x, numbers)[0]) <= bound).all()


def test_each_multiprocessor_has_one_block():
    for K, N in ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096)):
        shape = ProductShape(M=1, K=K, N=N, bits=4, group_rows=128, scale_bytes=2)
        found = sliced_configs(shape)
        assert found
        for config in found:
            assert config.unsupported(shape) is None
            assert N // config.block_columns == 128
            assert tiles_or_slices_of(choice_of(config)) == config
    old = QuantizedConfig(tiles=2, split=1, groups=2, stages=12)
    assert tiles_or_slices_of(choice_of(old)) == old


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"M": 9}, "9 rows"), ({"N": 4100}, "no multiple of 32 columns"),
        ({"K": 4096 + 512}, "no multiple of 1024"), ({"K": 2**17}, "do not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(wrong, why):
    given = {"M": 1, "K": 4096, "N": 4096, "bits": 4, "group_rows": 128, "scale_bytes": 2}
    reason = SlicedConfig(fragments=2).unsupported(ProductShape(**(given | wrong)))
    assert reason is not None
    assert why in reason
