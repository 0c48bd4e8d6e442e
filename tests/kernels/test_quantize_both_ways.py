"""Casts of a matrix and its transpose in one kernel, without a GPU: in the interpreter, lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from experiments.bench.tuned_table import Table, save
from pallas_kernels import InputError, UnsupportedError, quantize_swiglu
from pallas_kernels.common import device, tables
from pallas_kernels.fp8 import both_ways
from tests.kernels.both_ways_cases import (
    CALLS,
    NUM_INPUTS,
    cast,
    check_beside_float64,
    check_beside_xla,
    matrices,
)
from tests.kernels.row_cases import num_kernels

E5M2 = jnp.float8_e5m2
CASE = "gradient", "128x128", False
OTHERS = [  # slow: parts of what the first does, or its other scales
    ("x", "1x128", True),
    ("x", "128x128", False),
    ("swiglu", "1x128", False),
    ("swiglu", "128x128", False),
    ("gradient", "1x128", True),
]


def interpreted(name, form, inputs, **options):
    parameters = plgpu.InterpretGPUParams()
    with device.compiling_for(device.H200), plgpu.force_gpu_interpret_mode(parameters):
        return cast(name, form, inputs, implementation="hopper", **options)


@pytest.mark.parametrize(
    ("name", "form", "power_of_two"),
    [CASE, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_the_kernel_casts_as_steps_apart_do(name, form, power_of_two):
    inputs = matrices(128, 128 if name == "gradient" else 256, specials=True)
    options = {"power_of_two": power_of_two, "dtype": E5M2 if name == "gradient" else None}
    options = {key: value for key, value in options.items() if value is not None}
    got = interpreted(name, form, inputs, **options)
    check_beside_xla(name, got, cast(name, form, inputs, implementation="xla", **options))


@pytest.mark.parametrize(("name", "form"), [("swiglu", "128x128"), ("x", "1x128")])
def test_values_are_those_of_float64(name, form):
    inputs = matrices(256, 256)
    check_beside_float64(name, form, cast(name, form, inputs, implementation="xla"), inputs)


def test_a_wrong_slope_is_caught():
    """Of the gradient without the sigmoid's own derivative."""
    inputs = matrices(128, 128)
    gate, up, cotangent = (x.astype(np.float32) for x in inputs)
    wrong = (cotangent * up / (1.0 + np.exp(-gate))).astype(jnp.bfloat16)
    ((of_gate, of_up),) = [cast("gradient", "1x128", inputs, implementation="xla")]
    (forged,) = cast("x", "1x128", [wrong], implementation="xla")
    check_beside_float64("gradient", "1x128", [of_gate, of_up], inputs)
    with pytest.raises(AssertionError, match="spread"):
        check_beside_float64("gradient", "1x128", [forged, of_up], inputs)


@pytest.mark.slow  # lowering takes two seconds
@pytest.mark.parametrize("name", list(CALLS))
def test_kernels_lower_for_a_gpu(name):
    f = functools.partial(CALLS[name], scaling="1x128", dtype=E5M2, implementation="hopper")
    x = jax.ShapeDtypeStruct((384, 640), jnp.bfloat16)
    assert num_kernels(f, *[x] * NUM_INPUTS[name]) == 1


def test_auto_takes_the_kernel_where_it_was_measured_to_be_faster(monkeypatch, tmp_path):
    x = jax.ShapeDtypeStruct((16384, 14336), jnp.bfloat16)
    monkeypatch.setattr(both_ways, "TUNED", tmp_path)

    def takes(form):
        with device.compiling_for(device.H200):
            return both_ways.takes_one_kernel(both_ways.SWIGLU, (x, x), form, power_of_two=False)

    case = {"form": "swiglu", "scaling": "1x128", "rows": 8192, "columns": 14336}
    rows = [
        tables.Row.of(case=case, choice={"implementation": name}, ms=ms)
        for name, ms in (("hopper", 1.0), ("apart", 1.2))
    ]
    assert not takes("1x128")
    table = Table(
        op="quantize", question=both_ways.QUESTION, device_kind="NVIDIA H200",
        environment={}, rows=tuple(rows),
    )  # fmt: skip
    save(table, tmp_path / "both-ways-nvidia-h200.json")
    tables.read.cache_clear()
    assert takes("1x128")
    assert not takes("128x128")


def test_refusals():
    x = np.zeros((128, 256), jnp.bfloat16)
    for arguments, options, error, message in [
        ((x, x[:64]), {}, InputError, r"has bfloat16\[128, 256\] and bfloat16\[64, 256\]"),
        ((x, x, "row"), {}, InputError, "scaling='row' must be one of 1x128, 128x128"),
        ((x[:, :200],) * 2, {}, UnsupportedError, "C=200 is not a multiple of 128.*'xla' can"),
        ((x, x), {"num_devices": 2}, UnsupportedError, "spread over 2 devices"),
    ]:
        with device.compiling_for(device.H200), pytest.raises(error, match=message):
            quantize_swiglu(*arguments, implementation="hopper", **options)
    with pytest.raises(UnsupportedError, match="passes the cotangent through"):
        jax.grad(lambda x: quantize_swiglu(x, x)[0].scale.sum())(x.astype(np.float32))
