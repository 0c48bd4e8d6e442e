"""RMSNorm against float64; the kernels in the interpreter, their real form lowered for CUDA.

Rows of one block run here, as in ``test_softmax``.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.memory_table import FOLDERS, table_of
from pallas_kernels import InputError, UnsupportedError, rms_norm
from pallas_kernels.common import device, hopper_wide, tables
from pallas_kernels.norm import api, hopper
from pallas_kernels.norm.workloads import EPSILON, WORKLOADS, Workload, arrays
from tests.kernels.row_cases import REFUSALS, interpreted_hopper, num_kernels, table, wide
from tests.tolerance import assert_no_worse

RESULTS = pathlib.Path(__file__).parents[2] / "experiments" / "results"


def inputs(shape):
    made = arrays(Workload(rows=shape[0], columns=shape[1]), jax.random.key(1))
    return made["x"], made["scale"], made["d_y"]


def evaluate(x, scale, d_y, *, epsilon=EPSILON, **options):
    f = jax.jit(functools.partial(rms_norm, epsilon=epsilon, **options))
    y, vjp = jax.vjp(f, x, scale)
    return y, *vjp(d_y)


def exact(x, scale, d_y, *, epsilon=EPSILON):
    x, scale, d_y = wide(x), wide(scale), wide(d_y)
    unit = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    root = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    slope = (scale * d_y * unit).mean(axis=-1, keepdims=True)
    return unit * scale, root * (scale * d_y - unit * slope), (d_y * unit).sum(axis=0)


@pytest.mark.parametrize(
    ("shape", "epsilon"),
    [((8, 32), EPSILON), ((3, 2048), EPSILON), ((2, 8192), 2.0)],
    ids=str,
)
def test_kernels_are_no_worse_than_the_plain_form(shape, epsilon):
    case = inputs(shape)
    with interpreted_hopper():
        got = evaluate(*case, epsilon=epsilon, implementation="hopper")
    plain = evaluate(*case, epsilon=epsilon, implementation="reference")
    assert_no_worse(got, plain=plain, oracle=exact(*case, epsilon=epsilon))


def test_wide_rows_are_no_worse_than_the_plain_form(monkeypatch):
    monkeypatch.setattr(hopper_wide.Config, "num_clusters", 2)
    monkeypatch.setattr(hopper_wide, "TILE", 64)
    monkeypatch.setattr(hopper_wide, "PIECE", 1024)
    config = hopper_wide.Config(tiles=1, chunks=2, slots=3)
    case = x, scale, d_y = inputs((5, 2048))
    with interpreted_hopper():
        y = hopper.rms_norm(x, scale, epsilon=EPSILON, config=config)
        gradients = hopper.rms_norm_gradient(x, scale, d_y, epsilon=EPSILON, config=config)
    plain = evaluate(*case, implementation="reference")
    assert_no_worse((y, *gradients), plain=plain, oracle=exact(*case))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_xla_form_is_no_worse_than_the_plain_form(dtype):
    x, scale, d_y = inputs((5, 77))
    case = x.astype(dtype), scale, d_y.astype(dtype)
    got = evaluate(*case, implementation="xla")
    plain = evaluate(*case, implementation="reference")
    assert_no_worse(got, plain=plain, oracle=exact(*case))


def test_scale_in_bf16_vmap_and_leading_dims():
    x, scale, d_y = inputs((8, 64))
    scale = scale.astype(jnp.bfloat16)
    x, d_y = (a.reshape(2, 4, 64) for a in (x, d_y))
    f = functools.partial(evaluate, implementation="hopper")
    with interpreted_hopper():
        y, d_x, d_scale = f(x, scale, d_y)
        mapped = jax.vmap(f, in_axes=(0, None, 0))(x, scale, d_y)
    assert d_scale.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y), np.asarray(mapped[0]))
    np.testing.assert_array_equal(np.asarray(d_x), np.asarray(mapped[1]))
    plain = evaluate(x, scale, d_y, implementation="reference")
    rows = [a.reshape(8, 64) for a in (x, d_y)]
    oracle = exact(rows[0], scale, rows[1])
    assert_no_worse(d_scale, plain=plain[2], oracle=oracle[2])


def abstract(shape, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return x, jax.ShapeDtypeStruct(shape[-1:], jnp.float32), x


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_lowers(workload):
    f = functools.partial(evaluate, implementation="hopper")
    assert num_kernels(f, *abstract((workload.rows, workload.columns))) == 2


@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=str)
def test_refuses(change, words):
    shape, dtype = change.get("shape", (8, 128)), change.get("dtype", jnp.bfloat16)
    x, scale, _ = abstract(shape, dtype)
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
        ({"forward": (1.0, 1.1), "gradient": (1.0, 1.2)}, 1),
        ({"forward": (1.0, 1.2), "gradient": (1.0, 1.2)}, 2),
        ({"forward": (1.0, 1.1), "gradient": (1.3, 1.2)}, 0),
    ],
    ids=["gradient", "both", "neither"],
)
def test_auto_follows_the_table(monkeypatch, tmp_path, ms, num):
    tables.save(table("rms_norm", ms), tmp_path / "dispatch-nvidia-h200.json")
    monkeypatch.setattr(api, "TUNED", tmp_path)
    assert num_kernels(lambda *case: evaluate(*case), *abstract((4096, 2048))) == num


def test_the_shipped_table():
    def num(rows, columns):
        return num_kernels(lambda *case: evaluate(*case), *abstract((rows, columns)))

    assert num(8192, 32768) == 1  # the forward
    assert num(32768, 4096) == 1  # the gradient
    assert num(4096, 131072) == 0


@pytest.mark.parametrize("op", FOLDERS)
def test_shipped_tables_are_what_was_measured(op):
    """But for softmax's forward, which has changed since."""
    result = json.loads((RESULTS / "memory-bound-h200.json").read_text())
    shipped = tables.load(FOLDERS[op] / "dispatch-nvidia-h200.json")
    made = table_of(result, op, skip=("softmax",))
    assert set(made.rows) == set(shipped.rows)
    assert dict(made.environment) == dict(shipped.environment)


def test_no_table_is_made_of_wrong_results():
    result = {"rows": [{"name": "check rms_norm 8x32", "ok": False, "repeats": True}]}
    with pytest.raises(ValueError, match="check rms_norm 8x32"):
        table_of(result, "rms_norm")
