"""Mistral 7B and the Phi-3 models of the short contexts: Llama's block, mostly with a window."""

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.rope import RopeConfig


def mistral_7b() -> ModelConfig:
    """Mistral-7B-v0.1: 7,241,732,096 parameters, window 4096."""
    return _model(
        vocab_size=32_000,
        model_dim=4096,
        num_layers=32,
        heads=(32, 8),
        hidden_dim=14_336,
        max_positions=32_768,
        window=4096,
    )


def mistral_7b_v03() -> ModelConfig:
    """Mistral-7B-v0.3: 7,248,023,552 parameters, no window."""
    return _model(
        vocab_size=32_768,
        model_dim=4096,
        num_layers=32,
        heads=(32, 8),
        hidden_dim=14_336,
        max_positions=32_768,
        theta=1e6,
    )


def phi3_mini_4k() -> ModelConfig:
    """Phi-3-mini-4k: 3,821,079,552 parameters, window 2047."""
    return _model(
        vocab_size=32_064,
        model_dim=3072,
        num_layers=32,
        heads=(32, 32),
        hidden_dim=8192,
        max_positions=4096,
        window=2047,
    )


def phi3_medium_4k() -> ModelConfig:
    """Phi-3-medium-4k: 13,960,238,080 parameters, window 2047."""
    return _model(
        vocab_size=32_064,
        model_dim=5120,
        num_layers=40,
        heads=(40, 10),
        hidden_dim=17_920,
        max_positions=4096,
        window=2047,
    )


def phi4() -> ModelConfig:
    """Phi-4: 14,659,507,200 parameters, in the architecture of Phi-3."""
    return _model(
        vocab_size=100_352,
        model_dim=5120,
        num_layers=40,
        heads=(40, 10),
        hidden_dim=17_920,
        max_positions=16_384,
        theta=250_000.0,
    )


def _model(
    *,
    vocab_size: int,
    model_dim: int,
    num_layers: int,
    heads: tuple[int, int],
    hidden_dim: int,
    max_positions: int,
    window: int | None = None,
    theta: float = 10_000.0,
) -> ModelConfig:
    num_q_heads, num_kv_heads = heads
    norm = NormConfig(epsilon=1e-5)
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=model_dim // num_q_heads,
            rope=RopeConfig(theta=theta),
            window=window,
        ),
        feed_forward=MlpConfig(hidden_dim=hidden_dim),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        max_positions=max_positions,
        stacks=stacked(block, num_layers=num_layers),
        tie_embeddings=False,
        final_norm=norm,
    )
