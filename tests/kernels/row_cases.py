"""Calls and tiles that the tests of softmax, of norms and of rows share."""

import contextlib
import dataclasses
from collections.abc import Callable
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import device
from pallas_kernels.norm import formulas as norms
from pallas_kernels.rows import choice, kernel
from pallas_kernels.rows.config import RowConfig
from pallas_kernels.rows.formula import MASK, Formula, RowCall
from pallas_kernels.softmax import formulas as softmaxes

SHAPES = {
    128: 1048576, 1024: 131072, 2048: 65536, 4096: 32768, 8192: 16384, 32768: 8192, 131072: 4096
}  # fmt: skip
"""Rows by columns, at which the kernels are measured too."""

REFUSALS = [
    ({"shape": (8, 100)}, "100 columns are not a multiple of 32"),
    ({"shape": (6, 96)}, "6 rows of 96 columns are not a multiple of 4 rows"),
    ({"shape": (3, 301)}, "3 rows of 301 columns are no multiple of 8 elements"),
    ({"shape": (2, 524288)}, "of 1 to 262144 columns"),
    ({"shape": (0, 128)}, "there must be rows"),
    ({"dtype": jnp.float8_e4m3fn}, "x is float8_e4m3fn; the kernels take bfloat16, float16 and"),
    ({"num_devices": 2}, "spread over 2 devices and the kernel runs on one"),
    ({"facts": device.Facts(kind="NVIDIA B200", is_gpu=True, capability=(10, 0))}, "NVIDIA B200"),
]

# Of 701 columns, which begin anywhere in a word; what chunks have of neighbors does not count.
ROW_OF_BLOCK = RowConfig(group=2, tile=64, chunks=2, slots=2, interpretable=True)
TILES = {
    "a row of a block": ROW_OF_BLOCK,
    **{
        name: dataclasses.replace(ROW_OF_BLOCK, **change)
        for name, change in {
            "turns": {"turns": 2, "slots": 3},
            "a loop of chunks": {
                "group": 1, "tile": 32, "chunks": 6, "slots": 7, "turns": 2, "vector": 1
            },
            "ahead": {"slots": 5, "turns": 0, "workers": 2, "ahead": True},
            "in memory": {"slots": 3, "turns": 0, "workers": 2, "vector": 2, "in_memory": 1},
            "far shorter": {"group": 4, "tile": 128, "chunks": 1, "turns": 3},
        }.items()
    },
}  # fmt: skip
"""Ways through the kernel that the interpreter knows: it has no clusters."""
WHOLE = RowConfig(rows_per_warp=2, tile=64, slots=2, vector=2, interpretable=True)
WHOLE_TILES = {
    "once": dataclasses.replace(WHOLE, slots=1),
    "turns": dataclasses.replace(WHOLE, turns=2),
    "persistent": dataclasses.replace(WHOLE, turns=0, workers=1),
}
"""Of rows of 64 columns, eight at a time."""


@contextlib.contextmanager
def interpreted_hopper(config: RowConfig | None = None):
    """Chosen for an H200, run by the interpreter, with these tiles if any."""

    def chosen(rows, call):
        c = config or choice.config_for(rows, call)
        return dataclasses.replace(c, interpretable=True)

    with (
        device.compiling_for(device.H200),
        mock.patch.object(kernel, "config_for", chosen),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
    ):
        yield


def formulas(columns: int, dtype=jnp.bfloat16) -> dict[str, tuple[Formula, int, int]]:
    """Every formula by name, and how many inputs (masks among them) and vectors it has."""
    made = {
        "softmax": (softmaxes.forward(log=False, masked=False), 1, 0),
        "log_softmax": (softmaxes.forward(log=True, masked=False), 1, 0),
        "logsumexp": (softmaxes.logsumexp(), 1, 0),
        "masked_softmax": (softmaxes.forward(log=False, masked=True), 2, 0),
        "softmax_gradient": (softmaxes.gradient(), 2, 0),
        "log_softmax_gradient": (softmaxes.log_gradient(), 2, 0),
    }
    for name, layer in (("rms_norm", False), ("layer_norm", True)):
        for residual in (False, True):
            norm = norms.NormForm(
                columns=columns, epsilon=1e-6, centered=layer, biased=layer, residual=residual,
                dtype=jnp.dtype(dtype),
            )  # fmt: skip
            form = name + "+residual" * residual
            made[form] = norms.forward(norm), 1 + residual, 1 + layer
            made[form + "_gradient"] = norms.backward(norm), 2 + residual, 1
    return made


def operands(name: str, rows: int, columns: int, dtype=jnp.bfloat16) -> tuple[list, list]:
    """Shapes of a formula's inputs and vectors."""
    _, num_inputs, num_vectors = formulas(columns, dtype)[name]
    x = jax.ShapeDtypeStruct((rows, columns), dtype)
    inputs = [x] * num_inputs
    if name == "masked_softmax":
        inputs = [x, x.update(dtype=MASK)]
    return inputs, [jax.ShapeDtypeStruct((columns,), jnp.float32)] * num_vectors


def call(name: str, columns: int, dtype=jnp.bfloat16) -> RowCall:
    """A formula's call."""
    return RowCall.of(formulas(columns, dtype)[name][0], *operands(name, 8, columns, dtype))


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
