"""A call on a Hopper GPU: what it can be, its plan and its two kernels.

Dims: as in ``pallas_kernels.paged_attention.spec``.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.paged_attention.spec import PagedCall

from .attend import attend_pages
from .config import GROUP_ROWS, ROWS, WIDEST_PART, PagedConfig, QueryLayout, config_for
from .merge import merge_pages
from .plan import PagePlan, plan_pages

DTYPES = ("bfloat16", "float16")
SIZES = (16, 32, 64, 128, 256)
WIDTH_MULTIPLE = 64


def unsupported(call: PagedCall) -> str | None:
    """Why the kernels cannot compute this call; None if they can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    reason = device.miscompiled(device.CAUSAL_ATTENTION)
    if reason is not None:
        return reason
    layout = QueryLayout.of(call)
    if call.q_BTNH.dtype.name not in DTYPES:
        return f"{call.q_BTNH.dtype} is neither bfloat16 nor float16"
    if layout.size not in SIZES:
        return f"pages of {layout.size} slots are none of {', '.join(map(str, SIZES))}"
    if layout.H % WIDTH_MULTIPLE or layout.V % WIDTH_MULTIPLE:
        return f"widths {layout.H}/{layout.V} are not multiples of {WIDTH_MULTIPLE}"
    if layout.V > 2 * WIDEST_PART:
        return f"values of {layout.V} columns are wider than {2 * WIDEST_PART}"
    if layout.group > ROWS and layout.group % GROUP_ROWS:
        return f"{layout.group} query heads to a kv head are above {ROWS} and no multiple of 8"
    used = config_for(layout).smem_bytes(layout)
    if used > SMEM_BYTES:
        return f"tiles take {used} bytes of shared memory, and a block has {SMEM_BYTES}"
    return None


def paged_attention_hopper(
    call: PagedCall,
    *,
    plan: PagePlan | None = None,
    config: PagedConfig | None = None,
    interpretable: bool = False,
) -> jax.Array:
    """As the reference.

    Args:
        call: of which ``unsupported`` says nothing.
        plan: of ``plan_pages``, where it was made before.
        config: tiles; the default where None.
        interpretable: see ``attend_pages``.

    Raises:
        UnsupportedError: tiles that exceed shared memory.
    """
    num_heads = call.q_BTNH.shape[2]
    layout = QueryLayout.of(call)
    config = config or config_for(layout)
    if config.smem_bytes(layout) > SMEM_BYTES:
        raise UnsupportedError(
            f"{config} takes {config.smem_bytes(layout)} bytes of shared memory, and a block has "
            f"{SMEM_BYTES}"
        )
    plan = plan or plan_pages(call, layout, config)
    # Copies begin at multiples of 8 heads, of which the last may be no heads at all.
    pad = -num_heads % GROUP_ROWS
    padded = call
    if pad:
        q_BTNH = jnp.pad(call.q_BTNH, ((0, 0), (0, 0), (0, pad), (0, 0)))
        padded = dataclasses.replace(call, q_BTNH=q_BTNH)
    out, lse = attend_pages(padded, plan, layout=layout, config=config, interpretable=interpretable)
    return merge_pages(call, plan, out, lse, layout=layout, config=config)
