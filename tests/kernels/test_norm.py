"""RMSNorm and LayerNorm against float64; kernels in the interpreter. ``test_rows`` lowers them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import InputError, layer_norm, rms_norm
from pallas_kernels.norm import formulas
from pallas_kernels.rows.config import RowConfig
from tests.kernels.row_cases import (
    TILES,
    WHOLE_TILES,
    interpreted_hopper,
    num_chosen,
    wide,
)
from tests.rounding import Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

EPSILON = 1e-6


def inputs(shape, offset=0.0, dtype=jnp.bfloat16):
    """x, residual, scale, bias; gradients of the norm and of the sum. The offset is x's mean."""
    rng = np.random.default_rng(seeded(1))
    x, residual, d_y, d_sum = rng.standard_normal((4, *shape))
    scale, bias = rng.standard_normal((2, shape[1]))
    x, residual, d_y, d_sum = (a.astype(dtype) for a in (3 * x + offset, residual, d_y, d_sum))
    vectors = (1.0 + 0.1 * scale).astype(np.float32), bias.astype(np.float32)
    return (x, residual), vectors, (d_y, d_sum)


def evaluate(xs, vectors, ds, *, f=rms_norm, residual=False, epsilon=EPSILON, **options):
    """The norm, the sum if there is a residual; gradients of xs, of the scale, of the bias."""
    xs, ds = (xs, ds) if residual else (xs[:1], ds[:1])

    def call(xs, vectors):
        more = {"residual": xs[1]} if residual else {}
        y = f(xs[0], *vectors, epsilon=epsilon, **more, **options)
        return y if residual else (y,)

    y, vjp = jax.vjp(jax.jit(call), xs, vectors if f is layer_norm else vectors[:1])
    return y, vjp(ds)


def exact(xs, vectors, ds, *, f=rms_norm, residual=False, epsilon=EPSILON, fused=True):
    """A program that is not ``fused`` may take the norm of a sum that it has not rounded, and round
    the gradient before it adds the sum's.
    """
    xs, ds = (xs, ds) if residual else (xs[:1], ds[:1])
    x, scale, d_y = (
        Rounded(wide(a)) for a in (xs[0] + xs[1] if residual else xs[0], vectors[0], ds[0])
    )
    total = x
    if residual and not fused:
        x = stored(Rounded(wide(xs[0])) + wide(xs[1]), xs[0].dtype)
    centered = x - x.mean(axis=-1, keepdims=True) if f is layer_norm else x
    root = 1 / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + epsilon)
    unit = centered * root
    g = scale * d_y
    d_x = root * (g - unit * (g * unit).mean(axis=-1, keepdims=True))
    y, d_vectors = unit * scale, [(d_y * unit).sum(axis=0)]
    if f is layer_norm:
        y = y + wide(vectors[1])
        d_x = d_x - root * g.mean(axis=-1, keepdims=True)
        d_vectors.append(d_y.sum(axis=0))
    if residual:
        d_x = d_x if fused else stored(d_x, xs[0].dtype)
        return (y, total), ((d_x + wide(ds[1]),) * 2, tuple(d_vectors))
    return (y,), ((d_x,), tuple(d_vectors))


FORMS = [
    {"f": rms_norm},
    {"f": layer_norm},
    {"f": rms_norm, "residual": True},
    {"f": layer_norm, "residual": True},
]
NAMES = ["rms_norm", "layer_norm", "rms_norm+residual", "layer_norm+residual"]
# The last has all that the others have, but for RMSNorm's root.
WHICH = [
    pytest.param(form, id=name, marks=[pytest.mark.slow] * (name != NAMES[-1]))
    for form, name in zip(FORMS, NAMES, strict=True)
]


