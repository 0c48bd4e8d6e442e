"""Whether one kernel was measured to be faster than one after another, and with which tiles."""

import functools
import math
import pathlib

from pallas_kernels.common import device, tables

from .config import FusedConfig
from .reference import FusedCall

OP, QUESTION = "fused_matmul", "dispatch"
TUNED = pathlib.Path(__file__).parent / "tuned"
LEAST_GAIN = 1.03
"""How much faster than one after another a kernel must have been measured for "auto" to take it."""
_FARTHEST = {"depth": 0.5, "columns": 0.5}
"""Powers of two from the nearest measured size within which its measurement is trusted."""


def case_of(call: FusedCall) -> dict[str, tables.Value]:
    """A call as tables have it: rows do not matter, as all take the time of the weight."""
    return {
        "depth": call.K,
        "columns": call.N,
        "norm": call.norm is not None,
        "swiglu": call.swiglu,
        "swiglu_input": call.swiglu_input,
        "residual": call.residual is not None,
    }


def measured_config(call: FusedCall) -> FusedConfig | None:
    """The kernel's tiles, where it was faster at the nearest size."""
    case = tuple(sorted(case_of(call).items()))
    return _measured(case, device.target().slug, str(tables.user_folder()))


@functools.cache
def _measured(
    case: tuple[tuple[str, tables.Value], ...], slug: str, folder: str
) -> FusedConfig | None:
    del slug, folder  # what the table depends on
    table = tables.find(TUNED, OP, QUESTION)
    if table is None:
        return None
    wanted = dict(case)
    sizes = {name: tables.count(wanted[name]) for name in _FARTHEST}
    same = {name: value for name, value in wanted.items() if name not in sizes}
    apart_ms, times = math.inf, {}
    for row in tables.nearest(table, same, sizes, _FARTHEST):
        choice = dict(row.choice)
        if choice.pop("implementation") == "apart":
            apart_ms = row.ms
        else:
            tiles = {name: tables.count(value) for name, value in choice.items()}
            times[FusedConfig(**tiles)] = row.ms
    swiglu = wanted["swiglu"] is True
    for config in sorted(times, key=lambda config: times[config]):
        if apart_ms == math.inf or apart_ms < LEAST_GAIN * times[config]:
            return None
        if config.unsupported(sizes["columns"], sizes["depth"], swiglu=swiglu) is None:
            return config
    return None
