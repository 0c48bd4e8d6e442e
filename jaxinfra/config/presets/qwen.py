"""Qwen 2.5 (biased query, key and value) and Qwen 3 (query and key normalized by head)."""

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.rope import RopeConfig

_NORM = NormConfig(epsilon=1e-6)
_ROPE = RopeConfig(theta=1e6)


def qwen25_05b() -> ModelConfig:
    """Qwen2.5-0.5B-Instruct: 494,032,768 parameters, tied embeddings."""
    return _qwen25(model_dim=896, num_layers=24, heads=(14, 2), hidden_dim=4864, tied=True)


def qwen25_15b() -> ModelConfig:
    """Qwen2.5-1.5B-Instruct: 1,543,714,304 parameters, tied embeddings."""
    return _qwen25(model_dim=1536, num_layers=28, heads=(12, 2), hidden_dim=8960, tied=True)


def qwen25_3b() -> ModelConfig:
    """Qwen2.5-3B-Instruct: 3,085,938,688 parameters, tied embeddings."""
    return _qwen25(model_dim=2048, num_layers=36, heads=(16, 2), hidden_dim=11_008, tied=True)


def qwen25_7b() -> ModelConfig:
    """Qwen2.5-7B-Instruct: 7,615,616,512 parameters."""
    return _qwen25(model_dim=3584, num_layers=28, heads=(28, 4), hidden_dim=18_944)


def qwen25_14b() -> ModelConfig:
    """Qwen2.5-14B-Instruct: 14,770,033,664 parameters."""
    return _qwen25(model_dim=5120, num_layers=48, heads=(40, 8), hidden_dim=13_824)


def qwen25_32b() -> ModelConfig:
    """Qwen2.5-32B-Instruct: 32,763,876,352 parameters."""
    return _qwen25(model_dim=5120, num_layers=64, heads=(40, 8), hidden_dim=27_648)


def qwen25_72b() -> ModelConfig:
    """Qwen2.5-72B-Instruct: 72,706,203,648 parameters."""
    return _qwen25(model_dim=8192, num_layers=80, heads=(64, 8), hidden_dim=29_568)


def qwen3_06b() -> ModelConfig:
    """Qwen3-0.6B: 596,049,920 parameters, tied embeddings."""
    return _qwen3(model_dim=1024, num_layers=28, heads=(16, 8), hidden_dim=3072, tied=True)


def qwen3_17b() -> ModelConfig:
    """Qwen3-1.7B: 1,720,574,976 parameters, tied embeddings."""
    return _qwen3(model_dim=2048, num_layers=28, heads=(16, 8), hidden_dim=6144, tied=True)


def qwen3_4b() -> ModelConfig:
    """Qwen3-4B: 4,022,468,096 parameters, tied embeddings."""
    return _qwen3(model_dim=2560, num_layers=36, heads=(32, 8), hidden_dim=9728, tied=True)


def qwen3_8b() -> ModelConfig:
    """Qwen3-8B: 8,190,735,360 parameters."""
    return _qwen3(model_dim=4096, num_layers=36, heads=(32, 8), hidden_dim=12_288)


def qwen3_14b() -> ModelConfig:
    """Qwen3-14B: 14,768,307,200 parameters."""
    return _qwen3(model_dim=5120, num_layers=40, heads=(40, 8), hidden_dim=17_408)


def qwen3_32b() -> ModelConfig:
    """Qwen3-32B: 32,762,123,264 parameters."""
    return _qwen3(model_dim=5120, num_layers=64, heads=(64, 8), hidden_dim=25_600)


def _qwen25(
    *,
    model_dim: int,
    num_layers: int,
    heads: tuple[int, int],
    hidden_dim: int,
    tied: bool = False,
) -> ModelConfig:
    num_q_heads, num_kv_heads = heads
    return _model(
        GroupedAttentionConfig(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=model_dim // num_q_heads,
            rope=_ROPE,
            qkv_bias=True,
        ),
        # The large ones have a padded vocabulary.
        vocab_size=151_936 if tied else 152_064,
        model_dim=model_dim,
        num_layers=num_layers,
        hidden_dim=hidden_dim,
        max_positions=32_768,
        tied=tied,
    )


def _qwen3(
    *,
    model_dim: int,
    num_layers: int,
    heads: tuple[int, int],
    hidden_dim: int,
    tied: bool = False,
) -> ModelConfig:
    num_q_heads, num_kv_heads = heads
    return _model(
        GroupedAttentionConfig(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            rope=_ROPE,
            qk_norm=_NORM,
        ),
        vocab_size=151_936,
        model_dim=model_dim,
        num_layers=num_layers,
        hidden_dim=hidden_dim,
        max_positions=40_960,
        tied=tied,
    )


def _model(
    attention: GroupedAttentionConfig,
    *,
    vocab_size: int,
    model_dim: int,
    num_layers: int,
    hidden_dim: int,
    max_positions: int,
    tied: bool,
) -> ModelConfig:
    block = BlockConfig(mixer=attention, feed_forward=MlpConfig(hidden_dim=hidden_dim), norm=_NORM)
    return ModelConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        max_positions=max_positions,
        stacks=stacked(block, num_layers=num_layers),
        tie_embeddings=tied,
        final_norm=_NORM,
    )
