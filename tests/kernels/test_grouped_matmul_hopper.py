"""The Hopper kernels of grouped products without a GPU: values in the interpreter, lowering of the
real form.

The interpreter knows no counter in memory, so there each block of two takes every other tile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import UnsupportedError, grouped_matmul, grouped_swiglu
from pallas_kernels.common import device
from pallas_kernels.grouped_matmul.hopper import calls, ring
from pallas_kernels.grouped_matmul.hopper.config import GroupedConfig
from tests.kernels import grouped_oracle
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

K, N = 128, 128
# A group of more than the mean, whose gradient comes first, and several whose tiles read rows of
# no group.
SIZES, NUM_ROWS = (9, 0, 130, 3, 2, 0, 1), 151


@pytest.fixture
def on_hopper(monkeypatch):
    """Chosen for an H200, run by the interpreter, on two blocks."""
    monkeypatch.setattr(ring, "NUM_PROCESSORS", 2)
    config = GroupedConfig(columns=128, num_stages=2, in_any_order=False, gather=False)
    monkeypatch.setattr(calls, "DEFAULT", config)
    parameters = plgpu.InterpretGPUParams()
    with device.compiling_for(device.H200), plgpu.force_gpu_interpret_mode(parameters):
        yield


def arrays():
    rng = np.random.default_rng(seeded(0))
    shapes = ((NUM_ROWS, K), (len(SIZES), K, N), (len(SIZES), K, N), (NUM_ROWS, N))
    x, gate, up, d = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes)
    # What lies beyond the groups must not be read, in either operand of the weight's gradient.
    x[sum(SIZES) :], d[sum(SIZES) :] = np.nan, np.nan
    return tuple(map(jnp.asarray, (x, gate, up, d)))


def float64(*values):
    return (np.nan_to_num(np.asarray(v, np.float64)) for v in values)


@pytest.mark.usefixtures("on_hopper")
def test_product_and_gradients():
    x, w, _, d = arrays()
    w, sizes = w.astype(jnp.float32), jnp.asarray(SIZES, jnp.int32)

    def run(x, w):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="hopper"), x, w)
        return y, pull(d)

    got = jax.jit(run)(x, w)
    x, w, d = float64(x, w, d)
    value = grouped_oracle.product(x, w, SIZES)
    d_x = grouped_oracle.input_gradient(Rounded(d), w, SIZES)
    d_w = grouped_oracle.weight_gradient(x, d, SIZES)
    assert_within_rounding(got, (value, (d_x, d_w)))


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
def test_gated_product_and_gradients():
    x, gate, up, d = arrays()
    sizes = jnp.asarray(SIZES, jnp.int32)

    def run(*operands):
        f = functools.partial(grouped_swiglu, group_sizes=sizes, implementation="hopper")
        y, pull = jax.vjp(f, *operands)
        return y, pull(jnp.nan_to_num(d))

    got = jax.jit(run)(x, gate, up)
    x, gate, up, d = float64(x, gate, up, d)
    gates, ups = (grouped_oracle.product(x, w, SIZES) for w in (gate, up))
    d_gate, d_up = grouped_oracle.swiglu_gradient(gates, ups, d, jnp.bfloat16)
    d_x = grouped_oracle.input_gradient(d_gate, gate, SIZES)
    d_x = d_x + grouped_oracle.input_gradient(d_up, up, SIZES)
    d_w = (grouped_oracle.weight_gradient(x, d, SIZES) for d in (d_gate, d_up))
    assert_within_rounding(got, (grouped_oracle.swiglu(gates, ups), (d_x, *d_w)))


def gradient(x, w, d, sizes):
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="hopper"), x, w)
    return y, pull(d)


def gated_gradient(x, w, d, sizes):
    """Of gathered rows, by the kernels themselves."""
    rows = jnp.arange(d.shape[0], dtype=jnp.int32) % x.shape[0]

    def f(x, gate, up):
        return grouped_swiglu(x, gate, up, sizes, rows=rows, implementation="hopper")

    y, pull = jax.vjp(f, x, w, w)
    return y, pull(d)


@pytest.mark.slow_cases("gated", "odd")
@pytest.mark.parametrize(
    ("f", "shape", "dtype"),
    [
        # The kernels of both others.
        pytest.param(gradient, (65536, 2048, 1536, 64), "bfloat16", marks=pytest.mark.slow),
        (gradient, (13, 128, 1408, 3), "float16"),
        (gated_gradient, (65536, 2048, 768, 128), "bfloat16"),
    ],
    ids=["large", "odd", "gated"],
)
def test_lowers(f, shape, dtype):
    M, K, N, G = shape
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in ((M, K), (G, K, N), (M, N))
    ]
    with device.compiling_for(device.H200):
        traced = jax.jit(f).trace(*operands, jax.ShapeDtypeStruct((G,), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") >= 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": jnp.float32}, "x is float32"),
        ({"K": 96}, "K=96 is not a multiple of 64"),
        ({"N": 64}, "N=64 is not a multiple of 64 and at least 128"),
        ({"facts": device.facts_of}, "is not a Hopper GPU"),
    ],
    ids=["fp32", "odd depth", "narrow", "another device"],
)
def test_refuses(change, words):
    k, n = change.get("K", 128), change.get("N", 128)
    x, w = (jnp.zeros(shape, change.get("dtype", jnp.bfloat16)) for shape in ((8, k), (2, k, n)))
    facts = change["facts"](jax.devices()[0]) if "facts" in change else device.H200
    with device.compiling_for(facts), pytest.raises(UnsupportedError, match=words):
        grouped_matmul(x, w, jnp.zeros(2, jnp.int32), implementation="hopper")
