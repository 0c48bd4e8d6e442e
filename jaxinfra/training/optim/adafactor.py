"""Adafactor's second moments and its clipping, per matrix (Shazeer and Stern 2018).

A stacked parameter counts as one matrix per layer and expert, as for Muon. Its heads and head
width together are one side of the matrix.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfra.axes import Dims
from jaxinfra.numerics.storage import EXACT
from jaxinfra.training.optim.muon import matrix_dims, matrix_sides

_DECAY = 0.8  # of the second moments: 1 - t^-0.8 at step t
_EPSILON = 1e-30  # added to squares
_LEAST_SIDE = 128  # of a matrix whose moments are factored
_MOST_RMS = 1.0  # of an update


class FactoredState(NamedTuple):
    """Adafactor's second moments. A matrix has the mean square of each row and each column; other
    parameters have a mean square per element (``whole``). Moments that do not apply are one zero.
    """

    count: jax.Array  # int32 []
    rows: Any
    columns: Any
    whole: Any


def scale_by_adafactor(dims: Any) -> optax.GradientTransformation:
    """Builds Adafactor's update (algorithm 4, without the parameter's own scale): g / sqrt(v),
    clipped to a root mean square of 1 per matrix.

    Args:
        dims: tree of ``DimsLeaf``: the logical dims of each parameter.
    """
    every = [leaf.dims for leaf in jax.tree.leaves(dims)]

    def init(params: Any) -> FactoredState:
        leaves, structure = jax.tree.flatten(params)
        # Of a stand-in for parameters, which has no leaves, the state is that stand-in.
        states = [_empty(leaf, each) for leaf, each in zip(leaves, every, strict=False)]
        parts = (structure.unflatten([state[part] for state in states]) for part in range(3))
        return FactoredState(jnp.zeros((), jnp.int32), *parts)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FactoredState]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        decay = 1.0 - (state.count + 1).astype(EXACT) ** -_DECAY
        moments = zip(*(structure.flatten_up_to(part) for part in state[1:]), strict=True)
        found = [
            _stepped(gradient, each, *moment, decay=decay)
            for gradient, each, moment in zip(leaves, every, moments, strict=True)
        ]
        steps, *parts = (structure.unflatten(part) for part in zip(*found, strict=True))
        return steps, FactoredState(state.count + 1, *parts)

    return optax.GradientTransformation(init, update)


def _factored(shape: tuple[int, ...], dims: Dims) -> bool:
    found = matrix_sides(dims)
    return len(found) == 2 and all(
        math.prod(shape[dim] for dim in side) >= _LEAST_SIDE for side in found
    )


def _empty(leaf: Any, dims: Dims) -> tuple[jax.Array, jax.Array, jax.Array]:
    none = jnp.zeros((1,), leaf.dtype)
    if not _factored(leaf.shape, dims):
        return none, none, jnp.zeros_like(leaf)
    rows, columns = matrix_sides(dims)
    along_rows, along_columns = (
        jnp.zeros([1 if dim in side else size for dim, size in enumerate(leaf.shape)], leaf.dtype)
        for side in (columns, rows)
    )
    return along_rows, along_columns, none


def _stepped(
    gradient: jax.Array,
    dims: Dims,
    rows: jax.Array,
    columns: jax.Array,
    whole: jax.Array,
    *,
    decay: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The update of a parameter, and its new moments."""
    squares = jnp.square(gradient) + _EPSILON

    def moved(mean: jax.Array, now: jax.Array) -> jax.Array:
        return (decay * mean + (1.0 - decay) * now).astype(mean.dtype)

    if _factored(gradient.shape, dims):
        row_dims, column_dims = matrix_sides(dims)
        rows = moved(rows, jnp.mean(squares, axis=column_dims, keepdims=True))
        columns = moved(columns, jnp.mean(squares, axis=row_dims, keepdims=True))
        share = rows / jnp.mean(rows, axis=row_dims, keepdims=True)
        step = gradient * share**-0.5 * columns**-0.5
    else:
        whole = moved(whole, squares)
        step = gradient * whole**-0.5
    root = jnp.sqrt(jnp.mean(jnp.square(step), axis=matrix_dims(dims), keepdims=True))
    return step / jnp.maximum(1.0, root / _MOST_RMS), rows, columns, whole
