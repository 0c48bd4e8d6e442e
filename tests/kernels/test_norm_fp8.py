"""Norms rounded to e4m3 with a scale a row, against float64; kernels in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError
from pallas_kernels.common import device, tables
from pallas_kernels.norm import api, fp8_formula, layer_norm_fp8, rms_norm_fp8
from pallas_kernels.norm.workloads import EPSILON, WORKLOADS
from pallas_kernels.rows import apply
from pallas_kernels.rows.config import Twice, Wide
from tests.kernels.row_cases import interpreted_hopper, num_chosen, num_kernels, table
from tests.kernels.test_norm import abstract, exact, inputs
from tests.rounding import stored
from tests.tolerance import assert_within_rounding

FORMS = [
    {"f": rms_norm_fp8},
    {"f": layer_norm_fp8},
    {"f": rms_norm_fp8, "residual": True},
    {"f": layer_norm_fp8, "residual": True},
]
NAMES = ["rms_norm", "layer_norm", "rms_norm+residual", "layer_norm+residual"]


def evaluate(xs, vectors, *, f, residual=False, **options):
    """The rounded norm, and the sum if there is a residual."""
    more = {"residual": xs[1]} if residual else {}
    vectors = vectors if f is layer_norm_fp8 else vectors[:1]
    got = jax.jit(functools.partial(f, epsilon=EPSILON, **options))(xs[0], *vectors, **more)
    return got if residual else (got,)


def oracle_of(xs, vectors, ds, *, f, residual=False):
    plain = {rms_norm_fp8: "rms_norm", layer_norm_fp8: "layer_norm"}[f]
    norm = getattr(api, plain)
    y, *sums = exact(xs, vectors, ds, f=norm, residual=residual, fused=False)[0]
    scale = np.abs(y).max(axis=-1) / 448.0
    largest = scale[..., None].value
    return stored(y / largest, jnp.float8_e4m3fn) * largest, scale, *sums


def check(case, form, **options):
    xs, vectors, ds = case
    y, *sums = jax.device_get(evaluate(xs, vectors, **form, **options))
    assert y.values.dtype == jnp.float8_e4m3fn
    got = y.dequantized(), y.scale, *sums
    assert_within_rounding(got, oracle_of(xs, vectors, ds, **form))


@pytest.mark.slow_cases(
    "(2, 2048)-layer_norm",
    "(2, 2048)-rms_norm",
    "(2, 2048)-rms_norm+residual",
    "(8, 96)-layer_norm",
    "(8, 96)-layer_norm+residual",
    "(8, 96)-rms_norm+residual",
)
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("shape", [(8, 96), (2, 2048)], ids=str)
def test_kernels_are_no_worse_than_the_plain_form(shape, form):
    with interpreted_hopper():
        check(inputs(shape), form, implementation="hopper")


# What the last has is all that the one before it has, but for RMSNorm's root.
LAST = [pytest.param(FORMS[2], marks=pytest.mark.slow), FORMS[3]]
LONG = [
    Wide(tile=32, tiles=2, chunks=2, slots=3, vector=1, in_memory=3),
    Twice(warpgroups=1, tile=64, chunks=8, slots=3, vector=2),
]


@pytest.mark.slow_cases("read again-layer_norm+residual")
@pytest.mark.parametrize("form", LAST, ids=NAMES[2:])
@pytest.mark.parametrize("config", LONG, ids=["kept", "read again"])
def test_long_rows_are_no_worse_than_the_plain_form(monkeypatch, config, form):
    """Two workers, two rows and one."""
    monkeypatch.setattr(type(config), "num_clusters", 2)
    monkeypatch.setattr(apply, "config_for", lambda *_: config)
    with interpreted_hopper():
        check(inputs((3, 2048), offset=30.0), form, implementation="hopper")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_other_dtypes_are_no_worse_than_the_plain_form(dtype):
    with interpreted_hopper():
        check(inputs((4, 128), dtype=dtype), FORMS[3], implementation="hopper")


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_xla_form_is_the_plain_form(form):
    check(inputs((5, 77)), form, implementation="xla")


def test_rows_of_zeros_leading_dims_and_vmap():
    (x, _), (scale, _), _ = inputs((8, 64))
    x[3] = 0.0
    x = x.reshape(2, 4, 64)
    f = functools.partial(rms_norm_fp8, epsilon=EPSILON, implementation="hopper")
    with interpreted_hopper():
        whole = jax.device_get(jax.jit(f)(x, scale))
        mapped = jax.jit(jax.vmap(f, in_axes=(0, None)))(x, scale)
    assert whole.values.shape == (2, 4, 64)
    assert whole.scale.shape == (2, 4)
    assert not np.any(whole.dequantized()[0, 3])
    assert whole.scale[0, 3] == np.float32(fp8_formula.LEAST / fp8_formula.LARGEST)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(mapped), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("f", [rms_norm_fp8, layer_norm_fp8])
def test_has_no_gradient(f):
    (x, _), (scale, _), _ = inputs((4, 32))

    def total(x):
        return f(x, scale, epsilon=EPSILON).dequantized().sum()

    with pytest.raises(UnsupportedError, match="for inference and has no gradient: train with"):
        jax.grad(total)(x.astype(np.float32))


@pytest.mark.slow_cases("layer_norm+residual-8192x32768")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
@pytest.mark.parametrize("form", LAST, ids=NAMES[2:])
def test_lowers(workload, form):
    xs, vectors, _ = abstract((workload.rows, workload.columns))
    assert num_kernels(functools.partial(evaluate, **form, implementation="hopper"), xs, vectors)


def test_refuses():
    """Results of other dtypes are not streamed over inputs: between blocks and wide rows, a gap."""
    (x, residual), (scale, _), _ = abstract((8, 4864))

    def f(x, residual, scale, implementation="auto"):
        options = {"epsilon": EPSILON, "implementation": implementation}
        return rms_norm_fp8(x, scale, residual=residual, **options)

    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="4864 columns are not a multiple of 2048"):
            jax.eval_shape(functools.partial(f, implementation="hopper"), x, residual, scale)
        jax.eval_shape(f, x, residual, scale)  # "auto" computes what the kernel refuses


@pytest.mark.parametrize(("form", "num"), [("rms_norm", 0), ("rms_norm_fp8", 1)])
def test_auto_follows_the_table(monkeypatch, tmp_path, form, num):
    """A measurement of the norm is none of its rounding."""
    made = table("norm", form, {"forward": (1.0, 1.2)})
    tables.save(made, tmp_path / "dispatch-nvidia-h200.json")
    monkeypatch.setattr(api, "TUNED", tmp_path)
    (x, _), (scale, _), _ = abstract((4096, 2048))
    f = functools.partial(rms_norm_fp8, epsilon=EPSILON)
    assert num_chosen(lambda x, scale: f(x, scale), x, scale) == num
