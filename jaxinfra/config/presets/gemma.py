"""Gemma 2: soft caps, every other layer with a window, norms before and after each branch."""

import math

from jaxinfra.config.kinds import MlpKind, NormPlacement
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.rope import RopeConfig


def gemma2_2b() -> ModelConfig:
    """Gemma-2-2B: 2,614,341,888 parameters, tied embeddings."""
    return _gemma2(
        model_dim=2304, num_layers=26, heads=(8, 4), head_dim=256, hidden_dim=9216, scalar=256
    )


def gemma2_9b() -> ModelConfig:
    """Gemma-2-9B: 9,241,705,984 parameters, tied embeddings."""
    return _gemma2(
        model_dim=3584, num_layers=42, heads=(16, 8), head_dim=256, hidden_dim=14_336, scalar=256
    )


def gemma2_27b() -> ModelConfig:
    """Gemma-2-27B: 27,227,128,320 parameters, tied embeddings."""
    return _gemma2(
        model_dim=4608, num_layers=46, heads=(32, 16), head_dim=128, hidden_dim=36_864, scalar=144
    )


def _gemma2(
    *,
    model_dim: int,
    num_layers: int,
    heads: tuple[int, int],
    head_dim: int,
    hidden_dim: int,
    scalar: int,
) -> ModelConfig:
    """``scalar``: scores are divided by its root, which need not be head_dim's."""
    num_q_heads, num_kv_heads = heads
    norm = NormConfig(epsilon=1e-6, scale_offset=1.0)

    def block(window: int | None) -> BlockConfig:
        return BlockConfig(
            mixer=GroupedAttentionConfig(
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=RopeConfig(),
                window=window,
                logit_soft_cap=50.0,
                scale=float(scalar) ** -0.5,
            ),
            feed_forward=MlpConfig(hidden_dim=hidden_dim, kind=MlpKind.GEGLU_TANH),
            norm=norm,
            norm_placement=NormPlacement.SANDWICH,
        )

    return ModelConfig(
        vocab_size=256_000,
        model_dim=model_dim,
        max_positions=8192,
        stacks=stacked(block(4096), block(None), num_layers=num_layers),
        tie_embeddings=True,
        embedding_scale=math.sqrt(model_dim),
        final_norm=norm,
        logit_soft_cap=30.0,
    )
