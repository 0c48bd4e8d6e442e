"""Reading of parameters onto a mesh: each device its shard, quantized if asked for."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinfra.checkpoint.finite import require_finite, require_finite_piece
from jaxinfra.checkpoint.parameter_sources import ParameterSource
from jaxinfra.config.finetune import BaseWeights
from jaxinfra.hf import by_path
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.model.definition import (
    ModelDefinition,
    ParameterInfo,
    Parameters,
    is_weight,
    merged,
    nest,
    only,
)
from jaxinfra.model.quantized_base import quantized_weight, rounded_weight, rounds_scales
from jaxinfra.ops.quantized import QuantizedWeight, double_quantized
from jaxinfra.parallel.place import path_name

_PIECE_BYTES = 256 * 2**20  # of a stacked parameter that are on the host at a time
_NUM_READERS = 8  # parameters that are read at the same time


def place_parameters(
    source: ParameterSource,
    definition: ModelDefinition,
    shardings: Parameters,
    *,
    piece_bytes: int = _PIECE_BYTES,
) -> Parameters:
    """Reads parameters and state in the definition's dtypes, each device its shard only.

    Args:
        shardings: shardings of the arrays to read, a part of the structure of
            ``definition.arrays``.
        piece_bytes: most bytes of a stacked parameter on the host at a time, or one layer.

    Raises:
        CheckpointError: a parameter is not finite.
    """

    def place(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        name = path_name(path)
        stacked = name.startswith("blocks/")
        return _place(source, name, leaf, sharding, stacked=stacked, piece_bytes=piece_bytes)

    # Processes of one mesh have to call the same programs in the same order.
    num_threads = _NUM_READERS if jax.process_count() == 1 else 1
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        coming = jax.tree_util.tree_map_with_path(
            lambda *each: pool.submit(place, *each), only(definition.arrays, shardings), shardings
        )
        placed = jax.tree.map(lambda each: each.result(), coming)
    require_finite(by_path(placed), where="the model's files")
    return placed


def _place(
    source: ParameterSource,
    name: str,
    leaf: jax.ShapeDtypeStruct,
    sharding: NamedSharding | SingleDeviceSharding,
    *,
    stacked: bool,
    piece_bytes: int,
) -> jax.Array:
    def piece(start: int, stop: int, sharding: Any) -> jax.Array:
        """The parameter's slice [start, stop) along its leading dim."""

        def read(index: Index) -> np.ndarray:
            rows = slice(index[0].start + start, index[0].stop + start)
            found = source.read(name, (rows, *index[1:]))
            # A view may be of a file, and devices of the host take over what they are given.
            return found.astype(leaf.dtype, copy=found.base is not None)

        return read_shards((stop - start, *leaf.shape[1:]), sharding, read)

    num_rows = leaf.shape[0]
    row_bytes = math.prod(leaf.shape[1:]) * jnp.dtype(leaf.dtype).itemsize
    step = max(1, piece_bytes // row_bytes) if stacked else num_rows
    if step >= num_rows:
        return piece(0, num_rows, sharding)
    # Layers arrive one after the other in a buffer on the devices, which is reused.
    in_piece = sharding
    if isinstance(sharding, NamedSharding):
        in_piece = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    result = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=sharding)()
    for start in range(0, num_rows, step):
        rows = piece(start, min(start + step, num_rows), in_piece)
        result = _write_rows(result, rows, start)
    return result


@functools.partial(jax.jit, donate_argnums=0)
def _write_rows[Arrays: (jax.Array, QuantizedWeight)](
    stacked: Arrays, rows: Arrays, start: jax.Array
) -> Arrays:
    def write(into: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, part, start, axis=0)

    return jax.tree.map(write, stacked, rows)


def read_shards(
    shape: tuple[int, ...], sharding: Any, read: Callable[[Index], np.ndarray]
) -> jax.Array:
    """Makes a sharded array from the slices that ``read`` returns; only each device's shard is
    read. A shard that several devices hold is read once.
    """
    found: dict[Index, np.ndarray] = {}

    def shard(index: Index | None) -> np.ndarray:
        assert index is not None
        bounds = tuple(
            slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
        )
        if bounds not in found:
            found[bounds] = read(bounds)
        return found[bounds]

    return jax.make_array_from_callback(shape, sharding, shard)


