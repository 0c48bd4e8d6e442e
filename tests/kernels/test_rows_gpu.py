"""Softmaxes and norms on a Hopper GPU, where blocks of a cluster exchange, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layer_norm, log_softmax, rms_norm, softmax
from tests.kernels import test_norm as norms
from tests.kernels import test_softmax as softmaxes
from tests.tolerance import assert_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def num_rows(columns: int) -> int:
    """More than clusters that run at a time, so that some take two; the oracle's time bounds it."""
    return 152 if columns <= 32768 else 80 if columns <= 131072 else 40


# Whole in a warp, of a block, of two to eight blocks; in words and between.
@pytest.mark.parametrize(
    "columns", [128, 1001, 4096, 11008, 32768, 50257, 100422, 131072, 211712, 262143]
)
@pytest.mark.parametrize("f", [softmax, log_softmax])
def test_softmax(columns, f):
    x, d_y = softmaxes.inputs((num_rows(columns), columns))
    got = softmaxes.evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, softmaxes.exact(x, d_y, f=f))


@pytest.mark.parametrize("columns", [128, 1001, 4096, 32768, 50257, 131072, 151936])
def test_logsumexp_does_not_depend_on_other_rows(columns):
    x, d_y = softmaxes.inputs((num_rows(columns), columns), jnp.float32)
    got = softmaxes.total_and_gradient(x, d_y[:, 0], implementation="hopper")
    assert_within_rounding(got, softmaxes.exact_logsumexp(x, d_y[:, 0]))
    few = softmaxes.total_and_gradient(x[8:16], d_y[8:16, 0], implementation="hopper")[0]
    np.testing.assert_array_equal(np.asarray(few), np.asarray(got[0][8:16]))


@pytest.mark.parametrize("columns", [128, 4096, 50257, 131072])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_softmax_of_other_dtypes(dtype, columns):
    x, d_y = softmaxes.inputs((40, columns), dtype)
    got = softmaxes.evaluate(x, d_y, implementation="hopper")
    assert_within_rounding(got, softmaxes.exact(x, d_y))


@pytest.mark.parametrize("columns", [128, 1024, 10240, 32768, 131072])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_where(dtype, columns):
    x, _ = softmaxes.inputs((num_rows(columns), columns), dtype)
    where = jax.random.bernoulli(jax.random.key(3), 0.4, x.shape).at[1].set(False)
    got = softmax(x, where=where, implementation="hopper")
    rows = np.delete(np.arange(len(x)), 1)
    assert_within_rounding(got[rows], softmaxes.exact_softmax(x[rows], where[rows]))
    assert not jnp.any(jnp.where(where, 0.0, got.astype(jnp.float32)))


@pytest.mark.parametrize("columns", [128, 1001, 4096, 12496, 17706, 32768, 48739, 98304, 131072])
@pytest.mark.parametrize("form", norms.FORMS, ids=norms.NAMES)
def test_norm_and_gradient(columns, form):
    case = norms.inputs((600 if columns <= 32768 else num_rows(columns), columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


# Fewer rows than a period has, than blocks, and not a multiple of either.
@pytest.mark.parametrize("rows", [8, 40, 136])
@pytest.mark.parametrize("columns", [1001, 17706, 48739])
@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
def test_norm_and_gradient_of_few_rows(rows, columns, form):
    case = norms.inputs((rows, columns))
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [128, 4096, 5001, 48739, 65536])
@pytest.mark.parametrize("form", [norms.FORMS[0], norms.FORMS[1]], ids=norms.NAMES[:2])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_norm_of_other_dtypes(dtype, form, columns):
    case = norms.inputs((40, columns), dtype=dtype)
    got = norms.evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, **form))


@pytest.mark.parametrize("columns", [4096, 131072])
def test_a_large_mean_cancels_nothing(columns):
    case = norms.inputs((40, columns), offset=3000.0)
    got = norms.evaluate(*case, f=layer_norm, implementation="hopper")
    assert_within_rounding(got, norms.exact(*case, f=layer_norm))


@pytest.mark.parametrize("columns", [1001, 17706, 100422])
@pytest.mark.parametrize("f", [softmax, rms_norm, layer_norm])
def test_neighbors_that_are_no_numbers_change_nothing(columns, f):
    x = np.random.default_rng(0).standard_normal((304, columns)).astype(jnp.bfloat16)
    beside = np.array(x)
    beside[1::4], beside[3::4] = np.nan, np.inf
    scale = np.linspace(0.5, 1.5, columns, dtype=np.float32)
    vectors = {softmax: (), rms_norm: (scale,), layer_norm: (scale, scale)}[f]
    options = {} if f is softmax else {"epsilon": 1e-6}
    got, alone = (f(a, *vectors, **options, implementation="hopper")[::2] for a in (beside, x))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(alone))


# Of two, four and eight blocks that share a row: thousands of which come and go, or go on.
@pytest.mark.parametrize("columns", [50257, 75584, 131072, 211712])
def test_softmaxes_repeat_to_the_last_bit(columns):
    x, d_y = jax.random.normal(jax.random.key(0), (2, 600, columns), jnp.bfloat16)
    run = jax.jit(functools.partial(softmaxes.evaluate, implementation="hopper"))
    check_repeats(run, x, d_y)


@pytest.mark.parametrize("columns", [4096, 48739, 131072])
@pytest.mark.parametrize("form", norms.FORMS[:2], ids=norms.NAMES[:2])
def test_norms_repeat_to_the_last_bit(form, columns):
    case = norms.inputs((480, columns))
    run = jax.jit(functools.partial(norms.evaluate, **form, implementation="hopper"))
    check_repeats(run, *case)


def check_repeats(run, *args) -> None:
    first = jax.tree.leaves(run(*args))
    for _ in range(10):
        for a, b in zip(first, jax.tree.leaves(run(*args)), strict=True):
            assert bool(jnp.array_equal(a, b))
