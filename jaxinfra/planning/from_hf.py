"""Shapes of Hugging Face configs: what this code base runs through its own reader, mixtures of
experts and latent attention by the tables here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfra.core.errors import ConfigError, nearest
from jaxinfra.models.hf import from_hf_config
from jaxinfra.models.hf.config import FAMILIES
from jaxinfra.models.hf.keys import Keys
from jaxinfra.planning.from_config import shape_of
from jaxinfra.planning.shapes import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    Heads,
    Latent,
    LayerShape,
    ModelShape,
)


def shape_of_hf(values: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a ``config.json`` describes.

    Raises:
        ConfigError: an architecture without an entry here, or a required key that is missing.
    """
    model_type = values.get("model_type")
    if model_type in FAMILIES:
        return shape_of(from_hf_config(values), name=name)
    if model_type not in _SPARSE:
        known = [*FAMILIES, *_SPARSE]
        raise ConfigError(
            f"{name}: model_type={model_type!r} is not known to the planner"
            f"{nearest(str(model_type), known)}"
        )
    return _SPARSE[model_type](Keys(values, what=f"{model_type} config"), name)


def _assemble(keys: Keys, name: str, layers: tuple[LayerShape, ...]) -> ModelShape:
    return ModelShape(
        name=name,
        vocab_size=keys.integer("vocab_size"),
        model_dim=keys.integer("hidden_size"),
        layers=layers,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        max_positions=keys.integer("max_position_embeddings"),
    )


def _heads(keys: Keys, *, qkv_bias: bool = False, qk_norm: bool = False) -> Heads:
    heads = keys.integer("num_attention_heads")
    return Heads(
        num_q_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", keys.integer("hidden_size") // heads),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        window=keys.integer("sliding_window", None),
    )


def _mixtral(keys: Keys, name: str) -> ModelShape:
    layer = LayerShape(
        attention=_heads(keys),
        feed_forward=Experts(
            num_experts=keys.integer("num_local_experts"),
            top_k=keys.integer("num_experts_per_tok"),
            hidden_dim=keys.integer("intermediate_size"),
        ),
        count=keys.integer("num_hidden_layers"),
    )
    return _assemble(keys, name, (layer,))


def _qwen2_moe(keys: Keys, name: str) -> ModelShape:
    experts = Experts(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer("moe_intermediate_size"),
        shared_hidden_dim=keys.integer("shared_expert_intermediate_size", 0),
        shared_gate=True,
    )
    return _qwen_moe(keys, name, _heads(keys, qkv_bias=True), experts)


def _qwen3_moe(keys: Keys, name: str) -> ModelShape:
    experts = Experts(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer("moe_intermediate_size"),
    )
    bias = keys.flag("attention_bias", False)
    return _qwen_moe(keys, name, _heads(keys, qkv_bias=bias, qk_norm=True), experts)


def _qwen_moe(keys: Keys, name: str, attention: Attention, experts: Experts) -> ModelShape:
    num_layers = keys.integer("num_hidden_layers")
    dense_only = set(keys.sequence("mlp_only_layers", ()))
    stride = keys.integer("decoder_sparse_step", 1)
    is_sparse = [i not in dense_only and (i + 1) % stride == 0 for i in range(num_layers)]
    dense = Dense(hidden_dim=keys.integer("intermediate_size"))
    return _assemble(keys, name, _kinds(attention, is_sparse, dense, experts))


def _deepseek(keys: Keys, name: str) -> ModelShape:
    """DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437); multi-token prediction is not counted."""
    num_layers = keys.integer("num_hidden_layers")
    attention = Latent(
        num_q_heads=keys.integer("num_attention_heads"),
        query_rank=keys.integer("q_lora_rank", None),
        kv_rank=keys.integer("kv_lora_rank"),
        nope_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
    )
    expert_dim = keys.integer("moe_intermediate_size")
    experts = Experts(
        num_experts=keys.integer("n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=expert_dim,
        shared_hidden_dim=expert_dim * keys.integer("n_shared_experts", 0),
        router_bias=keys.text("topk_method", "") == "noaux_tc",
    )
    first = keys.integer("first_k_dense_replace", 0)
    stride = keys.integer("moe_layer_freq", 1)
    is_sparse = [i >= first and i % stride == 0 for i in range(num_layers)]
    dense = Dense(hidden_dim=keys.integer("intermediate_size"))
    return _assemble(keys, name, _kinds(attention, is_sparse, dense, experts))


def _kinds(
    attention: Attention, is_sparse: list[bool], dense: Dense, experts: Experts
) -> tuple[LayerShape, ...]:
    kinds: list[tuple[FeedForward, int]] = [
        (dense, is_sparse.count(False)),
        (experts, is_sparse.count(True)),
    ]
    return tuple(
        LayerShape(attention=attention, feed_forward=feed_forward, count=count)
        for feed_forward, count in kinds
        if count
    )


_SPARSE: dict[str, Callable[[Keys, str], ModelShape]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
