"""GPTs of Megatron's papers and GPT-3, which others' figures are given for."""

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    MlpKind,
    ModelConfig,
    NormConfig,
    NormKind,
    stacked,
)


def gpt(*, layers: int, width: int, heads: int) -> ModelConfig:
    """Ungated mlp of 4 widths, biases, a tied table of 51,200 ids, 2,048 learned positions."""
    norm = NormConfig(kind=NormKind.LAYER, bias=True)
    attention = GroupedAttentionConfig(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )
    mlp = MlpConfig(hidden_dim=4 * width, kind=MlpKind.GELU_TANH, bias=True)
    block = BlockConfig(mixer=attention, feed_forward=mlp, norm=norm)
    return ModelConfig(
        vocab_size=51_200,
        model_dim=width,
        max_positions=2048,
        stacks=stacked(block, num_layers=layers),
        tie_embeddings=True,
        learned_positions=True,
        final_norm=norm,
    )


def gpt3_175b() -> ModelConfig:
    """GPT-3, 96 layers of width 12,288 (arXiv 2005.14165, table 2.1): PARAMS parameters."""
    return gpt(layers=96, width=12_288, heads=96)


def megatron_22b() -> ModelConfig:
    """22B of arXiv 2205.05198, table 3: PARAMS parameters."""
    return gpt(layers=48, width=6144, heads=64)


def megatron_530b() -> ModelConfig:
    """530B of arXiv 2205.05198, table 3: PARAMS parameters."""
    return gpt(layers=105, width=20_480, heads=128)


def megatron_1t() -> ModelConfig:
    """1T of arXiv 2205.05198, table 3, and of arXiv 2104.04473, table 1: PARAMS parameters."""
    return gpt(layers=128, width=25_600, heads=160)
