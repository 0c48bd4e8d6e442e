"""Grouped products of 8-bit operands without a GPU: against float64, in the interpreter, lowering,
faults, refusals.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError, grouped_weight_gradient
from pallas_kernels import scaled_grouped_matmul as multiply
from pallas_kernels.common import device
from pallas_kernels.common.scales import Scaling
from pallas_kernels.fp8.xla import quantize_xla
from pallas_kernels.grouped_matmul.hopper import calls, ring
from pallas_kernels.grouped_matmul.hopper.config import ScaledGroupedConfig
from tests.kernels import grouped_oracle
from tests.kernels.test_scaled_matmul import E4M3, E5M2
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

# A tile of both warpgroups, one that ends in its second half, short ones, rows of no group.
SIZES, NUM_ROWS, K, N = (9, 0, 130, 3, 2, 0, 1), 151, 256, 320
FP32 = {"out_dtype": jnp.float32}
run = jax.jit(multiply, static_argnames=("out_dtype", "implementation"))
quantized = jax.jit(
    functools.partial(quantize_xla, power_of_two=False), static_argnames=("scaling", "dtype")
)


@functools.cache
def operands(dtypes=(E4M3, E4M3)):
    """a, b, a_scale, b_scale, sizes; what lies beyond the groups is NaN."""
    rng = np.random.default_rng(seeded(0))
    blocks = 10.0 ** rng.uniform(-2, 2, (len(SIZES), 1, -(-K // 128), 1))
    x = rng.normal(size=(NUM_ROWS, K)) * 10.0 ** rng.uniform(-2, 2, (NUM_ROWS, 1))
    w = rng.normal(size=(len(SIZES), N, K // 128, 128)) * blocks
    a = quantized(x.astype(np.float32), Scaling.BLOCK_OF_ROW, dtype=jnp.dtype(dtypes[0]))
    w = w.reshape(-1, N, K).astype(np.float32)
    b = quantized(w, Scaling.BLOCK, dtype=jnp.dtype(dtypes[1]))
    a_scale = np.array(a.scale)
    a_scale[:, sum(SIZES) :] = np.nan
    return *map(np.asarray, (a.values, b.values, a_scale, b.scale)), np.asarray(SIZES, np.int32)


def exact(a, b, a_scale, b_scale, sizes):
    """Group by group in float64; each scale enters as a rounding."""
    x = Rounded(a.astype(np.float64)) * np.repeat(np.nan_to_num(a_scale).T, 128, 1)
    of_b = np.repeat(np.repeat(np.swapaxes(b_scale, 1, 2), 128, 1)[:, :N], 128, 2)
    w = Rounded(b.astype(np.float64)) * of_b

    def product(g, rows):
        return np.einsum("mk,nk->mn", x[rows], w[g])

    return grouped_oracle.by_groups(sizes, NUM_ROWS, N, product)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_products_are_those_of_dequantized_operands(implementation):
    arrays = operands((E5M2, E4M3))
    got = run(*arrays, out_dtype=jnp.float32, implementation=implementation)
    assert_within_rounding(got, exact(*arrays))
    assert not np.any(got[sum(SIZES) :])


@pytest.mark.slow  # of the bound, a program for each
@pytest.mark.parametrize(
    "fault", ["scale of the next block", "scale of another group", "a boundary one off", "unscaled"]
)
def test_faults_are_caught(fault):
    a, b, a_scale, b_scale, sizes = arrays = operands()
    oracle = exact(*arrays)
    wrong = {
        "scale of the next block": (a, b, np.roll(a_scale, 1, axis=0), b_scale, sizes),
        "scale of another group": (a, b, a_scale, np.roll(b_scale, 1, axis=0), sizes),
        "a boundary one off": (a, b, a_scale, b_scale, sizes + np.int32([1, 0, -1, 0, 0, 0, 0])),
        "unscaled": (a, b, a_scale, np.ones_like(b_scale), sizes),
    }
    got = np.asarray(run(*wrong[fault], out_dtype=jnp.float32, implementation="xla"))
    with pytest.raises(AssertionError, match=r"spread|finite"):
        assert_within_rounding(got, oracle)


CONFIGS = {
    "as it is": {},
    "free": {"in_turns": False},
}


@pytest.mark.slow  # the interpreter takes eight seconds for a kernel
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_compute_the_formula(name, monkeypatch):
    """On two blocks, each of which takes every other tile."""
    monkeypatch.setattr(ring, "NUM_PROCESSORS", 2)
    config = ScaledGroupedConfig(num_stages=2, in_any_order=False, **CONFIGS[name])
    f = functools.partial(
        calls.scaled_product, out_dtype=jnp.dtype("float32"), config=config, interpretable=True
    )
    arrays = operands((E4M3, E5M2))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(f)(*arrays)
    assert_within_rounding(got, exact(*arrays))


def test_warpgroups_run_freely_where_that_was_faster():
    """Rows and groups of the shapes that were timed, the last one in turns."""
    timed = [(65536, 64), (32768, 8), (65536, 128)]
    assert [calls.scaled_config(*each).in_turns for each in timed] == [False, False, True]


def shapes(M, K, N, G):
    struct, f32 = jax.ShapeDtypeStruct, jnp.float32
    return (
        struct((M, K), E4M3),
        struct((G, N, K), E4M3),
        struct((-(-K // 128), M), f32),
        struct((G, -(-K // 128), -(-N // 128)), f32),
        struct((G,), jnp.int32),
    )


@pytest.mark.slow  # two seconds; what it shares with other kernels is lowered with those
@pytest.mark.parametrize(
    "shape", [(13, 128, 192, 3), (65536, 2048, 1536, 64)], ids=["odd", "large"]
)
def test_lowers(shape):
    with device.compiling_for(device.H200):
        traced = jax.jit(lambda *each: multiply(*each)).trace(*shapes(*shape))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


def test_the_kernel_says_what_it_cannot():
    for shape, reason in [
        ((8, 128, 96, 2), "N=96 is not a multiple of 64"),
        ((8, 192, 128, 2), "K=192 is not a multiple of 128"),
        ((8, 128, 64, 2), "N=64 is not a multiple of 64 and at least 128"),
    ]:
        f = functools.partial(multiply, implementation="hopper")
        with device.compiling_for(device.H200), pytest.raises(UnsupportedError, match=reason):
            jax.eval_shape(f, *shapes(*shape))
    with pytest.raises(UnsupportedError, match=r"is not a Hopper GPU.*implementation='xla' can"):
        jax.eval_shape(f, *shapes(8, 128, 128, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: ((8, 128), "float32")}, "a is float32.*make it by quantize"),
        ({1: ((128, 128), E4M3)}, r"b is float8_e4m3fn.*\[G, N, K\]"),
        ({1: ((2, 128, 256), E4M3)}, r"Transpose b if it is \[G, K, N\]"),
        ({2: ((8, 1), "float32")}, r"a_scale is float32\[8, 1\].*float32 \[1, 8\]"),
        ({3: ((1, 2, 1), "float32")}, r"b_scale .*128x128 blocks of each group's b.*\[2, 1, 1\]"),
        ({4: ((3,), "int32")}, r"group_sizes is int32\[3\].*int32 \[2\]"),
    ],
    ids=["a", "b", "depth", "a_scale", "b_scale", "sizes"],
)
def test_refusals_say_what_to_do(change, words):
    arrays = list(shapes(8, 128, 128, 2))
    for i, (shape, dtype) in change.items():
        arrays[i] = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(InputError, match=words):
        jax.eval_shape(multiply, *arrays)


def test_options_are_refused():
    arrays = shapes(8, 128, 128, 2)
    for options, words in [
        ({"out_dtype": jnp.int32}, "out_dtype=int32"),
        ({"implementation": "cutlass"}, "choose auto"),
    ]:
        with pytest.raises(InputError, match=words):
            jax.eval_shape(functools.partial(multiply, **options), *arrays)
    with pytest.raises(UnsupportedError, match="quantizes the cotangent"):
        jax.eval_shape(jax.grad(lambda s, *rest: multiply(*rest[:2], s, *rest[2:], **FP32).sum()),
                       arrays[2], *arrays[:2], *arrays[3:])  # fmt: skip


def test_a_weights_gradient_alone():
    rng = np.random.default_rng(seeded(0))
    x, d = (rng.normal(size=(20, width)).astype(np.float32) for width in (24, 40))
    sizes = np.asarray([3, 0, 14], np.int32)
    got = jax.jit(grouped_weight_gradient)(x, d, sizes)
    assert_within_rounding(got, grouped_oracle.weight_gradient(x, d, sizes))
    with pytest.raises(InputError, match=r"20 rows ask for \[20, N\]"):
        grouped_weight_gradient(x, d[1:], sizes)
    with pytest.raises(InputError, match="no gradient alone"):
        grouped_weight_gradient(x, d, sizes, implementation="reference")
