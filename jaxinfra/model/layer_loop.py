"""Unrolled loop over layers whose parameters are stacked along a first dim."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

_LAG = 2
"""Layers between one whose gradients are waited for and the one that waits. With 1 the scheduler
leaves only elementwise operations beside a sum over devices, with 2 a layer's products."""

type Step[Carry] = Callable[[Carry, Any], tuple[Carry, Any]]
"""Function of one iteration, with the signature that ``jax.lax.scan`` takes."""
type Take = Callable[[jax.Array, int], Iterator[jax.Array]]
"""A stack [count, ...] and count to its layers; it decides how the stack's gradient is made."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerOf:
    """One layer's array, which is sliced from the stack of all layers only where it is read.

    Recomputation saves a layer's inputs for the backward pass. Weights that were sliced before it
    would be saved as copies: over all layers, one more copy of the fp32 model.
    """

    index: jax.Array
    stack: jax.Array  # has no gradient
    layer: jax.Array  # the slice from ``Take``: never read, receives the gradient

    def read(self) -> jax.Array:
        """Slices the layer's array from the stack."""
        return _read(self.index, self.stack, self.layer)


def opened(step: Step) -> Step:
    """Wraps a layer's step so that it slices arrays given as ``LayerOf`` from their stacks."""

    def read(x: Any) -> Any:
        return x.read() if isinstance(x, LayerOf) else x

    @functools.wraps(step)
    def of_layer(carry: Any, layer: Any) -> tuple[Any, Any]:
        whole = jax.tree.map(read, layer, is_leaf=lambda x: isinstance(x, LayerOf))
        return step(carry, whole)

    return of_layer


def take_in_place(stack: jax.Array, count: int) -> Iterator[jax.Array]:
    """Yields a stack's layers; their gradients are written one by one into one stacked array."""
    for i in range(count):
        layer, stack = _take(i, stack)
        yield layer


def take_apart(stack: jax.Array, count: int) -> Iterator[jax.Array]:
    """Yields a stack's layers; their gradients stay separate arrays and are stacked at the end."""
    yield from _apart(count, stack)


def one_by_one[Carry](
    steps: Sequence[Step[Carry]],
    carry: Carry,
    layers: Any,
    *,
    take: Take = take_in_place,
    in_order: bool = False,
    behind: Any = None,
) -> tuple[Carry, Any, Any]:
    """Computes ``jax.lax.scan`` unrolled, with a step per layer; also returns ``behind``.

    Args:
        steps: each layer's step, from ``opened``; equal steps are traced once.
        layers: tree of the layers' stacked arrays [count, ...].
        take: function that yields the layers of a stack.
        in_order: whether a layer's backward pass waits for the weight gradients, summed over
            devices, of the layer ``_LAG`` + 1 before it in that pass. Otherwise XLA delays weight
            gradients to overlap them with sums over devices, and their inputs stay in memory.
        behind: parameters used after the layers; ``in_order`` orders their gradients too.
    """
    count = len(steps)
    traced = {step: jax.jit(step) for step in set(steps)}
    leaves, structure = jax.tree.flatten(layers)
    each = list(zip(*(take(leaf, count) for leaf in leaves), strict=True))
    results = []
    for i, step in enumerate(steps):
        late = i + _LAG
        if in_order and late < count:
            carry, each[late] = _with_matrices_of(each[late], carry)
        elif in_order and late == count:
            carry, behind = _backward_together((carry, behind))
        taken = each[i]
        read = [_where_read(i, *pair) for pair in zip(leaves, taken, strict=True)]
        carry, result = traced[step](carry, structure.unflatten(read))
        results.append(result)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results), behind


def _with_matrices_of[Carry](layer: tuple[jax.Array, ...], carry: Carry) -> tuple[Carry, Any]:
    """The carry and the layer as they are; the carry's gradient comes with those of the matrices.

    Vectors are few bytes, and their sums over devices are better taken together at the end.
    """

    def is_matrix(x: jax.Array) -> bool:
        return x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)

    carry, matrices = _backward_together((carry, [x for x in layer if is_matrix(x)]))
    left = iter(matrices)
    return carry, tuple(next(left) if is_matrix(x) else x for x in layer)


def _where_read(i: int, stack: jax.Array, layer: jax.Array) -> jax.Array | LayerOf:
    if not jnp.issubdtype(stack.dtype, jnp.floating):
        return layer
    return LayerOf(index=jnp.int32(i), stack=jax.lax.stop_gradient(stack), layer=layer)


@jax.custom_vjp
def _backward_together[T](values: T) -> T:
    """The values; no gradient of them is handed on before all are there."""
    return values


def _backward_together_forward(values: Any) -> tuple[Any, list[tuple[()] | None]]:
    """Remembers which of the values have a gradient: (), or None."""
    leaves, structure = jax.tree.flatten(values)
    learned = [() if leaf.perturbed else None for leaf in leaves]
    return structure.unflatten([leaf.value for leaf in leaves]), learned


def _backward_together_backward(learned: list[tuple[()] | None], gradients: Any) -> tuple[Any]:
    """A frozen weight's gradient is not waited for, or it would be computed."""
    leaves, structure = jax.tree.flatten(gradients)
    is_there = [
        each is not None and not isinstance(leaf, SymbolicZero)
        for each, leaf in zip(learned, leaves, strict=True)
    ]
    there = jax.lax.optimization_barrier(
        [x for x, is_it in zip(leaves, is_there, strict=True) if is_it]
    )
    left = iter(there)
    return (structure.unflatten([next(left) if is_it else None for is_it in is_there]),)


_backward_together.defvjp(
    _backward_together_forward, _backward_together_backward, symbolic_zeros=True
)


@jax.custom_vjp
def _read(index: jax.Array, stack: jax.Array, layer: jax.Array) -> jax.Array:
    del layer
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _read_forward(index: jax.Array, stack: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
    return _read(index, stack, layer), None


def _read_backward(_: None, gradient: jax.Array) -> tuple[None, None, jax.Array]:
    return None, None, gradient


_read.defvjp(_read_forward, _read_backward)


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
