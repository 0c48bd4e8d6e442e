"""Shardings of a quantized weight's arrays: as the weight's, without splitting a scale's group."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfra.axes import Dims
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters, by_path, is_weight
from jaxinfra.ops.quantized import DoubleQuantizedScales, QuantizedWeight
from jaxinfra.parallel.place import Placement, path_name


def quantized_shardings(
    placement: Placement, weight: QuantizedWeight, dims: Dims, *, path: str
) -> QuantizedWeight:
    """Returns shardings of the weight's codes, scales and zero points, as a ``QuantizedWeight``.

    If several dims are merged into rows or columns, the first one's sharding applies. Scales and
    zero points are sharded as the groups that they belong to.

    Args:
        weight: arrays or shapes.
        dims: logical dims of the weight, including leading ones such as layers.
        path: path of the parameter, for error messages.

    Raises:
        ConfigError: a shard would cut a group, or a merged dim other than the first is sharded.
    """
    found = [
        () if placement.copies(dim, size) > 1 else names
        for dim, size, names in zip(
            dims, weight.shape, placement.sharded_axes(dims, None), strict=True
        )
    ]
    num_leading, num_inputs = len(weight.leading), len(weight.inputs)
    leading = found[:num_leading]
    rows = _first(found[num_leading : num_leading + num_inputs], weight.inputs, path)
    columns = _first(found[num_leading + num_inputs :], weight.outputs, path)
    form = weight.format
    _require_whole_groups(placement, weight, rows, columns, path)

    def placed(*names: tuple[str, ...]) -> Any:
        return NamedSharding(
            placement.current_mesh, PartitionSpec(*(each or None for each in (*leading, *names)))
        )

    groups = rows if form.group_rows else ()
    blocks = columns if form.group_columns else ()
    scales: Any = placed(groups, blocks)
    if isinstance(weight.scales, DoubleQuantizedScales):
        # Constants are few, and their blocks are cut anywhere.
        scales = DoubleQuantizedScales(codes=scales, constants=placed(()), mean=placed())
    return dataclasses.replace(
        weight,
        data=placed(rows, columns),
        scales=scales,
        zeros=None if weight.zeros is None else placed(groups, columns),
        order=None if weight.order is None else placed(rows),
    )


def _require_whole_groups(
    placement: Placement,
    weight: QuantizedWeight,
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    path: str,
) -> None:
    """Raises ConfigError where mesh axes of rows or columns would cut a group."""
    form = weight.format
    for what, names, group, size in (
        ("rows", rows, form.group_rows, weight.matrix_shape[0]),
        ("columns", columns, form.group_columns, weight.matrix_shape[1]),
    ):
        shards = math.prod(placement.mesh.shape[name] for name in names)
        # Where all share one scale, every device has it.
        if size % shards or (group > 1 and shards > 1 and (size // shards) % group):
            raise ConfigError(
                f"parameter {path}: {size} {what} in {form.name} over {' x '.join(names)} = "
                f"{shards} devices: {size / shards:g} {what} per device are no whole number of "
                f"groups of {group or 1}; use fewer devices along that axis, or smaller groups"
            )
    if weight.order is not None and rows:
        raise ConfigError(
            f"parameter {path}: its rows are sorted by group (act-order), and devices of "
            f"{' x '.join(rows)} would have rows that belong to others' inputs; set that axis to 1"
        )


def base_shardings(placement: Placement, model: ModelDefinition, shapes: Parameters) -> Parameters:
    """Returns shardings of frozen parameters, some of them quantized.

    Args:
        model: definition of the same parameters before quantization.
        shapes: a ``jax.ShapeDtypeStruct`` per parameter, or a ``QuantizedWeight`` of them.
    """
    dims, plain = by_path(model.dims), placement.parameters(model)

    def place(path: Any, leaf: Any, sharding: NamedSharding) -> Any:
        name = path_name(path)
        if not isinstance(leaf, QuantizedWeight):
            return sharding
        return quantized_shardings(placement, leaf, dims[name].dims, path=name)

    return jax.tree_util.tree_map_with_path(place, shapes, plain, is_leaf=is_weight)


def _first(found: list[tuple[str, ...]], sizes: tuple[int, ...], path: str) -> tuple[str, ...]:
    """The axes of the dim that varies slowest; the others are whole."""
    for names, size in list(zip(found, sizes, strict=True))[1:]:
        if names and size > 1:
            raise ConfigError(
                f"parameter {path} is quantized, and {' x '.join(names)} would divide a dim of "
                f"{size} that is not the first of its rows or columns; set that axis to 1"
            )
    return found[0]
