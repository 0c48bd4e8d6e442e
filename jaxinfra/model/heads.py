"""Heads of grouped attention between their projections and the scores: limits, norms, positions.

Dims: B batch, T position, N query heads, K key/value heads, H head width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.kinds import QkNormOver
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.rope import QueryScaling
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.execution import Execution
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Pass, SharedKeys
from jaxinfra.model.rope import apply_rope
from jaxinfra.numerics.policy import Policy


def head_norm(
    config: GroupedAttentionConfig, *, num_heads: int, heads_dim: str, execution: Execution
) -> Norm | None:
    """Builds the norm of queries or of keys; None where the config has none."""
    if config.qk_norm is None:
        return None
    is_shared = config.qk_norm_over is QkNormOver.HEAD
    width = config.head_dim
    return Norm(
        config.qk_norm,
        shape=(width,) if is_shared else (num_heads, width),
        dims=(axes.HEAD,) if is_shared else (heads_dim, axes.HEAD),
        over=2 if config.qk_norm_over is QkNormOver.ALL_HEADS else 1,
        execution=execution,
    )


def clipped(config: GroupedAttentionConfig, x: jax.Array) -> jax.Array:
    """Clips queries, keys or values to the config's limit."""
    limit = config.qkv_clip
    return x if limit is None else jnp.clip(x, -limit, limit)


def positioned(
    config: GroupedAttentionConfig,
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    given: Pass,
    norms: tuple[Norm | None, Norm | None],
    *,
    policy: Policy,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    """Normalizes, clips, rotates and scales queries and keys, in the config's order.

    Args:
        norms: norm of queries and norm of keys.
    """

    def normed(q_BTNH: jax.Array, k_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_query, of_key = norms
        if of_query is None or of_key is None:
            return q_BTNH, k_BTKH
        return of_query(q_BTNH), of_key(k_BTKH)

    if not config.qk_norm_after_rope:
        q_BTNH, k_BTKH = normed(q_BTNH, k_BTKH)
    q_BTNH, k_BTKH = clipped(config, q_BTNH), clipped(config, k_BTKH)
    if config.rope is not None and given.rope is not None:
        pairs = config.rope.pairs
        is_exact = policy.is_exact
        q_BTNH = apply_rope(q_BTNH, given.rope, pairs=pairs, is_exact=is_exact)
        k_BTKH = apply_rope(k_BTKH, given.rope, pairs=pairs, is_exact=is_exact)
    if config.qk_norm_after_rope:
        q_BTNH, k_BTKH = normed(q_BTNH, k_BTKH)
    if config.query_scaling is not None:
        q_BTNH = _scaled(q_BTNH, config.query_scaling, given.positions_BT, policy)
    return q_BTNH, k_BTKH


def _scaled(
    q_BTNH: jax.Array, scaling: QueryScaling, positions_BT: jax.Array, policy: Policy
) -> jax.Array:
    number_BT = (jnp.maximum(positions_BT, 0) + scaling.first) // scaling.every
    scale_BT = 1.0 + policy.pinned(scaling.rate * jnp.log1p(policy.to_accum(number_BT)))
    return policy.to_compute(policy.to_accum(q_BTNH) * scale_BT[:, :, None, None])


def keys_for(config: GroupedAttentionConfig, given: Pass) -> SharedKeys:
    """Returns the keys and values of an earlier layer that this one takes."""
    name = config.takes_keys
    if name is None or name not in given.shared:
        raise UnsupportedError(
            f"takes_keys={name} where layers run apart from those before them, as in a pipeline: "
            "keys and values of other layers are not sent along; use fsdp and tensor"
        )
    return given.shared[name]


def segments(config: GroupedAttentionConfig, given: Pass) -> Int[Array, "B T"] | None:
    """Returns the tokens' documents, cut into chunks where the config has them."""
    segment_ids_BT = given.segment_ids_BT
    if config.chunk is None:
        return segment_ids_BT
    begins_BT = given.positions_BT % config.chunk == 0
    chunk_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)
    if segment_ids_BT is None:
        return chunk_BT
    return jnp.where(segment_ids_BT < 0, segment_ids_BT, chunk_BT)
