"""Choice of a kernel and its tile sizes for a product of few rows, from measurements.

Measurements are in one table, ``tuned/dispatch-DEVICE.json``. A case has

- ``weight``: "16 bits"; of a quantized weight its format's name for a fused kernel, "4 bits" or "8
  bits" for the product alone;
- ``rows``, ``depth`` and ``columns`` of the product;
- ``fused``: the other operations of the call, as ``FewRowsCall.fused`` names them.

A choice has ``implementation``: "fused" or "hopper", with the kernel's tile sizes, or a baseline.
The baseline of "fused" is "apart": separate operations before and after the product. That of
"hopper" with a 16-bit weight is "xla".

Dims: as in ``config``.
"""

import functools
import math
import pathlib
from collections.abc import Callable, Iterable

from pallas_kernels.common import device, tables
from pallas_kernels.quantized_weight import QuantizedWeight

from .config import (
    MOST_ROWS_AT_A_TIME,
    FusedConfig,
    ProductShape,
    QuantizedConfig,
    SkinnyConfig,
    default_quantized,
    default_skinny,
)
from .reference import FewRowsCall

QUESTION = "dispatch"
TUNED = pathlib.Path(__file__).parent / "tuned"
LEAST_GAIN = 1.03
"""Least measured speedup of a kernel over separate operations, or over XLA."""
MOST_ROWS_MEASURED = MOST_ROWS_AT_A_TIME
"""Most rows that the quantized kernel multiplies in one pass. For more, which were not timed, a
kernel dequantizes the weight once, and a library multiplies."""
_NEAR = {"depth": 0.5, "columns": 0.5}
_WITHIN = {"rows": 1.0, "depth": 1.0, "columns": 1.0}
"""Largest ``|log2(ratio)|`` of a size to a measured one at which the measurement counts: ``_NEAR``
for fused kernels, whose time does not depend on rows, ``_WITHIN`` for the product alone."""

type KernelConfig = FusedConfig | SkinnyConfig | QuantizedConfig
type Fields = dict[str, tables.Value]


def weight_name(call: FewRowsCall) -> str:
    """Returns the name of the weight's format in the tuning table of fused kernels."""
    weight = call.weight
    return weight.format.name if isinstance(weight, QuantizedWeight) else _bits(16)


def fused_config(call: FewRowsCall) -> FusedConfig | QuantizedConfig | None:
    """Returns the fused kernel's tiles if it was faster at the nearest measured size, else None."""
    if call.is_plain:
        return None
    faster = _fused(call.shape, weight_name(call), call.fused, device.target().slug)
    return next((config for config in faster if fuses(call, config) is None), None)


def fuses(call: FewRowsCall, config: KernelConfig | None) -> str | None:
    """Returns why these tiles cannot fuse the norm, SwiGLU or residual; None if they can.

    A quantized kernel fuses only if all rows of x fit in shared memory, and the weight's rows are
    in order.
    """
    s, weight = call.shape, call.weight
    if isinstance(weight, QuantizedWeight):
        is_resident = isinstance(config, QuantizedConfig) and config.is_resident(s)
        if not is_resident or weight.order is not None:
            return f"{s.M} rows do not stay in shared memory in their order"
    return "no tile fits" if config is None else config.unsupported(s)


def product_config(s: ProductShape) -> SkinnyConfig | QuantizedConfig | None:
    """Returns tiles for the product alone; None where XLA was as fast or nothing was measured.

    A quantized weight of a size or format far from all measured ones gets the default tiles.
    """
    return (_skinny if s.bits == 16 else _quantized)(s, device.target().slug)


