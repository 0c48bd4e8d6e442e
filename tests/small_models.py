"""Dense decoders small enough to be compiled by one test."""

from typing import Any

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.rope import RopeConfig


def dense(
    *,
    model_dim: int = 32,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    hidden_dim: int = 48,
    attention: dict[str, Any] | None = None,
    **options: Any,
) -> ModelConfig:
    """Two layers of grouped attention with rotary angles, and of SwiGLU.

    Args:
        heads: of queries and of keys.
        attention: more settings of the attention; ``options`` are the model's.
    """
    mixer = GroupedAttentionConfig(
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        rope=RopeConfig(),
        **attention or {},
    )
    block = BlockConfig(mixer=mixer, feed_forward=MlpConfig(hidden_dim=hidden_dim))
    common = {"vocab_size": 64, "max_positions": 64, "tie_embeddings": True}
    return ModelConfig(**common | options, model_dim=model_dim, stacks=stacked(block, num_layers=2))
