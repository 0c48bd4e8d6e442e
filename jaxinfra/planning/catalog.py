"""Models by name: our presets, published mixtures of experts, and the GPTs that others' figures
are given for.
"""

import json
from collections.abc import Callable
from pathlib import Path

from jaxinfra.config.presets import MODELS
from jaxinfra.core.errors import ConfigError, nearest
from jaxinfra.planning.from_config import shape_of
from jaxinfra.planning.from_hf import shape_of_hf
from jaxinfra.planning.shapes import Dense, Experts, Heads, Latent, LayerShape, ModelShape


def deepseek_v3() -> ModelShape:
    """DeepSeek-V3: 671B parameters, 37B active (arXiv 2412.19437, section 4.2)."""
    attention = Latent(
        num_q_heads=128, query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128
    )
    experts = Experts(
        num_experts=256, top_k=8, hidden_dim=2048, shared_hidden_dim=2048, router_bias=True
    )
    return ModelShape(
        name="deepseek_v3",
        vocab_size=129_280,
        model_dim=7168,
        layers=(
            LayerShape(attention=attention, feed_forward=Dense(hidden_dim=18_432), count=3),
            LayerShape(attention=attention, feed_forward=experts, count=58),
        ),
        tie_embeddings=False,
        max_positions=163_840,
    )


def mixtral_8x7b() -> ModelShape:
    """Mixtral-8x7B: 46.7B parameters, 12.9B active (arXiv 2401.04088)."""
    return _mixtral("mixtral_8x7b", width=4096, hidden=14_336, layers=32, heads=32)


def mixtral_8x22b() -> ModelShape:
    """Mixtral-8x22B: 140.6B parameters, 39.2B active."""
    return _mixtral("mixtral_8x22b", width=6144, hidden=16_384, layers=56, heads=48)


def qwen3_30b_a3b() -> ModelShape:
    """Qwen3-30B-A3B: 30.5B parameters, 3.3B active (arXiv 2505.09388, table 2)."""
    return _qwen3_moe("qwen3_30b_a3b", width=2048, hidden=768, layers=48, heads=(32, 4))


def qwen3_235b_a22b() -> ModelShape:
    """Qwen3-235B-A22B: 235B parameters, 22B active (arXiv 2505.09388, table 2)."""
    return _qwen3_moe("qwen3_235b_a22b", width=4096, hidden=1536, layers=94, heads=(64, 4))


def moe_1t() -> ModelShape:
    """A trillion parameters in 128 experts of which a token passes 8: the worked case of the docs.

    No published model: 64 layers of width 8192, grouped heads, experts of width 4864.
    """
    layer = LayerShape(
        attention=Heads(num_q_heads=64, num_kv_heads=8, head_dim=128, qk_norm=True),
        feed_forward=Experts(num_experts=128, top_k=8, hidden_dim=4864, shared_hidden_dim=4864),
        count=64,
    )
    return ModelShape(
        name="moe_1t",
        vocab_size=128_256,
        model_dim=8192,
        layers=(layer,),
        tie_embeddings=False,
        max_positions=131_072,
    )


def gpt(name: str, *, layers: int, width: int, heads: int, length: int = 2048) -> ModelShape:
    """A GPT of Megatron's papers: ungated mlp of 4 widths, biases, tied table of 51,200 ids."""
    layer = LayerShape(
        attention=Heads(
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=Dense(hidden_dim=4 * width, gated=False, bias=True),
        count=layers,
        norm_bias=True,
    )
    return ModelShape(
        name=name,
        vocab_size=51_200,
        model_dim=width,
        layers=(layer,),
        tie_embeddings=True,
        max_positions=length,
        learned_positions=True,
        final_norm_bias=True,
    )


def gpt3_175b() -> ModelShape:
    """GPT-3, 96 layers of width 12,288 (arXiv 2005.14165, table 2.1)."""
    return gpt("gpt3_175b", layers=96, width=12_288, heads=96)


def megatron_22b() -> ModelShape:
    """22B of arXiv 2205.05198, table 3."""
    return gpt("megatron_22b", layers=48, width=6144, heads=64)


def megatron_530b() -> ModelShape:
    """530B of arXiv 2205.05198, table 3."""
    return gpt("megatron_530b", layers=105, width=20_480, heads=128)


def megatron_1t() -> ModelShape:
    """1T of arXiv 2205.05198, table 3, and of arXiv 2104.04473, table 1."""
    return gpt("megatron_1t", layers=128, width=25_600, heads=160)


def _mixtral(name: str, *, width: int, hidden: int, layers: int, heads: int) -> ModelShape:
    layer = LayerShape(
        attention=Heads(num_q_heads=heads, num_kv_heads=8, head_dim=128),
        feed_forward=Experts(num_experts=8, top_k=2, hidden_dim=hidden),
        count=layers,
    )
    return ModelShape(
        name=name,
        vocab_size=32_000,
        model_dim=width,
        layers=(layer,),
        tie_embeddings=False,
        max_positions=32_768 if width == 4096 else 65_536,
    )


def _qwen3_moe(
    name: str, *, width: int, hidden: int, layers: int, heads: tuple[int, int]
) -> ModelShape:
    layer = LayerShape(
        attention=Heads(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=128, qk_norm=True),
        feed_forward=Experts(num_experts=128, top_k=8, hidden_dim=hidden),
        count=layers,
    )
    return ModelShape(
        name=name,
        vocab_size=151_936,
        model_dim=width,
        layers=(layer,),
        tie_embeddings=False,
        max_positions=40_960,
    )


SHAPES: dict[str, Callable[[], ModelShape]] = {
    preset.__name__: preset
    for preset in (
        deepseek_v3,
        mixtral_8x7b,
        mixtral_8x22b,
        qwen3_30b_a3b,
        qwen3_235b_a22b,
        moe_1t,
        gpt3_175b,
        megatron_22b,
        megatron_530b,
        megatron_1t,
    )
}
"""Models that are planned here and have no preset of their own to train."""


def find_model(name: str) -> ModelShape:
    """A preset's shape, or that of a ``config.json`` or of a directory that holds one."""
    if name in MODELS:
        return shape_of(MODELS[name](), name=name)
    if name in SHAPES:
        return SHAPES[name]()
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return shape_of_hf(_read(path), name=name)
    raise ConfigError(f"unknown model {name!r}{nearest(name, [*MODELS, *SHAPES])}")


def _read(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a config.json or a preset") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a config is an object")
    return values
