"""Layers one after another, without a loop; their parameters are stacked along a first dim."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

type Step[Carry] = Callable[[Carry, Any], tuple[Carry, Any]]
"""As of ``jax.lax.scan``."""
type Take = Callable[[jax.Array, int], list[jax.Array]]
"""A stack [count, ...] and count to its layers; it decides how the stack's gradient is made."""


def take_in_place(stack: jax.Array, count: int) -> list[jax.Array]:
    """Layers whose gradients are written one by one into one array, which exists from the first
    on.
    """
    taken = []
    for i in range(count):
        layer, stack = _take(i, stack)
        taken.append(layer)
    return taken


def take_apart(stack: jax.Array, count: int) -> list[jax.Array]:
    """Layers whose gradients are put together at the end, in every operation that reads them, as of
    a scan that is unrolled: until then memory holds those of the layers that are done.
    """
    return list(_apart(count, stack))


def one_by_one[Carry](
    steps: Sequence[Step[Carry]], carry: Carry, layers: Any, *, take: Take = take_in_place
) -> tuple[Carry, Any]:
    """``jax.lax.scan(step, carry, layers)`` without a loop, where each layer has its step.

    Args:
        steps: of each layer; equal ones are traced once.
        layers: arrays [count, ...].
    """
    count = len(steps)
    traced = {step: jax.jit(step) for step in set(steps)}
    leaves, structure = jax.tree.flatten(layers)
    each = zip(*(take(leaf, count) for leaf in leaves), strict=True)
    results = []
    for step, taken in zip(steps, each, strict=True):
        carry, result = traced[step](carry, structure.unflatten(taken))
        results.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apart(count: int, stack: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(stack[i] for i in range(count))


def _apart_forward(count: int, stack: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return _apart(count, stack), None


def _apart_backward(_: int, __: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    return (jnp.stack(gradients),)


_apart.defvjp(_apart_forward, _apart_backward)


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
