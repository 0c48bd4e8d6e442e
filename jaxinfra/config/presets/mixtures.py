"""Mixtures of experts: Mixtral, Qwen 3, gpt-oss, and a shape of a trillion parameters."""

import dataclasses

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.presets import models
from jaxinfra.config.rope import RopeConfig, YarnScaling
from jaxinfra.config.routing import BalanceConfig, RoutingConfig

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
    return _mixtral(width=4096, hidden=14_336, layers=32, heads=32, max_positions=32_768)


def mixtral_8x22b() -> ModelConfig:
    """Mixtral-8x22B: 140,620,634,112 parameters, 39.2B active."""
    return _mixtral(width=6144, hidden=16_384, layers=56, heads=48, max_positions=65_536)


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B (arXiv 2505.09388, table 2): 30,532,122,624 parameters, 3.3B active."""
    return _qwen3(width=2048, hidden=768, layers=48, heads=(32, 4))


def qwen3_235b_a22b() -> ModelConfig:
    """Qwen3-235B-A22B (arXiv 2505.09388, table 2): 235,093,634,560 parameters, 22B active."""
    return _qwen3(width=4096, hidden=1536, layers=94, heads=(64, 4))


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


def moe_1t() -> ModelConfig:
    """A model of 128 experts, 8 of them active per token: 998,736,158,720 parameters.

    The docs' example, not a published model: 64 layers of width 8192, grouped heads, experts of
    width 4864.
    """
    attention = GroupedAttentionConfig(
        num_q_heads=64, num_kv_heads=8, head_dim=128, rope=RopeConfig(), qk_norm=_NORM
    )
    experts = ExpertsConfig(num_experts=128, top_k=8, hidden_dim=4864, shared_hidden_dim=4864)
    return _model(
        attention, experts, vocab_size=128_256, width=8192, layers=64, max_positions=131_072
    )


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
    routed = dataclasses.replace(block, feed_forward=experts)
    return dataclasses.replace(dense, stacks=stacked(routed, num_layers=dense.num_layers))


def _mixtral(
    *, width: int, hidden: int, layers: int, heads: int, max_positions: int
) -> ModelConfig:
    attention = GroupedAttentionConfig(
        num_q_heads=heads, num_kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)
    )
    experts = ExpertsConfig(num_experts=8, top_k=2, hidden_dim=hidden)
    return _model(
        attention,
        experts,
        vocab_size=32_000,
        width=width,
        layers=layers,
        max_positions=max_positions,
        norm=NormConfig(epsilon=1e-5),
    )


def _qwen3(*, width: int, hidden: int, layers: int, heads: tuple[int, int]) -> ModelConfig:
    num_q_heads, num_kv_heads = heads
    attention = GroupedAttentionConfig(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        rope=RopeConfig(theta=1e6),
        qk_norm=_NORM,
    )
    experts = ExpertsConfig(num_experts=128, top_k=8, hidden_dim=hidden)
    return _model(
        attention, experts, vocab_size=151_936, width=width, layers=layers, max_positions=40_960
    )


def _model(
    attention: GroupedAttentionConfig,
    experts: ExpertsConfig,
    *,
    vocab_size: int,
    width: int,
    layers: int,
    max_positions: int,
    norm: NormConfig = _NORM,
) -> ModelConfig:
    block = BlockConfig(mixer=attention, feed_forward=experts, norm=norm)
    return ModelConfig(
        vocab_size=vocab_size,
        model_dim=width,
        max_positions=max_positions,
        stacks=stacked(block, num_layers=layers),
        tie_embeddings=False,
        final_norm=norm,
    )