_STORED = np.dtype(np.float32)


def place_quantized(
    source: ParameterSource,
    definition: ModelDefinition,
    shardings: Parameters,
    *,
    kept: BaseWeights,
) -> Parameters:
    """Reads parameters, each device its shard only, and quantizes projections layer by layer.

    Quantization is computed in fp32, whatever the compute dtype, and no group of elements with a
    common scale is split over devices. So the result is bitwise equal on any mesh.

    Args:
        shardings: shardings of ``base_shapes``, as ``base_shardings`` returns them.
    """
    infos = {row.path: row for row in definition.table()}
    plain: dict[tuple[Any, ...], Any] = {}
    rounded: dict[tuple[Any, ...], Any] = {}
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_weight):
        keys, name = tuple(each.key for each in path), path_name(path)
        if isinstance(sharding, QuantizedWeight):
            rounded[keys] = _rounded(source, infos[name], sharding, kept)
        else:
            plain[keys] = sharding
    return merged(place_parameters(source, definition, nest(plain)), nest(rounded))


def _rounded(
    source: ParameterSource, info: ParameterInfo, sharding: Any, kept: BaseWeights
) -> QuantizedWeight:
    """One projection's weight, a layer at a time."""
    num_layers, *sizes = info.shape
    mesh, (_, rows, columns) = sharding.data.mesh, sharding.data.spec
    inner, outer = info.contracted, len(sizes) - info.contracted
    spec = (None, rows, *(None,) * (inner - 1), columns, *(None,) * (outer - 1))
    whole = NamedSharding(mesh, PartitionSpec(*spec))

    one_layer = jax.tree.map(
        lambda each: NamedSharding(mesh, PartitionSpec(None, *each.spec[1:])), sharding
    )
    to_few_bits = _rounding(kept, inner, one_layer)
    shapes = jax.eval_shape(
        lambda weight: quantized_weight(weight, kept, num_inputs=inner),
        jax.ShapeDtypeStruct((1, *sizes), _STORED),
    )
    stacked = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape[1:]), x.dtype), shapes),
        out_shardings=sharding,
    )()

    def read(layer: int, index: Index) -> np.ndarray:
        found = source.read(info.path, (slice(layer, layer + 1), *index[1:]))
        require_finite_piece(found, name=info.path)
        return found.astype(_STORED)

    for layer in range(num_layers):
        weight = read_shards((1, *sizes), whole, functools.partial(read, layer))
        stacked = _write_rows(stacked, to_few_bits(weight), layer)
    return stacked


def _rounding(
    kept: BaseWeights, num_inputs: int, sharding: Any
) -> Callable[[jax.Array], QuantizedWeight]:
    """Rounds a layer of a weight onto devices.

    Scales in 8 bits depend on a mean, whose last bit depends on how it is summed. So each device
    sums all of them, in a program of its own that is the same on any mesh.
    """
    if not rounds_scales(kept):
        return jax.jit(
            lambda weight: quantized_weight(weight, kept, num_inputs=num_inputs),
            out_shardings=sharding,
        )
    codes = sharding.scales.codes
    everywhere = NamedSharding(codes.mesh, PartitionSpec())
    first = jax.jit(
        lambda weight: rounded_weight(weight, kept, num_inputs=num_inputs),
        out_shardings=dataclasses.replace(sharding, scales=codes),
    )
    gathered = jax.jit(lambda scales: scales, out_shardings=everywhere)
    second = jax.jit(double_quantized, out_shardings=everywhere)
    placed = jax.jit(lambda scales: scales, out_shardings=sharding.scales)

    def rounded(weight: jax.Array) -> QuantizedWeight:
        plain = first(weight)
        return dataclasses.replace(plain, scales=placed(second(gathered(plain.scales))))

    return rounded
