"""Layers one after another, without a loop; their parameters are stacked along a first dim."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def one_by_one[Carry](
    step: Callable[[Carry, Any], tuple[Carry, Any]],
    carry: Carry,
    layers: Any,
    *,
    count: int,
) -> tuple[Carry, Any]:
    """``jax.lax.scan(step, carry, layers)`` without a loop.

    The gradient of a stack is written layer by layer into one array. Of a scan that is unrolled it
    is put together of the layers' at the end, in every operation that reads it.

    Args:
        layers: arrays [count, ...].
    """
    step = jax.jit(step)  # traced once
    results = []
    for i in range(count):
        leaves, structure = jax.tree.flatten(layers)
        taken, left = zip(*(_take(i, leaf) for leaf in leaves), strict=True)
        layer, layers = structure.unflatten(taken), structure.unflatten(left)
        carry, result = step(carry, layer)
        results.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(i: int, stack: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Layer i, and the stack for those behind it, none of which takes layer i."""
    return stack[i], stack


def _take_forward(i: int, stack: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
    return _take(i, stack), None


def _take_backward(i: int, _: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    of_layer, of_others = gradients
    # Without a barrier XLA makes sums of padded layers of it.
    return (jax.lax.optimization_barrier(of_others).at[i].set(of_layer),)


_take.defvjp(_take_forward, _take_backward)
