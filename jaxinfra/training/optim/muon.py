"""Muon: momentum, orthogonalized as the matrix that a parameter is (Jordan et al. 2024).

A parameter is a stack of matrices: its layers and experts are apart. A width that is split into
heads is one side, so a query weight [L, D, N, H] is L matrices of D x (N H).
"""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxinfra.axes import EXPERTS, HEAD, LAYERS, POSITION, VOCAB, Dims
from jaxinfra.config.optimizer import MuonConfig

# Of AdamW's usual update, whose elements are nearly +-1 only where gradients agree from step to
# step (Liu et al. 2025, section 2.2).
_ROOT_MEAN_SQUARE = 0.2


def sides(dims: Dims) -> tuple[tuple[int, ...], ...]:
    """Returns the dims of each space that a parameter connects: two spaces for a matrix, one for a
    vector.

    A head's width belongs to the same side as the heads; layers and experts are part of no side.
    """
    found: list[tuple[int, ...]] = []
    for index, dim in enumerate(dims):
        if dim == HEAD and found:
            found[-1] = (*found[-1], index)
        elif dim not in (LAYERS, EXPERTS):
            found.append((index,))
    return tuple(found)


def is_matrix(dims: Dims) -> bool:
    """Whether a parameter maps one space into another, unlike a norm's scale or a bias.

    Stacking over layers and splitting a width into heads add dims without making a matrix: a query
    bias is [layers, heads, head] and is none.
    """
    return len(sides(dims)) >= 2


def is_hidden_matrix(dims: Dims) -> bool:
    """Whether both sides of a parameter are widths, unlike embedding tables, whose rows are read
    one at a time.
    """
    return len(sides(dims)) == 2 and not {VOCAB, POSITION} & set(dims)


def orthogonalized(config: MuonConfig, dims: Any) -> optax.GradientTransformation:
    """Builds Muon's updates of hidden matrices, before learning rate and weight decay.

    Of step t's gradient g, with Nesterov's momentum and the corrections of Dozat 2016:

        m = momentum m + (1 - momentum) g
        n = momentum m / (1 - momentum^(t+1)) + (1 - momentum) g / (1 - momentum^t)

    Where n = U S V^T the update is 0.2 sqrt(max(rows, columns)) U f(S) V^T: five Newton-Schulz
    steps bring f(S) near 1. Their products are small beside a batch's. Where a matrix is on
    several devices, the compiler places them.

    Args:
        dims: tree of ``DimsLeaf``.
    """
    numbers = jax.tree.map(
        lambda leaf: (
            _dimension_numbers(leaf.dims) if is_hidden_matrix(leaf.dims) else optax.MaskedNode()
        ),
        dims,
    )

    def to_size_of_adamw(updates: Any, _: Any) -> Any:
        return jax.tree.map(_scaled, updates, numbers)

    chain = optax.chain(
        scale_by_muon(beta=config.momentum, weight_dimension_numbers=lambda _: numbers),
        optax.stateless(to_size_of_adamw),
    )
    return optax.masked(chain, jax.tree.map(lambda leaf: is_hidden_matrix(leaf.dims), dims))


def _dimension_numbers(dims: Dims) -> MuonDimensionNumbers:
    rows, columns = sides(dims)
    return MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)


def _scaled(update: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
    """An orthogonal matrix of R x C has elements of root mean square 1 / sqrt(max(R, C))."""
    connected: Any = (numbers.reduction_axis, numbers.output_axis)  # tuples, as given above
    rows, columns = (math.prod(update.shape[dim] for dim in side) for side in connected)
    return update * (_ROOT_MEAN_SQUARE * math.sqrt(max(rows, columns)))
