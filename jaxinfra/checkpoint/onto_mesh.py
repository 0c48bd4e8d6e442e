"""Parameters from a source straight onto a mesh: each device gets its shard, and reads no more."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinfra.checkpoint.finite import require_finite
from jaxinfra.checkpoint.parameter_sources import ParameterSource
from jaxinfra.hf import by_path
from jaxinfra.hf.tensor_layout import Index
from jaxinfra.model.definition import ModelDefinition, Parameters, only
from jaxinfra.parallel.place import path_name

_PIECE_BYTES = 256 * 2**20  # of a stacked parameter that are on the host at a time


def place_parameters(
    source: ParameterSource,
    definition: ModelDefinition,
    shardings: Parameters,
    *,
    piece_bytes: int = _PIECE_BYTES,
) -> Parameters:
    """Reads parameters and state in the definition's dtypes, each device its shard only.

    Args:
        shardings: of what to read, a part of the structure of ``definition.arrays``.
        piece_bytes: most of a stacked parameter on the host at a time, one layer at least.

    Raises:
        CheckpointError: a parameter is not finite.
    """

    def place(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        name = path_name(path)
        stacked = name.startswith("blocks/")
        return _place(source, name, leaf, sharding, stacked=stacked, piece_bytes=piece_bytes)

    placed = jax.tree_util.tree_map_with_path(place, only(definition.arrays, shardings), shardings)
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
        shape = (stop - start, *leaf.shape[1:])
        read: dict[Index, np.ndarray] = {}  # devices that hold the same shard read it once

        def shard(index: Index | None) -> np.ndarray:
            assert index is not None
            bounds = tuple(
                slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
            )
            if bounds not in read:
                rows = slice(bounds[0].start + start, bounds[0].stop + start)
                read[bounds] = source.read(name, (rows, *bounds[1:])).astype(leaf.dtype)
            return read[bounds]

        return jax.make_array_from_callback(shape, sharding, shard)

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
def _write_rows(stacked: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stacked, rows, start, axis=0)
