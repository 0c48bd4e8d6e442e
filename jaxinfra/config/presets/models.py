"""Shapes of dense models. A preset is a function; a variant is ``dataclasses.replace`` of it."""

import functools

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

_ROPE, _NORM = RopeConfig(), NormConfig()


def dense(
    width: int,
    layers: int,
    heads: tuple[int, int],
    hidden: int,
    *,
    vocab: int,
    positions: int,
    tied: bool = False,
    head_dim: int | None = None,
    rope: RopeConfig = _ROPE,
    norm: NormConfig = _NORM,
    qkv_bias: bool = False,
    qk_norm: NormConfig | None = None,
    window: int | None = None,
) -> ModelConfig:
    """Builds a model of Llama's block: RMSNorm, grouped attention with RoPE, SwiGLU, no biases.

    Args:
        heads: query heads and key/value heads.
        hidden: width of the feed-forward layer.
        head_dim: by default the width over the query heads.
    """
    num_q_heads, num_kv_heads = heads
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim or width // num_q_heads,
            rope=rope,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            window=window,
        ),
        feed_forward=MlpConfig(hidden_dim=hidden),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=vocab,
        model_dim=width,
        max_positions=positions,
        stacks=stacked(block, num_layers=layers),
        tie_embeddings=tied,
        final_norm=norm,
    )


def tiny() -> ModelConfig:
    """A Llama-like model that trains in minutes on two CPU cores."""
    return dense(96, 3, (2, 2), 256, vocab=2048, positions=2048, tied=True)


def small() -> ModelConfig:
    """A Llama-like model that trains in minutes on one GPU."""
    return dense(768, 12, (12, 4), 2048, vocab=8192, positions=4096, tied=True)


_llama2 = functools.partial(dense, vocab=32_000, positions=4096)


def llama2_7b() -> ModelConfig:
    """Llama-2-7B: 6,738,415,616 parameters."""
    return _llama2(4096, 32, (32, 32), 11_008)


def llama2_13b() -> ModelConfig:
    """Llama-2-13B: 13,015,864,320 parameters."""
    return _llama2(5120, 40, (40, 40), 13_824)


def llama2_70b() -> ModelConfig:
    """Llama-2-70B: 68,976,648,192 parameters."""
    return _llama2(8192, 80, (64, 8), 28_672)


_llama3 = functools.partial(dense, vocab=128_256, positions=8192, rope=RopeConfig(theta=500_000.0))


def _llama31(
    width: int,
    layers: int,
    heads: tuple[int, int],
    hidden: int,
    *,
    factor: float = 8.0,
    tied: bool = False,
) -> ModelConfig:
    """Builds a Llama 3 whose positions are extended from 8,192 to 131,072."""
    scaling = Llama3Scaling(
        factor=factor,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=8192,
    )
    rope = RopeConfig(theta=500_000.0, scaling=scaling)
    return _llama3(width, layers, heads, hidden, positions=131_072, rope=rope, tied=tied)


def llama3_8b() -> ModelConfig:
    """Llama-3-8B: 8,030,261,248 parameters."""
    return _llama3(4096, 32, (32, 8), 14_336)


def llama3_70b() -> ModelConfig:
    """Llama-3-70B: 70,553,706,496 parameters."""
    return _llama3(8192, 80, (64, 8), 28_672)


def llama31_8b() -> ModelConfig:
    """Llama-3.1-8B: 8,030,261,248 parameters."""
    return _llama31(4096, 32, (32, 8), 14_336)


def llama31_70b() -> ModelConfig:
    """Llama-3.1-70B and Llama-3.3-70B: 70,553,706,496 parameters."""
    return _llama31(8192, 80, (64, 8), 28_672)


def llama3_405b() -> ModelConfig:
    """Llama-3.1-405B: 405,853,388,800 parameters."""
    return _llama31(16_384, 126, (128, 8), 53_248)


def llama32_1b() -> ModelConfig:
    """Llama-3.2-1B: 1,235,814,400 parameters, tied embeddings."""
    return _llama31(2048, 16, (32, 8), 8192, factor=32.0, tied=True)


def llama32_3b() -> ModelConfig:
    """Llama-3.2-3B: 3,212,749,824 parameters, tied embeddings."""
    return _llama31(3072, 28, (24, 8), 8192, factor=32.0, tied=True)


_MISTRAL_NORM = NormConfig(epsilon=1e-5)


def mistral_7b() -> ModelConfig:
    """Mistral-7B-v0.1: 7,241,732,096 parameters, window 4096."""
    return dense(
        4096, 32, (32, 8), 14_336, vocab=32_000, positions=32_768, norm=_MISTRAL_NORM, window=4096
    )


def mistral_7b_v03() -> ModelConfig:
    """Mistral-7B-v0.3: 7,248,023,552 parameters, no window."""
    rope = RopeConfig(theta=1e6)
    return dense(
        4096, 32, (32, 8), 14_336, vocab=32_768, positions=32_768, norm=_MISTRAL_NORM, rope=rope
    )


_phi3 = functools.partial(dense, norm=_MISTRAL_NORM)


def phi3_mini_4k() -> ModelConfig:
    """Phi-3-mini-4k: 3,821,079,552 parameters, window 2047."""
    return _phi3(3072, 32, (32, 32), 8192, vocab=32_064, positions=4096, window=2047)


def phi3_medium_4k() -> ModelConfig:
    """Phi-3-medium-4k: 13,960,238,080 parameters, window 2047."""
    return _phi3(5120, 40, (40, 10), 17_920, vocab=32_064, positions=4096, window=2047)


