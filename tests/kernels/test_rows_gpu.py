"""Softmaxes and norms on a Hopper GPU, where blocks of a cluster exchange, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_norm, log_softmax, rms_norm, softmax
from pallas_kernels.common import device
from pallas_kernels.rows import apply, dispatch
from pallas_kernels.rows.choice import config_for
from pallas_kernels.rows.dispatch import DTYPES
from tests.kernels import test_norm as norms
from tests.kernels import test_norm_fp8 as norms_fp8
from tests.kernels import test_softmax as softmaxes
from tests.tolerance import assert_within_rounding

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    if device.target().capability != (9, 0):
        pytest.skip("needs an NVIDIA Hopper GPU (compute capability 9.0)")


def num_rows(columns: int) -> int:
    """More than clusters that run at a time, so that some take two; the oracle's time bounds it."""
    return 150 if columns <= 32768 else 80 if columns <= 131072 else 40


# 10,240 and 126,976 columns are divided by few blocks and read twice.
@pytest.mark.parametrize("columns", [8192, 10240, 12288, 32768, 126976, 131072, 262144])
@pytest.mark.parametrize("f", [softmax, log_softmax])
def test_softmax(columns, f):
    x, d_y = softmaxes.inputs((num_rows(columns), columns))
    got = softmaxes.evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, softmaxes.exact(x, d_y, f=f))


# In registers; a row to a warp, to one to four warpgroups and to blocks of a cluster.
@pytest.mark.parametrize("columns", [130, 1001, 5000, 11008, 50257, 100003, 262143])
@pytest.mark.parametrize("f", [softmax, log_softmax])
def test_softmax_of_odd_rows(columns, f):
    x, d_y = softmaxes.inputs((num_rows(columns), columns))
    got = softmaxes.evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, softmaxes.exact(x, d_y, f=f))


