"""Mixtures of experts: Mixtral, Qwen 3, gpt-oss, DeepSeek, and a shape of a trillion parameters."""

import dataclasses
import math

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    Stack,
    stacked,
)
from jaxinfra.config.presets import models
from jaxinfra.config.rope import RopeConfig, RopePairs, YarnScaling
from jaxinfra.config.routing import BalanceConfig, GroupScore, RoutingConfig, Scoring

_NORM = NormConfig(epsilon=1e-6)


def tiny_moe() -> ModelConfig:
    """``tiny`` with 8 experts, 2 of them active per token and together as wide as its mlp.

    1,194,912 parameters, 531,360 active (``tiny`` has 529,056).
    """
    return _with_experts(models.tiny(), num_experts=8, top_k=2)


def small_moe() -> ModelConfig:
    """``small`` with 16 experts, 4 of them active per token and together as wide as its mlp.

    251,824,896 parameters, 81,955,584 active (``small`` has 81,808,128).
    """
    return _with_experts(models.small(), num_experts=16, top_k=4)


def mixtral_8x7b() -> ModelConfig:
    """Mixtral-8x7B (arXiv 2401.04088): 46,702,792,704 parameters, 12.9B active."""
    return _mixtral(4096, 32, (32, 8), hidden=14_336, positions=32_768)


def mixtral_8x22b() -> ModelConfig:
    """Mixtral-8x22B: 140,620,634,112 parameters, 39.2B active."""
    return _mixtral(6144, 56, (48, 8), hidden=16_384, positions=65_536)


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B (arXiv 2505.09388, table 2): 30,532,122,624 parameters, 3.3B active."""
    return _qwen3(2048, 48, (32, 4), hidden=768)


def qwen3_235b_a22b() -> ModelConfig:
    """Qwen3-235B-A22B (arXiv 2505.09388, table 2): 235,093,634,560 parameters, 22B active."""
    return _qwen3(4096, 94, (64, 4), hidden=1536)


def gpt_oss_20b() -> ModelConfig:
    """gpt-oss-20b (arXiv 2508.10925): 20,914,757,184 parameters, 3.6B active."""
    scaling = YarnScaling(factor=32.0, original_max_positions=4096, truncate=False)
    full = GroupedAttentionConfig(
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope=RopeConfig(theta=150_000.0, scaling=scaling),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
    )
    experts = ExpertsConfig(
        num_experts=32,
        top_k=4,
        hidden_dim=2880,
        kind=MlpKind.SWIGLU_CLAMPED,
        bias=True,
        routing=RoutingConfig(logit_bias=True),
    )
    norm = NormConfig(epsilon=1e-5)
    pattern = (
        BlockConfig(mixer=dataclasses.replace(full, window=window), feed_forward=experts, norm=norm)
        for window in (128, None)
    )
    return ModelConfig(
        vocab_size=201_088,
        model_dim=2880,
        max_positions=131_072,
        stacks=stacked(*pattern, num_layers=24),
        tie_embeddings=False,
        final_norm=norm,
    )


def deepseek_v2_lite() -> ModelConfig:
    """DeepSeek-V2-Lite (arXiv 2405.04434, appendix B): 15,706,484,224 parameters, 2.7B active."""
    experts = ExpertsConfig(
        num_experts=64,
        top_k=6,
        hidden_dim=1408,
        shared_hidden_dim=2 * 1408,
        routing=RoutingConfig(renormalize=False),
    )
    return _deepseek(
        _latent(num_heads=16, query_rank=None, all_dim=0.707),
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
    return _deepseek(
        _latent(num_heads=128, query_rank=1536, all_dim=1.0),
        experts,
        vocab_size=129_280,
        width=7168,
        dense_hidden=18_432,
        layers=(3, 58),
    )


def moe_1t() -> ModelConfig:
    """A model of 128 experts, 8 of them active per token: 998,736,158,720 parameters.

    The docs' example, not a published model: 64 layers of width 8192, grouped heads, experts of
    width 4864.
    """
    experts = ExpertsConfig(num_experts=128, top_k=8, hidden_dim=4864, shared_hidden_dim=4864)
    dense = models.dense(
        8192, 64, (64, 8), 4864, vocab=128_256, positions=131_072, norm=_NORM, qk_norm=_NORM
    )
    return _routed(dense, experts)


def _with_experts(dense: ModelConfig, *, num_experts: int, top_k: int) -> ModelConfig:
    """A dense model's active parameters, and a router's, of which there are few."""
    (block,) = dense.blocks
    assert isinstance(block.feed_forward, MlpConfig)
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_dim=block.feed_forward.hidden_dim // top_k,
        balance=BalanceConfig(switch_loss=0.01, z_loss=1e-3),
    )
    return _routed(dense, experts)


def _mixtral(
    width: int, layers: int, heads: tuple[int, int], *, hidden: int, positions: int
) -> ModelConfig:
    rope, norm = RopeConfig(theta=1e6), NormConfig(epsilon=1e-5)
    dense = models.dense(
        width, layers, heads, hidden, vocab=32_000, positions=positions, rope=rope, norm=norm
    )
    return _routed(dense, ExpertsConfig(num_experts=8, top_k=2, hidden_dim=hidden))


def _qwen3(width: int, layers: int, heads: tuple[int, int], *, hidden: int) -> ModelConfig:
    experts = ExpertsConfig(num_experts=128, top_k=8, hidden_dim=hidden)
    return _routed(models.qwen3(width, layers, heads, hidden), experts)


def _routed(dense: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    """A dense model with these experts in place of each mlp."""
    (block,) = dense.blocks
    routed = dataclasses.replace(block, feed_forward=experts)
    return dataclasses.replace(dense, stacks=stacked(routed, num_layers=dense.num_layers))


def _latent(*, num_heads: int, query_rank: int | None, all_dim: float) -> LatentAttentionConfig:
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


def _deepseek(
    attention: LatentAttentionConfig,
    experts: ExpertsConfig,
    *,
    vocab_size: int,
    width: int,
    dense_hidden: int,
    layers: tuple[int, int],
) -> ModelConfig:
    """A few dense layers, then layers with fine-grained experts, all with latent attention."""
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
