"""Who computes a call, as measured: the compiler, or the kernel with which tiles."""

import functools
import math
import pathlib

from pallas_kernels.common import device, tables

from .config import ProductShape, QuantizedConfig, config_for
from .weight import QuantizedWeight

OP, QUESTION = "quantized_matmul", "dispatch"
TUNED = pathlib.Path(__file__).parent / "tuned"
LEAST_GAIN = 1.03
"""How much faster than XLA a kernel must have been measured for "auto" to take it."""
_FARTHEST = {"rows": 1.0, "depth": 1.0, "columns": 1.0}
"""Powers of two from the nearest measured size within which its measurement is trusted."""


def measured_config(shape: ProductShape) -> QuantizedConfig | None:
    """The kernel's tiles for a call of the kernel's, where it was faster at the nearest size."""
    return _measured(shape, device.target().slug, str(tables.user_folder()))


def takes_kernel(weight: QuantizedWeight) -> bool:
    """Whether on this device the kernel was measured to be faster with a row than XLA: if so, a
    weight is better arranged, and many rows have it dequantized by a kernel too.
    """
    if weight.format.activations is not None:
        return device.target().capability == (9, 0)
    return measured_config(ProductShape.of(1, weight)) is not None


@functools.cache
def _measured(shape: ProductShape, slug: str, folder: str) -> QuantizedConfig | None:
    del slug, folder  # what the table depends on
    table = tables.find(TUNED, OP, QUESTION)
    if table is None:
        return None
    wanted = {"rows": shape.M, "depth": shape.K, "columns": shape.N}
    found: dict[tuple, list[tables.Row]] = {}
    for row in table.rows:
        case = dict(row.case)
        if case["bits"] != shape.bits:
            continue
        apart = {name: abs(math.log2(size / _count(case[name]))) for name, size in wanted.items()}
        if all(apart[name] <= _FARTHEST[name] for name in apart):
            found.setdefault((sum(apart.values()), row.case), []).append(row)
    if not found:
        return None
    compiler_ms, times = math.inf, {}
    for row in found[min(found)]:
        choice = dict(row.choice)
        if choice.pop("implementation") == "xla":
            compiler_ms = row.ms
        else:
            config = QuantizedConfig(**{name: _count(value) for name, value in choice.items()})
            times[config] = row.ms
    if not times or compiler_ms < LEAST_GAIN * min(times.values()) or compiler_ms == math.inf:
        return None
    for config in sorted(times, key=lambda config: times[config]):
        if config.unsupported(shape) is None:
            return config
    return config_for(shape)


def _count(value: tables.Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise tables.TableError(f"a measured case or choice has {value!r} for a size")
    return value