def unsplit_config(s: ProductShape) -> SkinnyConfig | None:
    """Returns the fastest measured tiles of a 16-bit product that do not cut K, else default ones.

    The order of a row's sums is then that of K, whichever the tiles.
    """
    same: Fields = {"weight": _bits(16), "fused": ""}
    sizes = {"rows": s.padded_rows, "depth": s.K, "columns": s.N}
    rows = [row for _, case in _nearest_first(same, sizes, _WITHIN)[:1] for row in case]
    whole = (config for config, _ in _timed(SkinnyConfig, rows, "hopper") if config.splits == 1)
    fitting = (config for config in whole if config.unsupported(s) is None)
    return next(fitting, default_skinny(s))


def takes_kernel(weight: QuantizedWeight) -> bool:
    """Returns whether to rearrange a weight for the kernel: if it was measured on this device."""
    return product_config(ProductShape.of(1, weight)) is not None


def _bits(bits: int) -> str:
    return f"{bits} bits"


@functools.cache
def _fused(
    s: ProductShape, weight: str, fused: str, slug: str
) -> list[FusedConfig | QuantizedConfig]:
    """Tiles that were measured to be faster at the nearest size, the fastest first."""
    del slug
    kind = FusedConfig if s.bits == 16 else QuantizedConfig
    same: Fields = {"weight": weight, "fused": fused}
    sizes = {"depth": s.K, "columns": s.N}
    rows = [row for _, case in _nearest_first(same, sizes, _NEAR)[:1] for row in case]
    apart_ms = _least_ms(rows, "apart")
    return [config for config, ms in _timed(kind, rows, "fused") if apart_ms >= LEAST_GAIN * ms]


@functools.cache
def _skinny(s: ProductShape, slug: str) -> SkinnyConfig | None:
    del slug
    same: Fields = {"weight": _bits(16), "fused": "swiglu" if s.swiglu else ""}
    sizes = {"rows": s.padded_rows, "depth": s.K, "columns": s.N}
    rows = [row for _, case in _nearest_first(same, sizes, _WITHIN)[:1] for row in case]
    timed = _timed(SkinnyConfig, rows, "hopper")
    for config, ms in timed:
        if _least_ms(rows, "xla") < LEAST_GAIN * ms:
            return None
        if config.unsupported(s) is None:
            return config
    return default_skinny(s) if timed else None


@functools.cache
def _quantized(s: ProductShape, slug: str) -> QuantizedConfig | None:
    del slug
    sizes = {"rows": s.M, "depth": s.K, "columns": s.N}
    plain: Fields = {"fused": ""}
    if not any(_nearest_first({"weight": _bits(bits)} | plain, {}, {}) for bits in (4, 8)):
        return None
    found = [
        (octaves, ms, config)
        for octaves, rows in _nearest_first({"weight": _bits(s.bits)} | plain, sizes, _WITHIN)
        for config, ms in _timed(QuantizedConfig, rows, "hopper")
    ]
    in_order = (config for _, _, config in sorted(found, key=lambda each: each[:2]))
    fitting = (config for config in in_order if config.unsupported(s) is None)
    return next(fitting, default_quantized(s))


def _nearest_first(
    same: Fields, sizes: dict[str, int], farthest: dict[str, float]
) -> list[tuple[float, list[tables.Row]]]:
    """Rows of the measured cases that are near enough, as ``tables.by_nearness``."""
    return tables.by_nearness(tables.find(TUNED, QUESTION), same, sizes, farthest)


def _timed[C](
    kind: Callable[..., C], rows: Iterable[tables.Row], kernel: str
) -> list[tuple[C, float]]:
    """Tiles of a kernel with their times, the fastest first."""
    found = []
    for row in rows:
        choice = dict(row.choice)
        if choice.pop("implementation") == kernel:
            found.append((kind(**choice), row.ms))
    return sorted(found, key=lambda each: each[1])


def _least_ms(rows: Iterable[tables.Row], implementation: str) -> float:
    """The time of another way to compute a case; minus infinity where it was not measured."""
    times = (row.ms for row in rows if dict(row.choice)["implementation"] == implementation)
    return min(times, default=-math.inf)
