"""RMSNorm and LayerNorm against float64; kernels in the interpreter, their real form lowered.

Rows of one block run here, as in ``test_softmax``.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.kernels.memory_table import FOLDERS, read, table_of
from pallas_kernels import InputError, UnsupportedError, layer_norm, rms_norm
from pallas_kernels.common import device, tables
from pallas_kernels.norm import api
from pallas_kernels.norm.workloads import EPSILON, WORKLOADS
from pallas_kernels.rows import apply
from pallas_kernels.rows.config import Twice, Wide
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

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"


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
            (jnp.float16, (8, 32), False),
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


@pytest.mark.slow_cases("read twice-float32")
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float16, marks=pytest.mark.slow), jnp.float32])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            Wide(tile=32, chunks=4, slots=5, vector=1, in_memory=4), marks=pytest.mark.slow
        ),
        Twice(tile=64, chunks=2, slots=2, vector=2),
    ],
    ids=["kept", "read twice"],
)
def test_long_rows_of_other_dtypes_are_no_worse_than_the_plain_form(monkeypatch, config, dtype):
    monkeypatch.setattr(type(config), "num_clusters", 2)
    monkeypatch.setattr(apply, "config_for", lambda *_: config)
    case = inputs((3, 2048), dtype=dtype)
    with interpreted_hopper():
        got = evaluate(*case, **FORMS[3], implementation="hopper")
    assert_within_rounding(got, exact(*case, **FORMS[3]))


@pytest.mark.parametrize("form", WHICH)
def test_wide_rows_are_no_worse_than_the_plain_form(monkeypatch, form):
    """Two workers, rows in four tiles; vectors in registers, then three quarters in memory."""
    monkeypatch.setattr(Wide, "num_clusters", 2)
    held = Wide(tile=32, tiles=2, chunks=2, slots=4, vector=1, ahead=True)
    configs = iter((held, dataclasses.replace(held, slots=3, in_memory=3, ahead=False)) * 2)
    monkeypatch.setattr(apply, "config_for", lambda *_: next(configs))
    case = inputs((3, 2048))
    with interpreted_hopper():
        got = evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, exact(*case, **form))


@pytest.mark.parametrize("form", WHICH)
def test_rows_read_twice_are_no_worse_than_the_plain_form(monkeypatch, form):
    """Two workers, rows of six chunks that take turns in two slots; sums in memory."""
    monkeypatch.setattr(Twice, "num_clusters", 2)
    config = Twice(warpgroups=1, tile=64, chunks=6, slots=2, vector=2)
    monkeypatch.setattr(apply, "config_for", lambda *_: config)
    case = inputs((5, 1536), offset=30.0)
    with interpreted_hopper():
        got = evaluate(*case, **form, implementation="hopper")
    assert_within_rounding(got, exact(*case, **form))


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
    "workload",
    [
        pytest.param(
            each,
            # ``test_rows_choice`` lowers rows of these lengths; of 1024 ``lowers_with_everything``.
            marks=[pytest.mark.slow] * (each.columns in (1024, 4096, 32768, 131072)),
            id=each.name,
        )
        for each in WORKLOADS
    ],
)
def test_lowers(workload):
    f = functools.partial(evaluate, implementation="hopper")
    assert num_kernels(f, *abstract((workload.rows, workload.columns))) == 2


@pytest.mark.slow_cases("1024")
@pytest.mark.parametrize(
    "columns",
    # The least and the most; ``test_rows_choice`` lowers others.
    [1024, 245760, *(pytest.param(n, marks=pytest.mark.slow) for n in (8192, 32768, 131072))],
)
def test_lowers_with_everything(columns):
    f = functools.partial(evaluate, **FORMS[3], implementation="hopper")
    assert num_kernels(f, *abstract((4096, columns))) == 2


@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=str)
def test_refuses(change, words):
    shape, dtype = change.get("shape", (8, 128)), change.get("dtype", jnp.bfloat16)
    (x, _), (scale, _), _ = abstract(shape, dtype)
    f = functools.partial(rms_norm, epsilon=EPSILON, num_devices=change.get("num_devices", 1))
    with device.compiling_for(change.get("facts", device.H200)):
        with pytest.raises(UnsupportedError, match=words) as refusal:
            jax.eval_shape(functools.partial(f, implementation="hopper"), x, scale)
        jax.eval_shape(f, x, scale)  # "auto" computes what the kernel refuses
    assert "implementation='xla' can" in str(refusal.value)


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
    ("ms", "num"),
    [
        ({"forward": (1.0, 1.02), "gradient": (1.0, 1.2)}, 1),
        ({"forward": (1.0, 1.2), "gradient": (1.0, 1.2)}, 2),
        ({"forward": (1.0, 1.02), "gradient": (1.3, 1.2)}, 0),
    ],
    ids=["gradient", "both", "neither"],
)
def test_auto_follows_the_table(monkeypatch, tmp_path, ms, num):
    tables.save(table("norm", "rms_norm", ms), tmp_path / "dispatch-nvidia-h200.json")
    monkeypatch.setattr(api, "TUNED", tmp_path)
    assert num_chosen(lambda *case: evaluate(*case), *abstract((4096, 2048))) == num


def test_the_shipped_table():
    def num(rows, columns, **form):
        f = functools.partial(evaluate, **form)
        return num_chosen(f, *abstract((rows, columns)))

    assert num(8192, 32768) == 2
    assert num(32768, 4096) == 2
    assert num(1048576, 128) == 1  # the gradient
    assert num(4096, 131072) == 2
    assert num(32768, 4096, **FORMS[3]) == 2


@pytest.mark.parametrize("op", FOLDERS)
@pytest.mark.parametrize(
    ("gpu", "slug", "names"),
    [
        (
            "h200",
            "nvidia-h200",
            ("bound-dtypes", "bound-odd", "bound", "random", "bound-few-instructions"),
        ),
        ("h100", "nvidia-h100-80gb-hbm3", ("random", "bound-few-instructions")),
    ],
)
def test_shipped_tables_are_what_was_measured(gpu, slug, names, op):
    result = read([RESULTS / f"memory-{name}-{gpu}.json" for name in names])
    shipped = tables.load(FOLDERS[op] / f"dispatch-{slug}.json")
    made = table_of(result, op)
    assert set(made.rows) == set(shipped.rows)
    assert dict(made.environment) == dict(shipped.environment)


MEASURED_NOTHING = {
    "device": "NVIDIA H200",
    "clocks": "",
    "command": "",
    "date": "",
    "versions": {},
}


def test_no_table_is_made_of_wrong_results():
    result = {"rows": [{"name": "check rms_norm 8x32", "ok": False, "repeats": True}]}
    with pytest.raises(ValueError, match="check rms_norm 8x32"):
        table_of(result, "norm")
    assert not table_of({**MEASURED_NOTHING, **result}, "norm", skip=["rms_norm 8x32"]).rows


def test_of_several_files_the_last_counts(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ms in zip(files, (1.0, 2.0), strict=True):
        rows = [{"name": f"rms_norm {n} hopper", "ms": ms} for n in ("8x32", file.stem + "x32")]
        file.write_text(json.dumps({**MEASURED_NOTHING, "command": file.stem, "rows": rows}))
    result = read(files)
    assert result["command"] == "a && b"
    assert [row["ms"] for row in result["rows"]] == [2.0, 1.0, 2.0]
    files[0].write_text(json.dumps({**MEASURED_NOTHING, "device": "another", "rows": []}))
    with pytest.raises(ValueError, match="runs differ in device"):
        read(files)


def test_a_table_of_dtypes_and_of_rounded_norms():
    names = (
        "rms_norm_fp8 8x32 hopper",
        "rms_norm_gradient float32 8x32 xla",
        "rms_norm 8x32 5 slots",
    )
    result = {"rows": [{"name": name, "ms": 1.0} for name in names]}
    made = table_of({**MEASURED_NOTHING, **result}, "norm").rows
    assert [
        (dict(row.case)["form"], dict(row.case)["direction"], dict(row.case)["dtype"])
        for row in made
    ] == [("rms_norm_fp8", "forward", "bfloat16"), ("rms_norm", "gradient", "float32")]
