"""Whether one kernel was measured to be faster than one after another, and with which tiles."""

import functools
import math
import pathlib

from pallas_kernels.common import device, tables
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.choice import tiles_or_slices_of
from pallas_kernels.quantized_matmul.config import QuantizedConfig
from pallas_kernels.quantized_matmul.sliced_config import SlicedConfig

from . import quantized
from .config import FusedConfig
from .reference import FusedCall

OP = "fused_matmul"
DISPATCH, FEW_BITS = "dispatch", "few-bits"
TUNED = pathlib.Path(__file__).parent / "tuned"
LEAST_GAIN = 1.03
"""How much faster than one after another a kernel must have been measured for "auto" to take it."""
_FARTHEST = {"depth": 0.5, "columns": 0.5}
"""Powers of two from the nearest measured size within which its measurement is trusted."""

type Fields = dict[str, tables.Value]


def question_of(call: FusedCall) -> str:
    """Which table speaks of a call: of 16-bit weights, or of those in few bits."""
    return FEW_BITS if isinstance(call.weight, QuantizedWeight) else DISPATCH


def case_of(call: FusedCall) -> Fields:
    """A call as tables have it: rows do not matter, as all take the time of the weight."""
    case: Fields = {
        "depth": call.K,
        "columns": call.N,
        "norm": call.norm is not None,
        "swiglu": call.swiglu,
        "swiglu_input": call.swiglu_input,
        "residual": call.residual is not None,
    }
    if isinstance(call.weight, QuantizedWeight):
        case["weight"] = call.weight.format.name
    return case


def measured_config(call: FusedCall) -> FusedConfig | None:
    """The tiles of a 16-bit weight, where they were faster at the nearest size."""
    for tiles in _faster_than_apart(call):
        config = FusedConfig(**{name: tables.count(value) for name, value in tiles.items()})
        if config.unsupported(call.N, call.K, swiglu=call.swiglu) is None:
            return config
    return None


def measured_in_few_bits(call: FusedCall) -> QuantizedConfig | SlicedConfig | None:
    """The tiles of a weight in few bits, where they were faster at the nearest size."""
    for tiles in _faster_than_apart(call):
        config = tiles_or_slices_of(tiles)
        if quantized.unsupported_tiles(call, config) is None:
            return config
    return None


def _faster_than_apart(call: FusedCall) -> list[Fields]:
    case = tuple(sorted(case_of(call).items()))
    return _faster(question_of(call), case, device.target().slug, str(tables.user_folder()))


@functools.cache
def _faster(
    question: str, case: tuple[tuple[str, tables.Value], ...], slug: str, folder: str
) -> list[Fields]:
    """Choices of tiles that were measured to be faster at the nearest size, the fastest first."""
    del slug, folder  # what the table depends on
    table = tables.find(TUNED, OP, question)
    if table is None:
        return []
    wanted = dict(case)
    sizes = {name: tables.count(wanted[name]) for name in _FARTHEST}
    same = {name: value for name, value in wanted.items() if name not in sizes}
    apart_ms, times = math.inf, []
    for row in tables.nearest(table, same, sizes, _FARTHEST):
        choice = dict(row.choice)
        if choice.pop("implementation") == "apart":
            apart_ms = row.ms
        else:
            times.append((row.ms, choice))
    if apart_ms == math.inf:
        return []
    times.sort(key=lambda each: each[0])
    return [choice for ms, choice in times if apart_ms >= LEAST_GAIN * ms]
