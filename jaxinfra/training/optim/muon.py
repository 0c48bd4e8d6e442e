"""Muon: the momentum of each matrix, orthogonalized (Jordan et al. 2024).

A stacked parameter counts as one matrix per layer and expert. Heads and head width together are
one side of the matrix, so a query weight [L, D, N, H] is L matrices of D x (N H).
"""

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxinfra.axes import EXPERTS, HEAD, LAYERS, POSITION, SCORE, VOCAB, Dims
from jaxinfra.config.optimizer import MuonConfig

# Of AdamW's usual update, whose elements are nearly +-1 only where gradients agree from step to
# step (Liu et al. 2025, section 2.2).
_ROOT_MEAN_SQUARE = 0.2


def matrix_sides(dims: Dims) -> tuple[tuple[int, ...], ...]:
    """Groups a parameter's dims into sides: two sides for a matrix, one for a vector. Returns the
    dim indices of each side.

    Head width belongs to the same side as the heads. Layer and expert dims belong to no side.
    """
    found: list[tuple[int, ...]] = []
    for index, dim in enumerate(dims):
        if dim == HEAD and found:
            found[-1] = (*found[-1], index)
        elif dim not in (LAYERS, EXPERTS):
            found.append((index,))
    return tuple(found)


def matrix_dims(dims: Dims) -> tuple[int, ...]:
    """Returns the dims of one matrix or vector in a parameter that stacks layers or experts."""
    return tuple(dim for side in matrix_sides(dims) for dim in side)


def is_matrix(dims: Dims) -> bool:
    """Whether a parameter is a matrix per layer and expert; a norm's scale or a bias is not.

    The number of dims does not decide: a query bias is [layers, heads, head], but is a vector per
    layer.
    """
    return len(matrix_sides(dims)) >= 2


def is_hidden_matrix(dims: Dims) -> bool:
    """Whether a parameter is a matrix between two widths of the model. Embedding tables are not:
    one of their sides is the vocabulary or the positions.
    """
    return len(matrix_sides(dims)) == 2 and not {VOCAB, POSITION, SCORE} & set(dims)


def orthogonalized(config: MuonConfig, dims: Any) -> optax.GradientTransformation:
    """Builds Muon's updates of hidden matrices, before learning rate and weight decay.

    With the gradient g of step t, Nesterov's momentum and the bias corrections of Dozat 2016:

        m = momentum m + (1 - momentum) g
        n = momentum m / (1 - momentum^(t+1)) + (1 - momentum) g / (1 - momentum^t)

    With the singular value decomposition n = U S V^T, the update is
    0.2 sqrt(max(rows, columns)) U f(S) V^T. Five Newton-Schulz steps bring f(S) near 1; their
    matmuls cost little beside those of a batch. The compiler shards them with the matrix.

    Args:
        dims: tree of ``DimsLeaf``: the logical dims of each parameter.
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
    rows, columns = matrix_sides(dims)
    return MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)


def _scaled(update: jax.Array, numbers: MuonDimensionNumbers) -> jax.Array:
    """An orthogonal matrix of R x C has elements of root mean square 1 / sqrt(max(R, C))."""
    connected: Any = (numbers.reduction_axis, numbers.output_axis)  # tuples, as given above
    rows, columns = (math.prod(update.shape[dim] for dim in side) for side in connected)
    return update * (_ROOT_MEAN_SQUARE * math.sqrt(max(rows, columns)))
