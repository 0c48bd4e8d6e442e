"""Marks results of custom calls as varying over mesh axes, for ``shard_map(check_vma=True)``.

``shard_map`` types an array by the mesh axes over which devices hold different values. A custom
call's results lack this type, so ``shard_map`` takes them for equal on all devices and sums the
devices' cotangents: a wrong gradient without an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def vary_alike[T](arrays: T) -> T:
    """Marks arrays inside ``shard_map`` as varying over every axis that one of them varies on.

    The transpose of this mark is a psum. So the gradient of an array that all devices hold alike,
    such as a key, is summed over devices, although the kernel's gradient rule ignores the mesh.
    """
    leaves = jax.tree.leaves(arrays)
    varying = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(varying - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying")

    return jax.tree.map(mark, arrays)


def results_vary[F: Callable[..., Any]](kernel: F) -> F:
    """Wraps ``kernel`` so that results vary over the mesh axes that any operand varies over."""

    @functools.wraps(kernel)
    def typed(*operands: Any) -> Any:
        return vary_alike((kernel(*operands), operands))[0]

    return typed  # pyrefly: ignore[bad-return]
