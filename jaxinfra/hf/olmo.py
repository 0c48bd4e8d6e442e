"""Configs of OLMo 1 to 3 and OLMoE (arXiv 2402.00838, 2501.00656, 2409.02060), both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import NormKind, NormPlacement, QkNormOver
from jaxinfra.config.model import ModelConfig, NormConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import read_rope, read_ropes_by_type
from jaxinfra.hf.shared import (
    FULL,
    SLIDING,
    decoder_config,
    decoder_keys,
    dense_block,
    layer_types,
    renamed,
    rotated_by_type,
    type_keys,
    with_ropes_by_type,
)
from jaxinfra.hf.sparse import LOSSES, experts_keys, read_experts
from jaxinfra.hf.weights import (
    LLAMA,
    MLP,
    OUT,
    PRE_NORMS,
    PROJECTIONS,
    QKV,
    Family,
    experts,
    head_norms,
    norm,
)

_THETA = 500_000.0
_OVER_ALL = QkNormOver.ALL_HEADS


def read_olmo(keys: Keys) -> ModelConfig:
    """Reads OLMo 1: LayerNorm without learned numbers, clipped queries, keys and values."""
    return decoder_config(
        keys,
        norm=NormConfig(kind=NormKind.LAYER, scale=False),
        attention_bias=keys.flag("attention_bias", False),
        qkv_clip=keys.number("clip_qkv", None),
    )


def write_olmo(config: ModelConfig) -> dict[str, Any]:
    """Writes OLMo 1; inverse of ``read_olmo``."""
    attention, _ = dense_block(config)
    keys = renamed(decoder_keys(config), rms_norm_eps=None)
    return keys | {"attention_bias": attention.out_bias, "clip_qkv": attention.qkv_clip}


def read_olmo2(keys: Keys) -> ModelConfig:
    """Reads OLMo 2: norms after each layer only, and norms over all heads."""
    return _normed_after(keys, [{}])


def read_olmo3(keys: Keys) -> ModelConfig:
    """Reads OLMo 3: OLMo 2 with windows, whose layers keep the rotation of pretraining."""
    keys.require("sliding_window")
    types, windows = layer_types(keys, every=4)
    max_positions = keys.integer("max_position_embeddings")
    ropes = read_ropes_by_type(keys, (SLIDING, FULL), max_positions=max_positions)
    if ropes is None:
        full = read_rope(keys, max_positions=max_positions, default_theta=_THETA)
        if full.theta != _THETA:
            raise ConfigError(
                f"rope_theta={full.theta} for OLMo 3: releases of the reference differ in whether "
                "layers with windows have it; write rope_parameters with an entry for each type"
            )
        ropes = {SLIDING: RopeConfig(theta=full.theta), FULL: full}
    return _normed_after(keys, rotated_by_type(types, windows, ropes), rope=ropes[FULL])


def _normed_after(keys: Keys, layers: list[dict[str, Any]], **more: Any) -> ModelConfig:
    return decoder_config(
        keys,
        layers=layers,
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
        qk_norm_over=_OVER_ALL,
        attention_bias=keys.flag("attention_bias", False),
        block={"norm_placement": NormPlacement.POST},
        **more,
    )


def write_olmo2(config: ModelConfig) -> dict[str, Any]:
    """Writes OLMo 2; inverse of ``read_olmo2``."""
    return decoder_keys(config) | {"attention_bias": dense_block(config)[0].out_bias}


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    """Writes OLMo 3; inverse of ``read_olmo3``."""
    return with_ropes_by_type(write_olmo2(config), config) | type_keys(config)


def read_olmoe(keys: Keys) -> ModelConfig:
    """Reads OLMoE: experts in every layer, norms over all heads before rotary."""
    keys.ignore(*LOSSES)
    dense = decoder_config(
        keys,
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
        qk_norm_over=_OVER_ALL,
        qkv_clip=keys.number("clip_qkv", None),
        attention_bias=keys.flag("attention_bias", False),
    )
    return read_experts(keys, dense, width_key="intermediate_size", renormalizes=False)


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    """Writes OLMoE; inverse of ``read_olmoe``."""
    attention, keys = experts_keys(config)
    return renamed(keys, head_dim=None) | {
        "attention_bias": attention.out_bias,
        "clip_qkv": attention.qkv_clip,
    }


_NORMS_OVER_ALL = head_norms("self_attn.q_norm", "self_attn.k_norm", over_all=True)
OLMO2 = dataclasses.replace(
    LLAMA,
    layer=(
        *norm("post_attention_layernorm", "attention_post_norm"),
        *norm("post_feedforward_layernorm", "mlp_post_norm"),
        *(*QKV, *OUT, *_NORMS_OVER_ALL, *MLP),
    ),
)
OLMOE = dataclasses.replace(
    LLAMA,
    layer=(*(*PRE_NORMS, *QKV, *OUT, *_NORMS_OVER_ALL, *experts("mlp", *PROJECTIONS)),),
)

FAMILIES = {
    "olmo": Family("OlmoForCausalLM", read_olmo, write_olmo, LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", read_olmo2, write_olmo2, OLMO2),
    "olmo3": Family("Olmo3ForCausalLM", read_olmo3, write_olmo3, OLMO2),
    "olmoe": Family("OlmoeForCausalLM", read_olmoe, write_olmoe, OLMOE),
}