@pytest.mark.parametrize("columns", [130, 1001, 5000, 7777])
@pytest.mark.parametrize("form", norms.FORMS[:3], ids=norms.NAMES[:3])
def test_norm_and_gradient_of_odd_rows(columns, form):
    case = norms.inputs((700, columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


# Rows that fill a block, and that blocks share; an odd number of them ends between words.
@pytest.mark.parametrize("columns", [19999, 50257])
@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
def test_norm_and_gradient_of_long_odd_rows(columns, form):
    case = norms.inputs((149, columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.fixture
def flat(monkeypatch):
    """By the copy engine, whatever is the default."""
    for module in (apply, dispatch):
        monkeypatch.setattr(module, "config_for", functools.partial(config_for, form="flat"))


# Shifts repeat after 8, 4 and 2 rows, or never are; one to eight blocks, some in pairs of columns.
@pytest.mark.parametrize(
    "columns", [1001, 2499, 5001, 12496, 17706, 27164, 27167, 48739, 80098, 100423, 125184]
)
@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
@pytest.mark.usefixtures("flat")
def test_norm_and_gradient_of_rows_between_words(columns, form):
    """An odd number of rows, several of each block: the array ends between words."""
    case = norms.inputs((601 if columns < 50000 else 301, columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


# Fewer rows than a period has, than blocks, and not a multiple of either.
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 37, 131])
@pytest.mark.parametrize("columns", [1001, 5001, 17706, 48739])
@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
@pytest.mark.usefixtures("flat")
def test_norm_and_gradient_of_few_rows_between_words(rows, columns, form):
    case = norms.inputs((rows, columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [5001, 48739])
@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.usefixtures("flat")
def test_norm_of_other_dtypes_between_words(dtype, form, columns):
    case = norms.inputs((301, columns), dtype=dtype)
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [1001, 5003, 17706, 50257, 100423])
@pytest.mark.parametrize("f", [softmax, rms_norm, layer_norm])
@pytest.mark.usefixtures("flat")
def test_neighbors_that_are_no_numbers_change_nothing(columns, f):
    """Every second row is NaN or infinite; an odd number of them, so that the array ends oddly."""
    x = np.random.default_rng(0).standard_normal((301, columns)).astype(jnp.bfloat16)
    alone = np.array(x[::2], np.float32)
    x[1::4], x[3::4] = np.nan, np.inf
    scale = np.linspace(0.5, 1.5, columns, dtype=np.float32)
    if f is softmax:
        got, want = softmax(x, implementation="hopper"), jax.nn.softmax(alone, axis=-1)
    else:
        vectors = (scale, np.zeros_like(scale)) if f is layer_norm else (scale,)
        got = f(x, *vectors, epsilon=1e-6, implementation="hopper")
        apart = alone - np.mean(alone, axis=-1, keepdims=True) if f is layer_norm else alone
        root = np.sqrt(np.mean(apart**2, axis=-1, keepdims=True) + 1e-6)
        want = apart / root * scale
    # LayerNorm's mean, fp32, cancels what is near it.
    least = 1e-6 if f is layer_norm else 1e-30
    np.testing.assert_allclose(np.asarray(got[::2], np.float32), want, rtol=2**-7, atol=least)


# Of each way through the GPU; fp32 rows take twice the memory.
@pytest.mark.parametrize("columns", [128, 4096, 32768, 262144])
@pytest.mark.parametrize("f", [softmax, log_softmax])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_softmax_of_other_dtypes(dtype, f, columns):
    x, d_y = softmaxes.inputs((40, columns), dtype)
    got = softmaxes.evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, softmaxes.exact(x, d_y, f=f))


# Of each way through the GPU, in each number of blocks a row.
@pytest.mark.parametrize(
    "columns", [32, 128, 1024, 4096, 8192, 10240, 16384, 32768, 65536, 131072, 262144]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_where(dtype, columns):
    x, _ = softmaxes.inputs((num_rows(columns) // 4 * 4, columns), dtype)
    where = jax.random.bernoulli(jax.random.key(3), 0.4, x.shape).at[1].set(False)
    got = softmax(x, where=where, implementation="hopper")
    rows = np.delete(np.arange(len(x)), 1)
    assert_within_rounding(got[rows], softmaxes.exact_softmax(x[rows], where[rows]))
    assert not jnp.any(jnp.where(where, 0.0, got.astype(jnp.float32)))


@pytest.mark.parametrize("columns", [4096, 8192, 10240, 12288, 32768, 131072, 262144])
@pytest.mark.parametrize("form", norms.FORMS, ids=norms.NAMES)
def test_norm_and_gradient(columns, form):
    case = norms.inputs((num_rows(columns), columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [128, 4096, 8192, 32768, 262144])
@pytest.mark.parametrize("form", [norms.FORMS[0], norms.FORMS[3]], ids=["plain", "everything"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_norm_of_other_dtypes(dtype, form, columns):
    case = norms.inputs((40, columns), dtype=dtype)
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [128, 4096, 8192, 32768, 262144])
@pytest.mark.parametrize("form", norms_fp8.FORMS, ids=norms_fp8.NAMES)
def test_norm_in_fp8(form, columns):
    norms_fp8.check(norms.inputs((40, columns)), form, implementation="hopper")


@pytest.mark.parametrize("columns", [4096, 32768])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_norm_in_fp8_of_other_dtypes(dtype, columns):
    case = norms.inputs((40, columns), dtype=dtype)
    norms_fp8.check(case, norms_fp8.FORMS[3], implementation="hopper")


@pytest.mark.parametrize("columns", [131072, 262144])
def test_a_large_mean_cancels_nothing(columns):
    case = norms.inputs((40, columns), offset=3000.0)
    form = {"f": norms.layer_norm}
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
def test_results_repeat_to_the_last_bit(form):
    """A cluster of eight once read numbers before they had come."""
    case = norms.inputs((480, 131072))
    run = jax.jit(functools.partial(norms.evaluate, **form, implementation="hopper"))
    first = jax.tree.leaves(run(*case))
    for _ in range(20):
        for a, b in zip(first, jax.tree.leaves(run(*case)), strict=True):
            assert bool(jnp.array_equal(a, b))


# Of two, four and eight blocks that share a row, thousands of which come and go.
@pytest.mark.parametrize("columns", [50257, 65536, 75584, 102440, 131072, 211712])
@pytest.mark.parametrize("f", [softmax, log_softmax])
def test_softmaxes_repeat_to_the_last_bit(columns, f):
    x, d_y = jax.random.normal(jax.random.key(0), (2, 600, columns), jnp.bfloat16)
    run = jax.jit(functools.partial(softmaxes.evaluate, f=f, implementation="hopper"))
    first = jax.tree.leaves(run(x, d_y))
    for _ in range(10):
        for a, b in zip(first, jax.tree.leaves(run(x, d_y)), strict=True):
            assert bool(jnp.array_equal(a, b))
