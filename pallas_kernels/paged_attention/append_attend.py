"""A decode step's append and attention, in one call.

Dims: B row, N query heads, K kv heads, H width, P page of the pool, S slot of a page, M page of a
row, R rotated pair.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.hopper.launch import Launches

from .api import paged_attention
from .append import append_heads
from .hopper import append_and_attend_hopper, unsupported_step
from .validate import make_call

type StepImplementation = Literal["hopper", "xla"]


def append_and_attend(
    heads: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array | np.ndarray,
    positions: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    implementation: StepImplementation,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    launches: Launches = "in-turn",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``append_heads``, then ``paged_attention`` of the queries that it turned.

    Args:
        heads: [B, 1, N + 2 K, H]: heads of queries, then of keys, then of values, not turned.
        k_pages, v_pages: [P, S, K, H] of the heads' dtype; donate them.
        page_tables: int32 [B, M]; below 0 where a row has no page.
        positions: int32 [B, 1]; below 0 in a row that has no token, whose result is 0.
        rope: cos and sin, float32 [B or 1, 1, R]; pairs as in ``append_to_pages``.
        implementation: "hopper" is a kernel that turns, appends and attends, and one that merges;
            heads of 64 or 128 columns which all turn, query heads in multiples of 8, keys' of 4.
            "xla" is both functions, one after another.
        window, soft_cap, sinks, scale, launches: as in ``paged_attention``.

    Returns:
        [B, 1, N, H] in the heads' dtype, ``k_pages`` and ``v_pages``.

    Raises:
        InputError: shapes, dtypes or options that disagree, or an unknown implementation.
        UnsupportedError: the kernels are named and cannot take this step.

    Examples:
        >>> heads, pool = jnp.ones((1, 1, 4, 4)), jnp.zeros((2, 2, 1, 4))
        >>> rope = jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2))
        >>> where = jnp.array([[1]]), jnp.array([[0]])
        >>> out, k, _ = pallas_kernels.append_and_attend(
        ...     heads, pool, pool, *where, rope, implementation="xla"
        ... )
        >>> out.shape, k[..., 0, 0].tolist()
        ((1, 1, 2, 4), [[0.0, 0.0], [1.0, 0.0]])
    """
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "scale": scale}
    if implementation == "xla":
        q, k_pages, v_pages = append_heads(
            heads, k_pages, v_pages, page_tables, positions, rope, implementation="xla"
        )
        lengths = positions[:, -1] + 1
        out = paged_attention(
            q, k_pages, v_pages, page_tables, lengths, implementation="xla", **options
        )
        return out, k_pages, v_pages
    if implementation != "hopper":
        raise InputError(f"implementation={implementation!r} must be hopper or xla")
    num_q_heads = heads.shape[2] - 2 * k_pages.shape[2]
    if heads.ndim != 4 or num_q_heads < 1 or positions.shape != heads.shape[:2]:
        raise InputError(
            f"heads {heads.shape}, positions {positions.shape} and pages {k_pages.shape}: heads "
            "are [B, 1, N + 2 K, H], positions [B, 1] and pages [P, S, K, H]"
        )
    call = make_call(
        heads[:, :, :num_q_heads], k_pages, v_pages, page_tables, positions[:, -1] + 1,
        query_lengths=None, value_width=None, **options,
    )  # fmt: skip
    reason = unsupported_step(call, heads, rope)
    if reason:
        raise UnsupportedError(
            f"implementation='hopper' cannot append and attend at once: {reason}; append_heads and "
            "paged_attention can, one after another"
        )
    return append_and_attend_hopper(call, heads, jnp.asarray(positions), rope, launches=launches)
