"""Softmax against float64; the kernels in the interpreter, their real form lowered for CUDA.

Blocks of a cluster exchange by inline code, which the interpreter lacks: rows of one block run
here; longer ones lower here and are checked by the benchmark on a GPU, and by ``test_rows_gpu``.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import InputError, UnsupportedError, log_softmax, softmax
from pallas_kernels.common import device, tables
from pallas_kernels.rows.config import Stream, Twice, Wide
from pallas_kernels.rows.dispatch import BARS, DTYPES, OTHERS
from pallas_kernels.softmax import api, hopper
from tests.kernels.row_cases import (
    REFUSALS,
    interpreted_hopper,
    num_chosen,
    num_kernels,
    table,
    wide,
)
from tests.rounding import Rounded, stored
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding


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


@pytest.mark.slow_cases("softmax-shape0", "log_softmax-shape3")
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


# Each dtype, form and length; all together run with the slow ones.
QUICK = {
    (jnp.float16, softmax, (8, 32)),
    (jnp.float16, log_softmax, (3, 2048)),
    (jnp.float32, softmax, (3, 2048)),
    (jnp.float32, log_softmax, (8, 32)),
}


@pytest.mark.slow_cases("float32-softmax-(3, 2048)", "float16-softmax-(8, 32)")
@pytest.mark.parametrize(
    ("dtype", "f", "shape"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.slow] * (case not in QUICK),
            id=f"{case[0].__name__}-{case[1].__name__}-{case[2]}",
        )
        for case in (
            *itertools.product(
                (jnp.float16, jnp.float32), (softmax, log_softmax), ((8, 32), (3, 2048))
            ),
            (jnp.float16, softmax, (2, 8192)),  # in bf16 the gradient goes as odd rows do
        )
    ],
)
def test_other_dtypes_are_no_worse_than_the_plain_form(shape, f, dtype):
    x, d_y = inputs(shape, dtype)
    with interpreted_hopper():
        got = evaluate(x, d_y, f=f, implementation="hopper")
    assert_within_rounding(got, exact(x, d_y, f=f))


def check_softmaxes(x, d_y, config) -> None:
    """Softmax, its gradient and log-softmax's, by one form of the kernel."""
    y = jax.jit(functools.partial(softmax, implementation="reference"))(x)
    with interpreted_hopper():
        got = (
            hopper.softmax(x, config=config),
            hopper.softmax_gradient(y, d_y, config=config),
            hopper.log_softmax_gradient(x, d_y, config=config),
        )
    softmaxed, d = exact_softmax(x), Rounded(wide(d_y))
    oracle = (
        softmaxed,
        exact_gradient(Rounded(wide(y)), d),
        d - softmaxed * d.sum(axis=-1, keepdims=True),
    )
    assert_within_rounding(got, oracle)


LONG = [
    pytest.param(Wide(tile=64, chunks=2, slots=3, vector=2), marks=pytest.mark.slow),
    Wide(tile=64, chunks=2, slots=5, ahead=True, vector=2),
    Twice(warpgroups=1, tile=128, chunks=4, slots=3, vector=2),
]


