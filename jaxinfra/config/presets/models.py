"""Model shapes. A preset is a function; a variant is ``dataclasses.replace`` on its result."""

import dataclasses

from jaxinfra.config.kinds import MlpKind, NormKind
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.rope import Llama3Scaling, RopeConfig


def tiny() -> ModelConfig:
    """A Llama-like model that two CPU cores train in minutes."""
    return _llama(
        vocab_size=2048,
        model_dim=96,
        num_layers=3,
        heads=(2, 2),
        hidden_dim=256,
        max_positions=2048,
        tie_embeddings=True,
    )


def small() -> ModelConfig:
    """A Llama-like model for one GPU and a few minutes."""
    return _llama(
        vocab_size=8192,
        model_dim=768,
        num_layers=12,
        heads=(12, 4),
        hidden_dim=2048,
        max_positions=4096,
        tie_embeddings=True,
    )


def llama2_7b() -> ModelConfig:
    """Llama-2-7B: 6,738,415,616 parameters."""
    return _llama2(model_dim=4096, num_layers=32, heads=(32, 32), hidden_dim=11_008)


def llama2_13b() -> ModelConfig:
    """Llama-2-13B: 13,015,864,320 parameters."""
    return _llama2(model_dim=5120, num_layers=40, heads=(40, 40), hidden_dim=13_824)


def llama2_70b() -> ModelConfig:
    """Llama-2-70B: 68,976,648,192 parameters."""
    return _llama2(model_dim=8192, num_layers=80, heads=(64, 8), hidden_dim=28_672)


def llama3_8b() -> ModelConfig:
    """Llama-3-8B: 8,030,261,248 parameters."""
    return _llama3(model_dim=4096, num_layers=32, heads=(32, 8), hidden_dim=14_336)


def llama3_70b() -> ModelConfig:
    """Llama-3-70B: 70,553,706,496 parameters."""
    return _llama3(model_dim=8192, num_layers=80, heads=(64, 8), hidden_dim=28_672)


def llama31_8b() -> ModelConfig:
    """Llama-3.1-8B: 8,030,261,248 parameters."""
    return _long(llama3_8b(), factor=8.0)


def llama31_70b() -> ModelConfig:
    """Llama-3.1-70B and Llama-3.3-70B: 70,553,706,496 parameters."""
    return _long(llama3_70b(), factor=8.0)


def llama3_405b() -> ModelConfig:
    """Llama-3.1-405B: 405,853,388,800 parameters."""
    return _llama3(
        model_dim=16_384,
        num_layers=126,
        heads=(128, 8),
        hidden_dim=53_248,
        max_positions=131_072,
        scaling=_llama31_scaling(8.0),
    )


def llama32_1b() -> ModelConfig:
    """Llama-3.2-1B: 1,235,814,400 parameters, tied embeddings."""
    return _llama3(
        model_dim=2048,
        num_layers=16,
        heads=(32, 8),
        hidden_dim=8192,
        max_positions=131_072,
        scaling=_llama31_scaling(32.0),
        tie_embeddings=True,
    )


def llama32_3b() -> ModelConfig:
    """Llama-3.2-3B: 3,212,749,824 parameters, tied embeddings."""
    return _llama3(
        model_dim=3072,
        num_layers=28,
        heads=(24, 8),
        hidden_dim=8192,
        max_positions=131_072,
        scaling=_llama31_scaling(32.0),
        tie_embeddings=True,
    )


def gpt2() -> ModelConfig:
    """GPT-2 small: 124,439,808 parameters."""
    return _gpt2(model_dim=768, num_layers=12, num_heads=12)


def gpt2_medium() -> ModelConfig:
    """GPT-2 medium: 354,823,168 parameters."""
    return _gpt2(model_dim=1024, num_layers=24, num_heads=16)


def gpt2_large() -> ModelConfig:
    """GPT-2 large: 774,030,080 parameters."""
    return _gpt2(model_dim=1280, num_layers=36, num_heads=20)


def gpt2_xl() -> ModelConfig:
    """GPT-2 XL: 1,557,611,200 parameters."""
    return _gpt2(model_dim=1600, num_layers=48, num_heads=25)


def _llama31_scaling(factor: float) -> Llama3Scaling:
    return Llama3Scaling(
        factor=factor,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=8192,
    )


def _long(config: ModelConfig, *, factor: float) -> ModelConfig:
    (block,) = config.blocks
    rope = RopeConfig(theta=500_000.0, scaling=_llama31_scaling(factor))
    attention = dataclasses.replace(block.mixer, rope=rope)
    return dataclasses.replace(
        config,
        max_positions=131_072,
        stacks=stacked(dataclasses.replace(block, mixer=attention), num_layers=config.num_layers),
    )


def _llama2(
    *, model_dim: int, num_layers: int, heads: tuple[int, int], hidden_dim: int
) -> ModelConfig:
    return _llama(
        vocab_size=32_000,
        model_dim=model_dim,
        num_layers=num_layers,
        heads=heads,
        hidden_dim=hidden_dim,
        max_positions=4096,
    )


def _llama3(
    *,
    model_dim: int,
    num_layers: int,
    heads: tuple[int, int],
    hidden_dim: int,
    max_positions: int = 8192,
    scaling: Llama3Scaling | None = None,
    tie_embeddings: bool = False,
) -> ModelConfig:
    return _llama(
        vocab_size=128_256,
        model_dim=model_dim,
        num_layers=num_layers,
        heads=heads,
        hidden_dim=hidden_dim,
        max_positions=max_positions,
        rope=RopeConfig(theta=500_000.0, scaling=scaling),
        tie_embeddings=tie_embeddings,
    )


def _llama(
    *,
    vocab_size: int,
    model_dim: int,
    num_layers: int,
    heads: tuple[int, int],
    hidden_dim: int,
    max_positions: int,
    rope: RopeConfig | None = None,
    tie_embeddings: bool = False,
) -> ModelConfig:
    num_q_heads, num_kv_heads = heads
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            # Llama-3.2-3B and larger all use 128; 1B uses 64: always model_dim / num_q_heads.
            head_dim=model_dim // num_q_heads,
            rope=rope or RopeConfig(),
        ),
        feed_forward=MlpConfig(hidden_dim=hidden_dim),
    )
    return ModelConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        max_positions=max_positions,
        stacks=stacked(block, num_layers=num_layers),
        tie_embeddings=tie_embeddings,
    )


def _gpt2(*, model_dim: int, num_layers: int, num_heads: int) -> ModelConfig:
    return gpt(
        vocab_size=50_257,
        max_positions=1024,
        dropout_rate=0.1,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
    )


def gpt(
    *,
    vocab_size: int,
    max_positions: int,
    dropout_rate: float,
    model_dim: int,
    num_layers: int,
    num_heads: int,
) -> ModelConfig:
    """A GPT: learned positions, LayerNorm, biases, an ungated mlp of 4 widths, a tied table."""
    norm = NormConfig(kind=NormKind.LAYER, bias=True)
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            rope=None,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=MlpConfig(hidden_dim=4 * model_dim, kind=MlpKind.GELU_TANH, bias=True),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        max_positions=max_positions,
        stacks=stacked(block, num_layers=num_layers),
        tie_embeddings=True,
        learned_positions=True,
        final_norm=norm,
        dropout_rate=dropout_rate,
    )
