"""Who computes a call, as measured: the compiler, or the kernel with which tiles."""

import functools
import pathlib
from typing import Any

from pallas_kernels.common import device, tables

from .config import ProductShape, QuantizedConfig, config_for
from .sliced_config import SlicedConfig
from .weight import QuantizedWeight

OP, QUESTION = "quantized_matmul", "tiles"
TUNED = pathlib.Path(__file__).parent / "tuned"
MOST_ROWS_MEASURED = 64
"""Beyond these rows the kernel reads and converts the weight again, which no GPU has timed; there
the weight is dequantized once, by a kernel, and a library multiplies."""
_TILES = ("tiles", "split", "groups", "stages")
_SLICES = ("fragments", "passes", "groups", "stages")
_FARTHEST = {"rows": 1.0, "depth": 1.0, "columns": 1.0}
"""Powers of two from the nearest measured size within which its tiles are taken."""


def measured_config(shape: ProductShape) -> QuantizedConfig | None:
    """Tiles of the nearest measured size, or the default ones; None on a device without a table.

    A table speaks for the device: sizes and formats far from its rows have the default tiles.
    """
    return _measured(shape, device.target().slug, str(tables.user_folder()))


def takes_kernel(weight: QuantizedWeight) -> bool:
    """Whether a weight is better arranged on this device: one that has a table, of any format."""
    return measured_config(ProductShape.of(1, weight)) is not None


@functools.cache
def _measured(shape: ProductShape, slug: str, folder: str) -> QuantizedConfig | None:
    del slug, folder  # what the table depends on
    table = tables.find(TUNED, OP, QUESTION)
    if table is None:
        return None
    wanted = {"rows": shape.M, "depth": shape.K, "columns": shape.N}
    found: list[tuple[float, float, QuantizedConfig]] = []
    for row in table.rows:
        case = dict(row.case)
        if case["bits"] != shape.bits:
            continue
        apart = tables.octaves_apart(case, wanted)
        if all(apart[name] <= _FARTHEST[name] for name in apart):
            found.append((sum(apart.values()), row.ms, tiles_of(dict(row.choice))))
    for _, _, config in sorted(found, key=lambda each: each[:2]):
        if config.unsupported(shape) is None:
            return config
    return config_for(shape)


def tiles_of(choice: dict[str, tables.Value]) -> QuantizedConfig:
    """A table's choice of tiles."""
    return QuantizedConfig(**_counts(choice, _TILES))


def tiles_or_slices_of(choice: dict[str, tables.Value]) -> QuantizedConfig | SlicedConfig:
    """A table's choice of tiles; with ``fragments``, of the kernel that splits K over warps."""
    return SlicedConfig(**_counts(choice, _SLICES)) if "fragments" in choice else tiles_of(choice)


def choice_of(config: QuantizedConfig | SlicedConfig) -> dict[str, tables.Value]:
    """What a table keeps of tiles."""
    names = _SLICES if isinstance(config, SlicedConfig) else _TILES
    return {name: getattr(config, name) for name in names}


def _counts(choice: dict[str, tables.Value], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: tables.count(choice[name]) for name in names}
