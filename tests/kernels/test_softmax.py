"""Softmax against float64; kernels in the interpreter. ``test_rows`` lowers their real form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    InputError,
    UnsupportedError,
    log_softmax,
    logsumexp,
    rms_norm,
    softmax,
)
from pallas_kernels.common import device
from pallas_kernels.rows.dispatch import DTYPES
from pallas_kernels.rows.kernel import apply_rows
from pallas_kernels.softmax.formulas import forward, gradient, log_gradient
from tests.kernels.row_cases import REFUSALS, TILES, interpreted_hopper, num_chosen, wide
from tests.rounding import Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

SLOW = [pytest.mark.slow]


def inputs(shape, dtype=jnp.bfloat16):
    x, d_y = np.random.default_rng(seeded(1)).standard_normal((2, *shape))
    return (3 * x).astype(dtype), d_y.astype(dtype)


def mask(shape):
    return np.random.default_rng(3).random(shape) < 0.4


def evaluate(x, d_y, *, f=softmax, **options):
    y, vjp = jax.vjp(jax.jit(functools.partial(f, **options)), x)
    return y, *vjp(d_y)


def exact(x, d_y, *, f=softmax):
    """Result and gradient, which softmax computes from its result as stored."""
    y, d_y, dtype = exact_softmax(x), Rounded(wide(d_y)), x.dtype
    if f is log_softmax:
        return np.log(y), d_y - y * d_y.sum(axis=-1, keepdims=True)
    return y, exact_gradient(stored(y, dtype), d_y)


def exact_softmax(x, where=True):
    x = Rounded(np.where(np.asarray(where), wide(x), -np.inf))
    power = np.exp(x - x.max(axis=-1, keepdims=True))
    return power / power.sum(axis=-1, keepdims=True)


def exact_gradient(y, d_y):
    return y * (d_y - (y * d_y).sum(axis=-1, keepdims=True))


@pytest.mark.slow_cases("softmax-shape1", "log_softmax-shape3")
@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (softmax, (8, 32)),
        (softmax, (3, 2048)),
        (log_softmax, (8, 32)),
        (log_softmax, (3, 2048)),
    ],
)
def test_kernels_are_no_worse_than_the_plain_form(shape, f):
    x, d_y = inputs(shape)
    with interpreted_hopper():
        got = evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, exact(x, d_y, f=f))


@pytest.mark.slow_cases("float32-log_softmax-shape1")
@pytest.mark.parametrize(
    ("dtype", "f", "shape"),
    [(jnp.float16, softmax, (8, 32)), (jnp.float32, log_softmax, (3, 2048))],
)
def test_other_dtypes_are_no_worse_than_the_plain_form(shape, f, dtype):
    x, d_y = inputs(shape, dtype)
    with interpreted_hopper():
        got = evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, exact(x, d_y, f=f))


def exact_logsumexp(x, d_total):
    """The sum's logarithm and its gradient, which is the softmax in the dtype of x."""
    wide_x = wide(x)
    largest = wide_x.max(axis=-1, keepdims=True)
    power = np.exp(Rounded(wide_x - largest))
    total = power.sum(axis=-1, keepdims=True)
    return (np.log(total) + Rounded(largest))[:, 0], Rounded(wide(d_total)[:, None]) * power / total


def total_and_gradient(x, d_total, **options):
    total, vjp = jax.vjp(jax.jit(functools.partial(logsumexp, **options)), x)
    return total, *vjp(d_total)


