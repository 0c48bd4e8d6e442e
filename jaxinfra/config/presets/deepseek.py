"""DeepSeek-V2-Lite and V3: latent attention, a few dense layers, then fine-grained experts."""

import dataclasses
import math

from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    Stack,
)
from jaxinfra.config.rope import RopeConfig, RopePairs, YarnScaling
from jaxinfra.config.routing import GroupScore, RoutingConfig, Scoring

_NORM = NormConfig(epsilon=1e-6)


def deepseek_v2_lite() -> ModelConfig:
    """DeepSeek-V2-Lite (arXiv 2405.04434, appendix B): 15,706,484,224 parameters, 2.7B active."""
    experts = ExpertsConfig(
        num_experts=64,
        top_k=6,
        hidden_dim=1408,
        shared_hidden_dim=2 * 1408,
        routing=RoutingConfig(renormalize=False),
    )
    return _model(
        _attention(num_heads=16, query_rank=None, all_dim=0.707),
        experts,
        vocab_size=102_400,
        width=2048,
        dense_hidden=10_944,
        layers=(1, 26),
    )


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3 (arXiv 2412.19437, section 4.2): 671,026,419,200 parameters, 37B active."""
    routing = RoutingConfig(
        scoring=Scoring.SIGMOID,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        group_score=GroupScore.TOP2_SUM,
        correction_bias=True,
    )
    experts = ExpertsConfig(
        num_experts=256, top_k=8, hidden_dim=2048, shared_hidden_dim=2048, routing=routing
    )
    return _model(
        _attention(num_heads=128, query_rank=1536, all_dim=1.0),
        experts,
        vocab_size=129_280,
        width=7168,
        dense_hidden=18_432,
        layers=(3, 58),
    )


def _attention(*, num_heads: int, query_rank: int | None, all_dim: float) -> LatentAttentionConfig:
    """Heads of 128 + 64 over a latent of 512; YaRN's temperature is in the scores."""
    scaling = YarnScaling(factor=40.0, original_max_positions=4096, attention_factor=1.0)
    temperature = 0.1 * all_dim * math.log(scaling.factor) + 1.0
    return LatentAttentionConfig(
        num_q_heads=num_heads,
        query_rank=query_rank,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope=RopeConfig(scaling=scaling, pairs=RopePairs.NEIGHBOURS),
        norm=_NORM,
        scale=192**-0.5 * temperature * temperature,
    )


def _model(
    attention: LatentAttentionConfig,
    experts: ExpertsConfig,
    *,
    vocab_size: int,
    width: int,
    dense_hidden: int,
    layers: tuple[int, int],
) -> ModelConfig:
    """Dense layers, then layers with experts."""
    dense = BlockConfig(
        mixer=attention, feed_forward=MlpConfig(hidden_dim=dense_hidden), norm=_NORM
    )
    routed = dataclasses.replace(dense, feed_forward=experts)
    return ModelConfig(
        vocab_size=vocab_size,
        model_dim=width,
        max_positions=163_840,
        stacks=tuple(
            Stack(pattern=(block,), repeats=repeats)
            for block, repeats in zip((dense, routed), layers, strict=True)
        ),
        tie_embeddings=False,
        final_norm=_NORM,
    )
