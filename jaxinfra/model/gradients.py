"""Gradients of a batch, and their accumulation over micro-batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.model.definition import Parameters
from jaxinfra.model.passes import Sums, combined


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Loss, gradients and sums of a batch, or the contribution of one micro-batch to them."""

    loss: jax.Array  # fp32 []: mean nll in nats per counted token, or mean loss of pairs
    gradients: Parameters  # of the objective times the loss scale, in the parameters' dtypes
    sums: Any  # a ``model.passes.Sums`` for each distinct block
    state: Parameters  # cotangents of the model's state, from which a rule updates it
    # fp32 []: further sums that a loss reports, by name.
    figures: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


def added(first: Gradients, second: Gradients) -> Gradients:
    """Adds the gradients, losses and sums of two parts of a batch."""
    return Gradients(
        loss=first.loss + second.loss,
        gradients=jax.tree.map(jnp.add, first.gradients, second.gradients),
        sums=combined(first.sums, second.sums),
        state=jax.tree.map(jnp.maximum, first.state, second.state),
        figures=jax.tree.map(jnp.add, first.figures, second.figures),
    )


def nothing_added(shapes: Gradients) -> Gradients:
    """Returns zero gradients, to which the first micro-batch's gradients are added.

    Args:
        shapes: shapes of one micro-batch's gradients.
    """
    return Gradients(
        loss=_zeros(shapes.loss),
        gradients=_zeros(shapes.gradients),
        sums=nothing_summed(shapes.sums),
        state=nothing_emitted(shapes.state),
        figures=_zeros(shapes.figures),
    )


def nothing_summed(shapes: Any) -> Any:
    """Returns neutral ``Sums``, with which the first micro-batch's are combined."""

    def empty(sums: Sums) -> Sums:
        return Sums(
            losses=_zeros(sums.losses),
            added=_zeros(sums.added),
            largest=nothing_emitted(sums.largest),
        )

    return jax.tree.map(empty, shapes, is_leaf=lambda node: isinstance(node, Sums))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def nothing_emitted(tree: Any) -> Any:
    """Returns -inf in the tree's shapes and dtypes, from which elementwise maxima start."""
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, -jnp.inf, leaf.dtype), tree)
