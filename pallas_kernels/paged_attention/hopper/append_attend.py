"""A decode step's append and attention on a Hopper GPU: one kernel, and one that merges.

Dims: as in ``pallas_kernels.paged_attention.spec``; R turned pair.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.launch import Launches
from pallas_kernels.hopper.references import references
from pallas_kernels.paged_attention.spec import PagedCall

from .append_heads import unsupported_append
from .attend import attend_pages
from .config import GROUP_ROWS, PagedConfig, QueryLayout, config_for
from .forward import unsupported
from .merge import merge_pages
from .new_tokens import WIDTHS, StepHeads
from .plan import plan_pages


def unsupported_step(
    call: PagedCall, heads_BTNH: jax.Array, rope: tuple[jax.Array, ...]
) -> str | None:
    """Why the kernels cannot compute this step; None if they can."""
    _, T, N, H = call.q_BTNH.shape
    if T > 1:
        return f"{T} tokens per row: a step has one"
    if call.code is not None or call.v_PSKV is None:
        return f"it needs pages of keys and values in the heads' dtype. Call: {call.describe()}"
    if H not in WIDTHS:
        return f"heads of {H} columns are none of {', '.join(map(str, WIDTHS))}"
    if N % GROUP_ROWS or QueryLayout.of(call).tiles_per_token > 1:
        return f"{N} query heads are no multiple of {GROUP_ROWS}, or too many for a kv head"
    reason = unsupported_append(heads_BTNH, call.k_PSKH, rope, call.code)
    return reason or unsupported(call)


def append_and_attend_hopper(
    call: PagedCall,
    heads_BTNH: jax.Array,
    positions_BT: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    launches: Launches = "in-turn",
    config: PagedConfig | None = None,
    interpretable: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As the portable form, of a step of which ``unsupported_step`` says nothing.

    Args:
        call: whose queries are not turned yet; they are read of the heads.
        config: tiles; the default where None.
        interpretable: see ``attend_pages``.
    """
    layout = QueryLayout.of(call)
    config = config or config_for(layout)
    plan = plan_pages(call, layout, config)
    cos_BR, sin_BR = (
        jnp.broadcast_to(x, (layout.B, 1, layout.H // 2))[:, 0].astype(jnp.float32) for x in rope
    )
    assert call.v_PSKV is not None
    k_ref, v_ref = references((call.k_PSKH, call.v_PSKV))
    step = StepHeads(
        k_pages=k_ref,
        v_pages=v_ref,
        heads_BNH=heads_BTNH[:, 0],
        positions_B=positions_BT[:, 0],
        cos_BR=cos_BR,
        sin_BR=sin_BR,
    )
    partials = attend_pages(
        call,
        plan, layout=layout, config=config, launches=launches, step=step,
        interpretable=interpretable,
    )  # fmt: skip
    merged = merge_pages(call, plan, partials, layout=layout, config=config, launches=launches)
    return merged, jax.freeze(k_ref), jax.freeze(v_ref)
