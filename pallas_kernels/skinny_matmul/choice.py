"""Who computes a call, as measured: the compiler, or the kernel with which tiles."""

import dataclasses
import functools
import math
import pathlib

from pallas_kernels.common import device, tables

from .config import SkinnyConfig, config_for

OP, QUESTION = "skinny_matmul", "dispatch"
TUNED = pathlib.Path(__file__).parent / "tuned"
LEAST_GAIN = 1.03
"""How much faster than XLA a kernel must have been measured for "auto" to take it."""
_FARTHEST = {"rows": 1.0, "depth": 1.0, "columns": 1.0}
"""Powers of two from the nearest measured size within which its measurement is trusted."""


def measured_config(M: int, N: int, K: int, *, swiglu: bool) -> SkinnyConfig | None:
    """The kernel's tiles for a call of the kernel's, where it was faster at the nearest size."""
    return _measured(M, N, K, swiglu, device.target().slug, str(tables.user_folder()))


@functools.cache
def _measured(M: int, N: int, K: int, swiglu: bool, slug: str, folder: str) -> SkinnyConfig | None:
    del slug, folder  # what the table depends on
    table = tables.find(TUNED, OP, QUESTION)
    if table is None:
        return None
    sizes = {"rows": M, "depth": K, "columns": N}
    compiler_ms, times = math.inf, {}
    for row in tables.nearest(table, {"swiglu": swiglu}, sizes, _FARTHEST):
        choice = dict(row.choice)
        if choice.pop("implementation") == "xla":
            compiler_ms = row.ms
        else:
            transposed = choice.pop("transposed", False) is True
            tiles = {name: tables.count(value) for name, value in choice.items()}
            times[SkinnyConfig(**tiles, transposed=transposed)] = row.ms
    for config in sorted(times, key=lambda config: times[config]):
        if compiler_ms == math.inf or compiler_ms < LEAST_GAIN * times[config]:
            return None
        for each in (config, dataclasses.replace(config, cluster=1)):
            if each.unsupported(M, N, K, swiglu=swiglu) is None:
                return each
    return config_for(M, N, K, swiglu=swiglu) if times else None
