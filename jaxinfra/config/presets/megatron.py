"""GPTs of Megatron's papers and GPT-3, which others' figures are given for."""

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets.models import gpt


def megatron_gpt(*, layers: int, width: int, heads: int) -> ModelConfig:
    """51,200 ids and 2,048 positions, without dropout."""
    return gpt(
        vocab_size=51_200,
        max_positions=2048,
        dropout_rate=0.0,
        model_dim=width,
        num_layers=layers,
        num_heads=heads,
    )


def gpt3_175b() -> ModelConfig:
    """GPT-3 (arXiv 2005.14165, table 2.1): 174,615,846,912 parameters."""
    return megatron_gpt(layers=96, width=12_288, heads=96)


def megatron_22b() -> ModelConfig:
    """22B of arXiv 2205.05198, table 3: 22,074,273,792 parameters."""
    return megatron_gpt(layers=48, width=6144, heads=64)


def megatron_530b() -> ModelConfig:
    """530B of arXiv 2205.05198, table 3: 529,600,819,200 parameters."""
    return megatron_gpt(layers=105, width=20_480, heads=128)


def megatron_1t() -> ModelConfig:
    """1T of arXiv 2205.05198, table 3, as of 2104.04473: 1,008,038,758,400 parameters."""
    return megatron_gpt(layers=128, width=25_600, heads=160)
