"""Configurations of the Hopper attention kernels: supported calls, sizes, tiles of a call."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec
from pallas_kernels.hopper.machine import SMEM_BYTES

DTYPES = (jnp.bfloat16, jnp.float16)
WIDTHS = (
    "64/64", "72/72", "80/80", "96/96", "112/112", "128/128", "160/160", "192/128", "192/192",
    "256/256",
)  # fmt: skip
FORWARD_WIDTH = 16  # the forward's widths are multiples of it, the K of a matmul
BARRIER_BYTES = 1024  # the most that a kernel's barriers take

BACKWARD_KEYS, BACKWARD_QUERIES = 128, 64  # a tile of the backward up to 128 wide
NUM_DS = 2  # dS tiles in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardConfig:
    """Tile sizes of the forward kernel: ``num_warpgroups * 64`` query rows by ``block_kv`` keys."""

    block_kv: int
    num_warpgroups: int = 2  # compute warpgroups, 64 query rows each; one more loads
    num_stages: int = 2  # K and V tiles in flight
    overlap: bool = True  # computes the softmax during the previous tile's value product
    persistent: bool = False  # one block per SM, which takes many tiles

    @property
    def block_q(self) -> int:
        """Number of query rows of one block."""
        return 64 * self.num_warpgroups

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Bytes of shared memory of one block."""
        q_or_out = self.block_q * max(head_dim, value_dim)
        kv = self.num_stages * self.block_kv * (head_dim + value_dim)
        row_bytes = 4 * (1 + 8 + 1)  # logsumexp, pin, id
        ids = 4 * self.num_stages * self.block_kv
        return 2 * (q_or_out + kv) + row_bytes * self.block_q + ids + BARRIER_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig:
    """Form of the fused backward for heads up to 128 wide: 128 keys per block, 64 queries per step.

    Raises:
        UnsupportedError: from ``check``, for a form that needs too many registers at the head
            width.
    """

    num_stages: int = 2  # query tiles in flight
    register_ds: bool = False  # the product for dK reads dS from registers
    dq_warpgroup: bool = False  # a third warpgroup computes dQ; else both do, one tile late
    own_copies: bool = False  # copies queries by ``odd_tiles`` even if 8 divides their number

    def check(self, head_dim: int) -> None:
        """Raises UnsupportedError if this form serializes matmuls or spills at these widths."""
        if head_dim > 64 and (self.register_ds or self.dq_warpgroup):
            raise UnsupportedError(
                f"{self}: register_ds and dq_warpgroup need heads at most 64 wide, not {head_dim};"
                " leave both False"
            )

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Bytes of shared memory of one block with 16-bit operands."""
        operands = (BACKWARD_KEYS + self.num_stages * BACKWARD_QUERIES) * (head_dim + value_dim)
        operands += NUM_DS * BACKWARD_KEYS * BACKWARD_QUERIES
        row_bytes = 4 * 3 * self.num_stages  # logsumexp, delta, id
        dq = 4 * BACKWARD_QUERIES * (128 if self.dq_warpgroup else head_dim)
        return 2 * operands + row_bytes * BACKWARD_QUERIES + dq + 4 * BACKWARD_KEYS + BARRIER_BYTES


type TileConfig = ForwardConfig | BackwardConfig

SHIPPED: dict[tuple[str, str], TileConfig] = {
    ("forward", "64/64"): ForwardConfig(block_kv=128, num_warpgroups=3, overlap=False),
    ("forward", "64/64 short"): ForwardConfig(
        block_kv=128, num_warpgroups=3, overlap=False, persistent=True
    ),
    ("forward", "64/64 short causal"): ForwardConfig(
        block_kv=128, overlap=False, num_stages=3, persistent=True
    ),
    ("forward", "80/80"): ForwardConfig(block_kv=128),
    ("forward", "96/96"): ForwardConfig(block_kv=128),
    ("forward", "112/112"): ForwardConfig(block_kv=128),
    ("forward", "128/128"): ForwardConfig(block_kv=128),
    ("forward", "128/128 short"): ForwardConfig(block_kv=128, persistent=True),
    ("forward", "160/160"): ForwardConfig(block_kv=128),
    ("forward", "192/128"): ForwardConfig(block_kv=128),
    ("forward", "192/192"): ForwardConfig(block_kv=64),
    ("forward", "256/256"): ForwardConfig(block_kv=64, overlap=False),
    ("backward", "64/64"): BackwardConfig(register_ds=True, dq_warpgroup=True, num_stages=3),
    ("backward", "128/128"): BackwardConfig(own_copies=True),
}
"""Tiles that were the fastest on an H200, by kernel and key
(``experiments.bench.kernels.attention_tune``).