@pytest.mark.slow_cases("(8, 32)-1e-06-layer_norm+residual")
@pytest.mark.parametrize("form", WHICH)
@pytest.mark.parametrize(("shape", "epsilon"), [((8, 32), EPSILON), ((2, 2048), 2.0)], ids=str)
def test_kernels_are_no_worse_than_the_plain_form(shape, epsilon, form):
    case, form = inputs(shape), {**form, "epsilon": epsilon}
    with interpreted_hopper():
        got = evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, exact(*case, **form))


@pytest.mark.slow_cases("float32-(2, 2048)")
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(dtype, shape, marks=[pytest.mark.slow] * slow, id=f"{dtype.__name__}-{shape}")
        for dtype, shape, slow in (
            (jnp.float16, (8, 32), True),
            (jnp.float32, (2, 2048), False),
            (jnp.float16, (2, 2048), True),
            (jnp.float32, (8, 32), True),
        )
    ],
)
def test_other_dtypes_are_no_worse_than_the_plain_form(shape, dtype):
    case = inputs(shape, dtype=dtype)
    with interpreted_hopper():
        got = evaluate(*case, **FORMS[3], implementation="hopper")
    assert_within_rounding(got, exact(*case, **FORMS[3]))


# LayerNorm has all that RMSNorm has.
@pytest.mark.slow  # `test_softmax.py` has rows between words
@pytest.mark.parametrize("f", [rms_norm, layer_norm])
@pytest.mark.parametrize("name", TILES)
def test_rows_between_words_are_no_worse_than_the_plain_form(name, f):
    """Scales and sums lie behind each shift; every second row's neighbor is no number."""
    xs, vectors, ds = inputs((8, 701), offset=30.0)
    with interpreted_hopper(TILES[name]):
        got = evaluate(xs, vectors, ds, f=f, implementation="hopper")
        x = np.array(xs[0])
        x[1::2] = np.nan
        beside = f(x, *vectors[: 1 + (f is layer_norm)], epsilon=EPSILON, implementation="hopper")
    assert_within_rounding(got, exact(xs, vectors, ds, f=f))
    np.testing.assert_array_equal(np.asarray(beside)[::2], np.asarray(got[0][0])[::2])


@pytest.mark.parametrize(
    "name",
    ["turns", *(pytest.param(name, marks=pytest.mark.slow) for name in ("once", "persistent"))],
)
def test_whole_rows_are_no_worse_than_the_plain_form(name):
    case = inputs((32, 64), offset=30.0)
    with interpreted_hopper(WHOLE_TILES[name]):
        got = evaluate(*case, **FORMS[3], implementation="hopper")
    assert_within_rounding(got, exact(*case, **FORMS[3]))


@pytest.mark.slow  # of the bound, which other tests hold; interpreted
def test_a_pivot_that_is_not_put_right_is_caught(monkeypatch):
    def wrong(norm, off, square):
        return mean_and_root(norm, [0.5 * x for x in off], square)

    mean_and_root = formulas._mean_and_root
    monkeypatch.setattr(formulas, "_mean_and_root", wrong)
    case = inputs((8, 701), offset=5.0)
    with interpreted_hopper(TILES["turns"]):
        got = evaluate(*case, f=layer_norm, implementation="hopper")
    with pytest.raises(AssertionError, match="times"):
        assert_within_rounding(got, exact(*case, f=layer_norm))