@pytest.mark.parametrize(("dtype", "shape"), [(jnp.float32, (3, 2048)), (jnp.bfloat16, (8, 32))])
@pytest.mark.parametrize("implementation", ["hopper", "xla"])
def test_logsumexp(implementation, dtype, shape):
    x, d_y = inputs(shape, dtype)
    x[0, : shape[1] // 2], d_total = -np.inf, d_y[:, 0].astype(np.float32)
    with interpreted_hopper():
        got = total_and_gradient(x, d_total, implementation=implementation)
    assert got[0].dtype == jnp.float32
    assert_within_rounding(got, exact_logsumexp(x, d_total))


@pytest.mark.slow
@pytest.mark.parametrize("name", TILES)
def test_rows_between_words_are_no_worse_than_the_plain_form(name):
    """Neighbors' elements would count: theirs are far larger, -inf, infinite or NaN."""
    x, d_y = inputs((8, 701))
    x[1, :400], x[2] = -np.inf, x[2] + 80
    y = np.asarray(jax.jit(functools.partial(softmax, implementation="reference"))(x))
    x[5], x[7] = np.inf, np.nan
    with interpreted_hopper(TILES[name]):
        got = (
            apply_rows(forward(log=False, masked=False), [x])[0][0],
            apply_rows(gradient(), [y, d_y])[0][0],
            apply_rows(log_gradient(), [x, d_y])[0][0],
        )
    real = [0, 1, 2, 3, 4, 6]
    softmaxed, d = exact_softmax(x[real]), Rounded(wide(d_y[real]))
    oracle = (
        softmaxed,
        exact_gradient(Rounded(wide(y[real])), d),
        d - softmaxed * d.sum(axis=-1, keepdims=True),
    )
    assert_within_rounding(tuple(np.asarray(a)[real] for a in got), oracle)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(
            dtype,
            shape,
            # By default one: what a mask does is not of a dtype.
            marks=[pytest.mark.slow] * (dtype != jnp.bfloat16 or shape == (4, 96)),
            id=f"{dtype.__name__}-{shape}",
        )
        for dtype in DTYPES
        for shape in ((4, 96), (2, 2048))
    ],
)
def test_where(dtype, shape):
    """Columns that do not count give 0, and so does their gradient; a row of no others is 0."""
    x, d_y = inputs(shape, dtype)
    where = mask(shape)
    where[1] = False
    with interpreted_hopper():
        got = evaluate(x, d_y, where=where, implementation="hopper")
    ordinary = np.delete(np.arange(shape[0]), 1)
    y = exact_softmax(x[ordinary], where[ordinary])
    oracle = y, exact_gradient(stored(y, dtype), Rounded(wide(d_y)[ordinary]))
    got = jax.device_get(got)
    assert_within_rounding(tuple(a[ordinary] for a in got), oracle)
    for result in got:
        assert not result[~where].any()


@pytest.mark.parametrize("columns", [96, 2048])
def test_where_of_rows_without_a_softmax(columns):
    """They are NaN in the columns that count, and 0 in the others."""
    x, _ = inputs((4, columns))
    x[0], x[1, 0], x[2, 0] = -np.inf, np.inf, np.nan
    where = mask(x.shape)
    where[:, 0] = True
    x[3, ~where[3]] = np.nan  # what does not count may be anything
    with interpreted_hopper():
        got = np.asarray(
            jax.jit(functools.partial(softmax, implementation="hopper"))(x, where=where)
        )
    assert np.where(where[:3], np.isnan(got[:3]), got[:3] == 0.0).all()
    oracle = exact_softmax(np.where(where[3:], x[3:], 0), where[3:])
    assert_within_rounding(got[3:], oracle)


def test_masks_are_read_as_bytes():
    """And by no pass that makes floats of them."""
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    where = jax.ShapeDtypeStruct(x.shape, jnp.bool)
    with device.compiling_for(device.H200):
        program = jax.jit(lambda x, where: softmax(x, where=where, implementation="hopper"))
        lowered = program.trace(x, where).lower(lowering_platforms=("cuda",)).as_text()
    casts = [line for line in lowered.splitlines() if "stablehlo.convert" in line]
    assert len(casts) == 1
    assert "(tensor<64x4096xi1>) -> tensor<64x4096xi8>" in casts[0]
    assert "softmax_mosaic_gpu" in lowered, "what a trace calls the kernel"