A key is the head widths of query and value as "128/128", perhaps with ``UNGROUPED``, ``SHORT``
or ``SHORT_CAUSAL``."""
SHORT, SHORT_CAUSAL = " short", " short causal"
"""Suffixes of keys for forward passes whose query tiles see few keys."""
SHORT_KEYS, SHORT_CAUSAL_KEYS = 1024, 512
"""Most keys that these query tiles see on average."""
UNGROUPED = " ungrouped"
"""Suffix of keys for backward passes with as many key/value heads as query heads."""


def unsupported(
    spec: AttentionSpec, masks: AttentionMasks, q: jax.Array, k: jax.Array, v: jax.Array
) -> str | None:
    """Returns why the forward or backward kernels cannot compute this call; None if they can."""
    H, Hv = q.shape[3], v.shape[3]
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes q={q.dtype} k={k.dtype} v={v.dtype} are not all bfloat16 or all float16"
    widths = f"{H}/{Hv}"
    if widths not in WIDTHS:
        return f"head widths {widths} of query and value are none of {', '.join(WIDTHS)}"
    if masks.bias is not None:
        return "an additive bias is not implemented in these kernels"
    if spec.scale <= 0:
        return f"scale={spec.scale} is not positive, so the largest score is not the largest logit"
    T, S = q.shape[1], k.shape[1]
    return f"lengths T={T} S={S} leave nothing to load" if min(T, S) == 0 else None


def refuse(reason: str | None) -> None:
    """Raises UnsupportedError with ``reason`` as its message, unless it is None."""
    if reason is not None:
        raise UnsupportedError(f"Hopper attention: {reason}")


def exceeds_shared_memory(config: TileConfig, head_dim: int, value_dim: int) -> str | None:
    """Returns why a configuration's tiles do not fit in shared memory; None if they do."""
    used = config.smem_bytes(head_dim, value_dim)
    if used <= SMEM_BYTES:
        return None
    return f"{config} takes {used} bytes of shared memory, and a block has {SMEM_BYTES}"


def forward_config(head_dim: int, value_dim: int, endings: Sequence[str] = ()) -> ForwardConfig:
    """Returns the forward tiles measured fastest for this pair of head widths.

    Args:
        head_dim, value_dim: widths.
        endings: suffixes of table keys from ``short_endings``; the first one found is used.
    """
    widths = f"{head_dim}/{value_dim}"
    config = next(c for end in (*endings, "") if (c := SHIPPED.get(("forward", widths + end))))
    assert isinstance(config, ForwardConfig)
    return config


def short_endings(spec: AttentionSpec, masks: AttentionMasks, T: int, S: int) -> list[str]:
    """Returns suffixes of table keys for calls whose query tiles see few keys; [] for others.

    With few keys, the work before and after the loop over keys matters; a persistent block overlaps
    it with its next tile. Only plain calls were measured: as many queries as keys, in whole tiles,
    without windows, documents, sinks or soft cap.
    """
    plain = spec.left is None and spec.logit_soft_cap is None and not masks.arrays()
    if not plain or T != S or S % 128:
        return []
    causal = spec.right is not None
    seen = S // 2 if causal else S
    short = [SHORT] if seen <= SHORT_KEYS else []
    return [SHORT_CAUSAL, *short] if causal and seen <= SHORT_CAUSAL_KEYS else short


def backward_config(head_dim: int, value_dim: int, group: int) -> BackwardConfig:
    """Returns the backward form measured fastest for these widths; the default if none was.

    Args:
        head_dim, value_dim: widths.
        group: query heads per key/value head. A block loops over the queries of all of them.
    """
    widths = f"{head_dim}/{value_dim}"
    alone = SHIPPED.get(("backward", widths + UNGROUPED)) if group == 1 else None
    config = alone or SHIPPED.get(("backward", widths)) or BackwardConfig()
    assert isinstance(config, BackwardConfig)
    return config