@pytest.mark.slow_cases("10000.0")
@pytest.mark.parametrize("first", [pytest.param(0.0, marks=pytest.mark.slow), 1e4])
def test_first_columns_far_from_the_others_cost_what_cancels(first):
    """A pivot is the mean of 32 columns: one outlier among n of them cancels n / 1024 times."""
    (x, _), (scale, _), _ = inputs((8, 2048), dtype=jnp.float32)
    x[:, 0] += first
    with interpreted_hopper(RowConfig(group=4, tile=128, vector=2, interpretable=True)):
        got = layer_norm(x, scale, epsilon=0.0, implementation="hopper")
    y = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    want = y / y.std(axis=-1, keepdims=True) * wide(scale)
    np.testing.assert_allclose(wide(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [pytest.param((4, 128), marks=pytest.mark.slow), (2, 2048)], ids=str
)
def test_a_large_mean_cancels_nothing(shape):
    """A mean of 1000 deviations: sums of squares about 0 would leave no digit of the variance."""
    case = inputs(shape, offset=3000.0)
    with interpreted_hopper():
        got = evaluate(*case, f=layer_norm, implementation="hopper")
    assert_within_rounding(got, exact(*case, f=layer_norm))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(
            dtype,
            form,
            id=f"{dtype.__name__}-{name}",
            marks=[pytest.mark.slow] * (dtype == jnp.float32 and name not in (NAMES[0], NAMES[-1])),
        )
        for dtype in (jnp.bfloat16, jnp.float32)
        for form, name in zip(FORMS, NAMES, strict=True)
    ],
)
def test_portable_forms_are_the_formula(dtype, form, implementation):
    xs, vectors, ds = inputs((5, 77))
    case = tuple(x.astype(dtype) for x in xs), vectors, tuple(d.astype(dtype) for d in ds)
    got = evaluate(*case, **form, implementation=implementation)
    assert_within_rounding(got, exact(*case, **form, fused=False))


def test_scale_in_bf16_vmap_and_leading_dims():
    (x, _), (scale, _), (d_y, _) = inputs((8, 64))
    scale = scale.astype(jnp.bfloat16)
    x, d_y = (a.reshape(2, 4, 64) for a in (x, d_y))

    def f(x, scale, d_y, implementation="hopper"):
        (y,), ((d_x,), (d_scale,)) = evaluate((x,), (scale,), (d_y,), implementation=implementation)
        return y, d_x, d_scale

    with interpreted_hopper():
        y, d_x, d_scale = jax.jit(f)(x, scale, d_y)
        mapped = jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(x, scale, d_y)
    assert d_scale.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y), np.asarray(mapped[0]))
    np.testing.assert_array_equal(np.asarray(d_x), np.asarray(mapped[1]))
    oracle = exact((x.reshape(8, 64),), (scale,), (d_y.reshape(8, 64),))
    assert_within_rounding(d_scale, oracle[1][1][0])


def abstract(shape, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct(shape, dtype)
    vector = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    return (x, x), (vector, vector), (x, x)


@pytest.mark.parametrize(
    ("x", "scale", "options", "words"),
    [
        (jnp.zeros((4, 32)), jnp.zeros(16), {}, r"scale is float32\[16\]; x asks for floats"),
        (jnp.zeros((4, 32)), jnp.zeros(32, jnp.int32), {}, "scale is int32"),
        (jnp.zeros((4, 32), jnp.int32), jnp.zeros(32), {}, "x is int32"),
        (jnp.zeros((4, 32)), jnp.zeros(32), {"epsilon": -1.0}, "epsilon=-1.0"),
        (jnp.zeros((4, 32)), jnp.zeros(32), {"implementation": "triton"}, "choose auto, hopper"),
    ],
    ids=["scale's width", "scale's dtype", "integers", "epsilon", "name"],
)
def test_wrong_arguments(x, scale, options, words):
    with pytest.raises(InputError, match=words):
        rms_norm(x, scale, **{"epsilon": EPSILON, **options})


@pytest.mark.parametrize(
    ("shape", "form", "num"),
    [((8192, 32768), FORMS[0], 2), ((4096, 131072), FORMS[3], 2), ((1048576, 128), FORMS[0], 1),
     ((80, 262144), FORMS[1], 1)],
    ids=["rms 32768", "layer 131072 residual", "rms 128", "layer 262144"],
)  # fmt: skip
def test_auto_takes_the_kernel_where_it_is_faster(shape, form, num):
    """At 128 columns the gradient alone; at 262,144 LayerNorm's gradient fits no registers."""
    assert num_chosen(functools.partial(evaluate, **form), *abstract(shape)) == num
