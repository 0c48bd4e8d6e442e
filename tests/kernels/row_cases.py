"""What the tests of softmax and of norms share."""

import contextlib
from collections.abc import Callable

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import device, tables
from pallas_kernels.rows import dispatch

REFUSALS = [
    ({"shape": (8, 100)}, "100 columns are not a multiple of 32"),
    ({"shape": (6, 96)}, "6 rows of 96 columns are not a multiple of 4 rows"),
    ({"shape": (2, 524288)}, "of 1 to 262144 columns"),
    ({"shape": (0, 128)}, "there must be rows"),
    ({"dtype": jnp.float8_e4m3fn}, "x is float8_e4m3fn; the kernels take bfloat16, float16 and"),
    ({"num_devices": 2}, "spread over 2 devices and the kernel runs on one"),
    ({"facts": device.Facts(kind="NVIDIA B200", is_gpu=True, capability=(10, 0))}, "NVIDIA B200"),
]


@contextlib.contextmanager
def interpreted_hopper():
    """Chosen for an H200, run by the interpreter."""
    parameters = plgpu.InterpretGPUParams()
    with device.compiling_for(device.H200), plgpu.force_gpu_interpret_mode(parameters):
        yield


def wide(x: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def num_kernels(f: Callable, *args) -> int:
    """Kernels in the program that ``f`` becomes for an H200."""
    with device.compiling_for(device.H200):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu")


def num_chosen(f: Callable, *args) -> int:
    """Kernels that ``f`` is traced to for an H200; lowering each takes a second."""
    with device.compiling_for(device.H200):
        return _num_kernels(jax.make_jaxpr(f)(*args).jaxpr)


def _num_kernels(jaxpr: jax.extend.core.Jaxpr) -> int:
    inner = (
        _num_kernels(part)
        for equation in jaxpr.eqns
        for part in jax.extend.core.jaxprs_in_params(equation.params)
    )
    return sum(inner) + sum(equation.primitive.name == "mpmd_map" for equation in jaxpr.eqns)


def table(
    op: str, form: str, ms: dict[str, tuple[float, float]], shape=(4096, 2048)
) -> tables.Table:
    """(hopper, xla) times of each direction of one form at one shape."""
    measured = [
        tables.Row.of(
            case={
                "form": form,
                "direction": direction,
                "rows": shape[0],
                "columns": shape[1],
                "dtype": "bfloat16",
            },
            choice={"implementation": name},
            ms=time,
        )
        for direction, times in ms.items()
        for name, time in zip(("hopper", "xla"), times, strict=True)
    ]
    return tables.Table(
        op=op, question=dispatch.QUESTION, device_kind="NVIDIA H200", environment=(),
        rows=tuple(measured),
    )  # fmt: skip
