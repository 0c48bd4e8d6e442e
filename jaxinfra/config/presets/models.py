"""Shapes of dense models. A preset is a function; a variant is ``dataclasses.replace`` of what it
returns.
"""

import functools
import math
from collections.abc import Callable

from jaxinfra.config.kinds import MlpKind, NormKind, NormPlacement
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


def preset(purpose: str, model: ModelConfig) -> Callable[[], ModelConfig]:
    """Makes a preset: a function that returns ``model`` and has ``purpose`` as docstring."""

    def made() -> ModelConfig:
        return model

    made.__doc__ = purpose
    return made


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


tiny = preset(
    "A Llama-like model that trains in minutes on two CPU cores.",
    dense(96, 3, (2, 2), 256, vocab=2048, positions=2048, tied=True),
)
small = preset(
    "A Llama-like model that trains in minutes on one GPU.",
    dense(768, 12, (12, 4), 2048, vocab=8192, positions=4096, tied=True),
)


_llama2 = functools.partial(dense, vocab=32_000, positions=4096)
llama2_7b = preset("Llama-2-7B: 6,738,415,616 parameters.", _llama2(4096, 32, (32, 32), 11_008))
llama2_13b = preset("Llama-2-13B: 13,015,864,320 parameters.", _llama2(5120, 40, (40, 40), 13_824))
llama2_70b = preset("Llama-2-70B: 68,976,648,192 parameters.", _llama2(8192, 80, (64, 8), 28_672))


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


llama3_8b = preset("Llama-3-8B: 8,030,261,248 parameters.", _llama3(4096, 32, (32, 8), 14_336))
llama3_70b = preset("Llama-3-70B: 70,553,706,496 parameters.", _llama3(8192, 80, (64, 8), 28_672))
llama31_8b = preset("Llama-3.1-8B: 8,030,261,248 parameters.", _llama31(4096, 32, (32, 8), 14_336))
llama31_70b = preset(
    "Llama-3.1-70B and Llama-3.3-70B: 70,553,706,496 parameters.",
    _llama31(8192, 80, (64, 8), 28_672),
)
llama3_405b = preset(
    "Llama-3.1-405B: 405,853,388,800 parameters.", _llama31(16_384, 126, (128, 8), 53_248)
)
llama32_1b = preset(
    "Llama-3.2-1B: 1,235,814,400 parameters, tied embeddings.",
    _llama31(2048, 16, (32, 8), 8192, factor=32.0, tied=True),
)
llama32_3b = preset(
    "Llama-3.2-3B: 3,212,749,824 parameters, tied embeddings.",
    _llama31(3072, 28, (24, 8), 8192, factor=32.0, tied=True),
)


_MISTRAL_NORM = NormConfig(epsilon=1e-5)
_mistral = functools.partial(dense, 4096, 32, (32, 8), 14_336, positions=32_768, norm=_MISTRAL_NORM)
mistral_7b = preset(
    "Mistral-7B-v0.1: 7,241,732,096 parameters, window 4096.", _mistral(vocab=32_000, window=4096)
)
mistral_7b_v03 = preset(
    "Mistral-7B-v0.3: 7,248,023,552 parameters, no window.",
    _mistral(vocab=32_768, rope=RopeConfig(theta=1e6)),
)


_phi3 = functools.partial(dense, norm=_MISTRAL_NORM)
phi3_mini_4k = preset(
    "Phi-3-mini-4k: 3,821,079,552 parameters, window 2047.",
    _phi3(3072, 32, (32, 32), 8192, vocab=32_064, positions=4096, window=2047),
)
phi3_medium_4k = preset(
    "Phi-3-medium-4k: 13,960,238,080 parameters, window 2047.",
    _phi3(5120, 40, (40, 10), 17_920, vocab=32_064, positions=4096, window=2047),
)
_phi4 = functools.partial(_phi3, rope=RopeConfig(theta=250_000.0))
phi4 = preset(
    "Phi-4: 14,659,507,200 parameters, in the architecture of Phi-3.",
    _phi4(5120, 40, (40, 10), 17_920, vocab=100_352, positions=16_384),
)