def phi4() -> ModelConfig:
    """Phi-4: 14,659,507,200 parameters, in the architecture of Phi-3."""
    rope = RopeConfig(theta=250_000.0)
    return _phi3(5120, 40, (40, 10), 17_920, vocab=100_352, positions=16_384, rope=rope)


_QWEN_NORM = NormConfig(epsilon=1e-6)
_qwen = functools.partial(dense, rope=RopeConfig(theta=1e6), norm=_QWEN_NORM)
# Qwen 2.5 has biased queries, keys and values; the large models have a padded vocabulary.
_qwen25 = functools.partial(_qwen, vocab=152_064, positions=32_768, qkv_bias=True)
_qwen25_small = functools.partial(_qwen25, vocab=151_936, tied=True)
# Qwen 3 normalizes queries and keys by head.
_qwen3 = functools.partial(_qwen, vocab=151_936, positions=40_960, head_dim=128, qk_norm=_QWEN_NORM)


def qwen25_05b() -> ModelConfig:
    """Qwen2.5-0.5B-Instruct: 494,032,768 parameters, tied embeddings."""
    return _qwen25_small(896, 24, (14, 2), 4864)


def qwen25_15b() -> ModelConfig:
    """Qwen2.5-1.5B-Instruct: 1,543,714,304 parameters, tied embeddings."""
    return _qwen25_small(1536, 28, (12, 2), 8960)


def qwen25_3b() -> ModelConfig:
    """Qwen2.5-3B-Instruct: 3,085,938,688 parameters, tied embeddings."""
    return _qwen25_small(2048, 36, (16, 2), 11_008)


def qwen25_7b() -> ModelConfig:
    """Qwen2.5-7B-Instruct: 7,615,616,512 parameters."""
    return _qwen25(3584, 28, (28, 4), 18_944)


def qwen25_14b() -> ModelConfig:
    """Qwen2.5-14B-Instruct: 14,770,033,664 parameters."""
    return _qwen25(5120, 48, (40, 8), 13_824)


def qwen25_32b() -> ModelConfig:
    """Qwen2.5-32B-Instruct: 32,763,876,352 parameters."""
    return _qwen25(5120, 64, (40, 8), 27_648)


def qwen25_72b() -> ModelConfig:
    """Qwen2.5-72B-Instruct: 72,706,203,648 parameters."""
    return _qwen25(8192, 80, (64, 8), 29_568)


def qwen3_06b() -> ModelConfig:
    """Qwen3-0.6B: 596,049,920 parameters, tied embeddings."""
    return _qwen3(1024, 28, (16, 8), 3072, tied=True)


def qwen3_17b() -> ModelConfig:
    """Qwen3-1.7B: 1,720,574,976 parameters, tied embeddings."""
    return _qwen3(2048, 28, (16, 8), 6144, tied=True)


def qwen3_4b() -> ModelConfig:
    """Qwen3-4B: 4,022,468,096 parameters, tied embeddings."""
    return _qwen3(2560, 36, (32, 8), 9728, tied=True)


def qwen3_8b() -> ModelConfig:
    """Qwen3-8B: 8,190,735,360 parameters."""
    return _qwen3(4096, 36, (32, 8), 12_288)


def qwen3_14b() -> ModelConfig:
    """Qwen3-14B: 14,768,307,200 parameters."""
    return _qwen3(5120, 40, (40, 8), 17_408)


def qwen3_32b() -> ModelConfig:
    """Qwen3-32B: 32,762,123,264 parameters."""
    return _qwen3(5120, 64, (64, 8), 25_600)


def gpt(
    width: int, layers: int, heads: int, *, vocab: int, positions: int, dropout_rate: float = 0.0
) -> ModelConfig:
    """A GPT: learned positions, LayerNorm, biases, an ungated mlp of 4 widths, a tied table."""
    norm = NormConfig(kind=NormKind.LAYER, bias=True)
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            rope=None,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=MlpConfig(hidden_dim=4 * width, kind=MlpKind.GELU_TANH, bias=True),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=vocab,
        model_dim=width,
        max_positions=positions,
        stacks=stacked(block, num_layers=layers),
        tie_embeddings=True,
        learned_positions=True,
        final_norm=norm,
        dropout_rate=dropout_rate,
    )


_gpt2 = functools.partial(gpt, vocab=50_257, positions=1024, dropout_rate=0.1)


def gpt2() -> ModelConfig:
    """GPT-2 small: 124,439,808 parameters."""
    return _gpt2(768, 12, 12)


def gpt2_medium() -> ModelConfig:
    """GPT-2 medium: 354,823,168 parameters."""
    return _gpt2(1024, 24, 16)


def gpt2_large() -> ModelConfig:
    """GPT-2 large: 774,030,080 parameters."""
    return _gpt2(1280, 36, 20)


def gpt2_xl() -> ModelConfig:
    """GPT-2 XL: 1,557,611,200 parameters."""
    return _gpt2(1600, 48, 25)


megatron_gpt = functools.partial(gpt, vocab=51_200, positions=2048)


def gpt3_175b() -> ModelConfig:
    """GPT-3 (arXiv 2005.14165, table 2.1): 174,615,846,912 parameters."""
    return megatron_gpt(12_288, 96, 96)


def megatron_22b() -> ModelConfig:
    """The 22B GPT of arXiv 2205.05198, table 3: 22,074,273,792 parameters."""
    return megatron_gpt(6144, 48, 64)


def megatron_530b() -> ModelConfig:
    """The 530B GPT of arXiv 2205.05198, table 3: 529,600,819,200 parameters."""
    return megatron_gpt(20_480, 105, 128)


def megatron_1t() -> ModelConfig:
    """The 1T GPT of arXiv 2205.05198, table 3, as of 2104.04473: 1,008,038,758,400 parameters."""
    return megatron_gpt(25_600, 128, 160)