@pytest.mark.slow_cases("folded ahead")
@pytest.mark.parametrize("config", LONG, ids=["kept", "folded ahead", "read twice"])
def test_long_rows_are_no_worse_than_the_plain_form(monkeypatch, config):
    """Two workers, two rows and one: chunks take turns in the slots."""
    monkeypatch.setattr(type(config), "num_clusters", 2)
    x, d_y = inputs((3, 2048))
    x[1, :700] = -np.inf
    check_softmaxes(x, d_y, config)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(
            dtype,
            shape,
            # Each dtype with one length.
            marks=[pytest.mark.slow] * ((dtype == jnp.bfloat16) == (shape == (4, 96))),
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


@pytest.mark.slow_cases("read twice")
@pytest.mark.parametrize(
    "config",
    [*LONG, Stream(group=2)],
    ids=["kept", "folded ahead", "read twice", "streamed"],
)
def test_where_of_long_rows(monkeypatch, config):
    """Masks pass through shared memory beside their rows, in each way there is."""
    if not isinstance(config, Stream):
        monkeypatch.setattr(type(config), "num_clusters", 2)
    x, _ = inputs((5, 2048))
    where = mask(x.shape)
    where[1, 700:] = where[4] = False
    with interpreted_hopper():
        got = np.asarray(jax.jit(functools.partial(hopper.softmax, config=config))(x, where))
    assert_within_rounding(got[:4], exact_softmax(x[:4], where[:4]))
    assert not got[~where].any()


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


@pytest.mark.slow_cases("8192x32768")
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(
            each,
            # ``test_rows_choice`` lowers rows of this length.
            marks=[pytest.mark.slow] * (each.columns == 131072),
            id=each.name,
        )
        for each in (*BARS, *OTHERS)
    ],
)
def test_lowers(workload):
    x = jax.ShapeDtypeStruct((workload.rows, workload.columns), jnp.bfloat16)

    where = jax.ShapeDtypeStruct(x.shape, jnp.bool)

    def both(x, d_y):
        return evaluate(x, d_y, implementation="hopper")

    def other_forms(x, d_y, where):
        log = evaluate(x, d_y, f=log_softmax, implementation="hopper")
        return log, softmax(x, where=where, implementation="hopper")

    assert num_kernels(both, x, x) == 2
    if workload in BARS[:2]:
        assert num_kernels(other_forms, x, x, where) == 3


@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=str)
def test_refuses(change, words):
    x = jax.ShapeDtypeStruct(change.get("shape", (8, 128)), change.get("dtype", jnp.bfloat16))
    options = {"num_devices": change.get("num_devices", 1)}
    f = functools.partial(softmax, implementation="hopper", **options)
    with (
        device.compiling_for(change.get("facts", device.H200)),
        pytest.raises(UnsupportedError, match=words) as refusal,
    ):
        jax.eval_shape(f, x)
    assert "implementation='xla' can" in str(refusal.value)
    # "auto" computes what the kernel refuses.
    with device.compiling_for(change.get("facts", device.H200)):
        jax.eval_shape(functools.partial(softmax, **options), x)


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


MEASURED = {"forward": (1.0, 1.02), "gradient": (1.0, 1.2)}


@pytest.mark.parametrize(
    ("shape", "num"),
    [((4096, 2048), 1), ((16384, 4096), 1), ((512, 2048), 0), ((4096, 8192), 0)],
    ids=["measured", "near", "few rows", "wide rows"],
)
def test_auto_follows_the_table(monkeypatch, tmp_path, shape, num):
    tables.save(table("softmax", "softmax", MEASURED), tmp_path / "dispatch-nvidia-h200.json")
    monkeypatch.setattr(api, "TUNED", tmp_path)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert num_chosen(lambda x, d_y: evaluate(x, d_y), x, x) == num
    assert num_chosen(lambda x: softmax(x), x) == 0


def test_auto_takes_no_dtype_that_was_not_measured(monkeypatch, tmp_path):
    tables.save(table("softmax", "softmax", MEASURED), tmp_path / "dispatch-nvidia-h200.json")
    monkeypatch.setattr(api, "TUNED", tmp_path)
    for dtype, num in ((jnp.bfloat16, 1), (jnp.float16, 0), (jnp.float32, 0)):
        x = jax.ShapeDtypeStruct((4096, 2048), dtype)
        assert num_chosen(lambda x, d_y: evaluate(x, d_y), x, x) == num


def test_auto_without_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr(api, "TUNED", tmp_path)
    x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16)
    assert num_chosen(lambda x, d_y: evaluate(x, d_y), x, x) == 0


def test_the_shipped_table():
    def num(rows, columns, f, *others):
        x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
        return num_chosen(f, x, x, *others)

    for rows, columns in ((32768, 4096), (8192, 32768), (4096, 131072)):
        assert num(rows, columns, lambda x, d_y: evaluate(x, d_y)) == 2
    assert num(1048576, 128, lambda x, d_y: evaluate(x, d_y)) == 1  # the gradient
    where = jax.ShapeDtypeStruct((32768, 4096), jnp.bool)
    assert num(32768, 4096, lambda x, _, where: softmax(x, where=where), where) == 0
