"""Checks of the operands of grouped products.

Dims: M row, T token, G group, K width in, N width out.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError


def check_operands(
    x: jax.Array,
    weights: dict[str, jax.Array],
    group_sizes: jax.Array,
    rows: jax.Array | None,
    positions: jax.Array | None,
) -> None:
    """Raises InputError unless x, weights, group sizes and row indices agree in shape and dtype."""
    if x.ndim != 2 or x.dtype.name not in ("bfloat16", "float16", "float32"):
        raise InputError(
            f"x is {x.dtype}{list(x.shape)}; it must be bfloat16, float16 or float32 [M, K]"
        )
    for name, w in weights.items():
        if w.ndim != 3 or w.shape[1] != x.shape[1] or not jnp.issubdtype(w.dtype, jnp.floating):
            raise InputError(
                f"{name} is {w.dtype}{list(w.shape)}; x {list(x.shape)} asks for floats "
                f"[G, {x.shape[1]}, N]"
            )
    first, *others = weights.items()
    for name, w in others:
        if w.shape != first[1].shape:
            raise InputError(
                f"{name} is {list(w.shape)} and {first[0]} {list(first[1].shape)}; they must be "
                "of one shape"
            )
    num_groups = first[1].shape[0]
    if group_sizes.shape != (num_groups,) or group_sizes.dtype != jnp.int32 or not num_groups:
        raise InputError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; {first[0]} "
            f"{list(first[1].shape)} asks for int32 [{num_groups}], at least one"
        )
    if rows is None and positions is not None:
        raise InputError("positions are given without rows; they are the rows' inverse: give both")
    if rows is None:
        return
    if rows.ndim != 1 or rows.dtype != jnp.int32:
        raise InputError(f"rows is {rows.dtype}{list(rows.shape)}; it must be int32 [M]")
    if not x.shape[0]:
        raise InputError(f"rows {list(rows.shape)} name rows of x, which has none")
    if positions is None:
        return
    if positions.shape[:1] != x.shape[:1] or positions.ndim != 2 or positions.dtype != jnp.int32:
        raise InputError(
            f"positions is {positions.dtype}{list(positions.shape)}; x {list(x.shape)} asks for "
            f"int32 [{x.shape[0]}, J], where each of its rows went"
        )


def check_inverse(inverse: jax.Array | None, *, num_rows: int) -> None:
    """Raises InputError unless the inverse index is int32 with one entry per row."""
    if inverse is not None and (inverse.shape != (num_rows,) or inverse.dtype != jnp.int32):
        raise InputError(
            f"inverse is {inverse.dtype}{list(inverse.shape)}; it must be int32 [{num_rows}], an "
            "entry for each row of y"
        )


def counts_within(group_sizes_G: jax.Array, num_rows: int) -> jax.Array:
    """Clips group sizes to at least 0 and, in sum, at most ``num_rows``."""
    ends_G = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes_G, 0)), num_rows)
    return jnp.diff(ends_G, prepend=0).astype(jnp.int32)