_QWEN_NORM = NormConfig(epsilon=1e-6)
_qwen = functools.partial(dense, rope=RopeConfig(theta=1e6), norm=_QWEN_NORM)
# Qwen 2.5 has biased queries, keys and values; the large models have a padded vocabulary.
_qwen25 = functools.partial(_qwen, vocab=152_064, positions=32_768, qkv_bias=True)
_qwen25_small = functools.partial(_qwen25, vocab=151_936, tied=True)
# Qwen 3 normalizes queries and keys by head.
qwen3 = functools.partial(_qwen, vocab=151_936, positions=40_960, head_dim=128, qk_norm=_QWEN_NORM)
qwen25_05b = preset(
    "Qwen2.5-0.5B-Instruct: 494,032,768 parameters, tied embeddings.",
    _qwen25_small(896, 24, (14, 2), 4864),
)
qwen25_15b = preset(
    "Qwen2.5-1.5B-Instruct: 1,543,714,304 parameters, tied embeddings.",
    _qwen25_small(1536, 28, (12, 2), 8960),
)
qwen25_3b = preset(
    "Qwen2.5-3B-Instruct: 3,085,938,688 parameters, tied embeddings.",
    _qwen25_small(2048, 36, (16, 2), 11_008),
)
qwen25_7b = preset(
    "Qwen2.5-7B-Instruct: 7,615,616,512 parameters.", _qwen25(3584, 28, (28, 4), 18_944)
)
qwen25_14b = preset(
    "Qwen2.5-14B-Instruct: 14,770,033,664 parameters.", _qwen25(5120, 48, (40, 8), 13_824)
)
qwen25_32b = preset(
    "Qwen2.5-32B-Instruct: 32,763,876,352 parameters.", _qwen25(5120, 64, (40, 8), 27_648)
)
qwen25_72b = preset(
    "Qwen2.5-72B-Instruct: 72,706,203,648 parameters.", _qwen25(8192, 80, (64, 8), 29_568)
)
qwen3_06b = preset(
    "Qwen3-0.6B: 596,049,920 parameters, tied embeddings.",
    qwen3(1024, 28, (16, 8), 3072, tied=True),
)
qwen3_17b = preset(
    "Qwen3-1.7B: 1,720,574,976 parameters, tied embeddings.",
    qwen3(2048, 28, (16, 8), 6144, tied=True),
)
qwen3_4b = preset(
    "Qwen3-4B: 4,022,468,096 parameters, tied embeddings.",
    qwen3(2560, 36, (32, 8), 9728, tied=True),
)
qwen3_8b = preset("Qwen3-8B: 8,190,735,360 parameters.", qwen3(4096, 36, (32, 8), 12_288))
qwen3_14b = preset("Qwen3-14B: 14,768,307,200 parameters.", qwen3(5120, 40, (40, 8), 17_408))
qwen3_32b = preset("Qwen3-32B: 32,762,123,264 parameters.", qwen3(5120, 64, (64, 8), 25_600))


def _gemma2(
    width: int, layers: int, heads: tuple[int, int], hidden: int, *, head_dim: int, scalar: int
) -> ModelConfig:
    """Gemma 2: soft caps, every other layer with a window, norms before and after each branch.
    Scores are divided by the root of ``scalar``, which need not be head_dim's.
    """
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
            feed_forward=MlpConfig(hidden_dim=hidden, kind=MlpKind.GEGLU_TANH),
            norm=norm,
            norm_placement=NormPlacement.SANDWICH,
        )

    return ModelConfig(
        vocab_size=256_000,
        model_dim=width,
        max_positions=8192,
        stacks=stacked(block(4096), block(None), num_layers=layers),
        tie_embeddings=True,
        embedding_scale=math.sqrt(width),
        final_norm=norm,
        logit_soft_cap=30.0,
    )


gemma2_2b = preset(
    "Gemma-2-2B: 2,614,341,888 parameters, tied embeddings.",
    _gemma2(2304, 26, (8, 4), 9216, head_dim=256, scalar=256),
)
gemma2_9b = preset(
    "Gemma-2-9B: 9,241,705,984 parameters, tied embeddings.",
    _gemma2(3584, 42, (16, 8), 14_336, head_dim=256, scalar=256),
)
gemma2_27b = preset(
    "Gemma-2-27B: 27,227,128,320 parameters, tied embeddings.",
    _gemma2(4608, 46, (32, 16), 36_864, head_dim=128, scalar=144),
)


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
gpt2 = preset("GPT-2 small: 124,439,808 parameters.", _gpt2(768, 12, 12))
gpt2_medium = preset("GPT-2 medium: 354,823,168 parameters.", _gpt2(1024, 24, 16))
gpt2_large = preset("GPT-2 large: 774,030,080 parameters.", _gpt2(1280, 36, 20))
gpt2_xl = preset("GPT-2 XL: 1,557,611,200 parameters.", _gpt2(1600, 48, 25))


megatron_gpt = functools.partial(gpt, vocab=51_200, positions=2048)
gpt3_175b = preset(
    "GPT-3 (arXiv 2005.14165, table 2.1): 174,615,846,912 parameters.", megatron_gpt(12_288, 96, 96)
)
megatron_22b = preset(
    "The 22B GPT of arXiv 2205.05198, table 3: 22,074,273,792 parameters.",
    megatron_gpt(6144, 48, 64),
)
megatron_530b = preset(
    "The 530B GPT of arXiv 2205.05198, table 3: 529,600,819,200 parameters.",
    megatron_gpt(20_480, 105, 128),
)
megatron_1t = preset(
    "The 1T GPT of arXiv 2205.05198, table 3, as of 2104.04473: 1,008,038,758,400 parameters.",
    megatron_gpt(25_600, 128, 160),
)