@pytest.mark.parametrize("shape", [(4, 96), (2, 2048)], ids=str)
def test_masked_columns_and_rows(shape):
    """A part that is all -inf counts as zero; finfo.min is a number, however large."""
    x, _ = inputs(shape)
    half = shape[1] // 2
    lowest = jnp.finfo(x.dtype).min
    x[0, half:], x[1], x[1, 0] = -np.inf, lowest, lowest / 2
    if shape[0] > 2:
        x[2], x[3] = lowest, -np.inf
    with interpreted_hopper():
        got = np.asarray(jax.jit(functools.partial(softmax, implementation="hopper"))(x))
    assert_within_rounding(got, exact_softmax(x))
    assert not got[0, half:].any()


def test_vmap_and_leading_dims():
    x = inputs((16, 64))[0].reshape(2, 2, 4, 64)
    f = functools.partial(softmax, implementation="hopper")
    with interpreted_hopper():
        whole, mapped = jax.jit(f)(x), jax.jit(jax.vmap(f))(x[0])
    np.testing.assert_array_equal(np.asarray(whole)[0], mapped)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("f", [softmax, log_softmax])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_portable_forms_are_the_formula(dtype, f, implementation):
    x, d_y = (a.astype(dtype) for a in inputs((5, 77)))
    got = evaluate(x, d_y, f=f, implementation=implementation)
    assert_within_rounding(got, exact(x, d_y, f=f))


def of_ones(x, **options):
    return rms_norm(x, jnp.ones(x.shape[-1]), epsilon=1e-6, **options)


@pytest.mark.parametrize("f", [softmax, of_ones], ids=["softmax", "rms_norm"])
@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=str)
def test_refuses(change, words, f):
    x = jax.ShapeDtypeStruct(change.get("shape", (8, 128)), change.get("dtype", jnp.bfloat16))
    f = functools.partial(f, num_devices=change.get("num_devices", 1))
    with device.compiling_for(change.get("facts", device.H200)):
        with pytest.raises(UnsupportedError, match=words) as refusal:
            jax.eval_shape(functools.partial(f, implementation="hopper"), x)
        jax.eval_shape(f, x)  # "auto" computes what the kernel refuses
    assert "implementation='xla' can" in str(refusal.value)


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (jnp.zeros((4, 32)), {"axis": 0}, "axis=0 of shape .* over the last dim"),
        (jnp.zeros((4, 32), jnp.int32), {}, "x is int32"),
        (jnp.zeros(()), {}, "one dim or more"),
        (jnp.zeros((4, 32)), {"where": jnp.ones((4, 32))}, "where is float32.* must be bool"),
        (jnp.zeros((4, 32)), {"where": jnp.ones(5, bool)}, "does not broadcast"),
        (jnp.zeros((4, 32)), {"implementation": "triton"}, "choose auto, hopper, xla, reference"),
    ],
    ids=["axis", "integers", "scalar", "mask of floats", "mask's shape", "name"],
)
def test_wrong_arguments(x, options, words):
    with pytest.raises(InputError, match=words):
        softmax(x, **options)


@pytest.mark.parametrize(
    ("rows", "columns", "num"), [(4096, 131072, 2), (1048576, 128, 1), (3, 301, 0)]
)
def test_auto_takes_the_kernel_where_it_is_faster(rows, columns, num):
    """At 128 columns the gradient alone; what the kernel refuses goes by XLA."""
    x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    assert num_chosen(lambda x, d_y: evaluate(x, d_y), x, x) == num


@pytest.mark.parametrize(("columns", "num"), [(4096, 0), (32768, 1)])
def test_auto_takes_masks_of_long_rows(columns, num):
    x = jax.ShapeDtypeStruct((512, columns), jnp.bfloat16)
    where = jax.ShapeDtypeStruct(x.shape, jnp.bool)
    assert num_chosen(lambda x, where: softmax(x, where=where), x, where) == num
