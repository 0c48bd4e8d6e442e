"""Configs of Gemma 1, Gemma 2 and of Gemma 3's text models, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import MlpKind, NormPlacement
from jaxinfra.config.model import ModelConfig, NormConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.llama import write_qwen2
from jaxinfra.hf.rope import read_rope, read_ropes_by_type
from jaxinfra.hf.shared import (
    ACTIVATION_NAMES,
    FULL,
    SLIDING,
    decoder_config,
    decoder_keys,
    dense_block,
    layer_types,
    rotated_by_type,
    with_ropes_by_type,
)
from jaxinfra.hf.weights import GEMMA2, LLAMA, QK_NORM, Family


def read_gemma2(keys: Keys) -> ModelConfig:
    """Reads Gemma 2: soft caps, alternating windows, norms before and after, scaled embeddings."""
    keys.require("num_key_value_heads", "head_dim", "sliding_window")
    keys.require("attn_logit_softcapping", "final_logit_softcapping")
    keys.expect("hidden_act", (keys.text("hidden_activation"),), "hidden_activation says otherwise")
    keys.expect("use_bidirectional_attention", (None, False), "attention here is causal")
    window = keys.integer("sliding_window", None)
    keys.expect("sliding_window_size", (window, None), "sliding_window says otherwise")
    return decoder_config(
        keys,
        activation_key="hidden_activation",
        windows=layer_types(keys, every=2)[1],
        attention_bias=keys.flag("attention_bias", False),
        scale=keys.number("query_pre_attn_scalar") ** -0.5,
        logit_soft_cap=keys.number("attn_logit_softcapping", None),
        norm=NormConfig(epsilon=keys.number("rms_norm_eps"), scale_offset=1.0),
        tied_by_default=True,
        block={"norm_placement": NormPlacement.SANDWICH},
        model={
            "embedding_scale": keys.integer("hidden_size") ** 0.5,
            "logit_soft_cap": keys.number("final_logit_softcapping", None),
        },
    )


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    """Writes Gemma 2; inverse of ``read_gemma2``."""
    attention, mlp = dense_block(config)
    keys = write_qwen2(config)
    for name in ("use_sliding_window", "max_window_layers", "hidden_act"):
        del keys[name]
    # The reference makes a mask of windows whether a layer has one or not.
    keys["sliding_window"] = keys["sliding_window"] or config.max_positions
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    scalar = round(scale**-2, 6)
    return keys | {
        "hidden_activation": ACTIVATION_NAMES.get(mlp.kind),
        "attention_bias": attention.out_bias,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": attention.logit_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }


def read_gemma(keys: Keys) -> ModelConfig:
    """Reads Gemma 1: scaled embeddings, norms of 1 + scale, GELU by its tanh approximation."""
    keys.require("num_key_value_heads", "head_dim")
    keys.expect("use_bidirectional_attention", (None, False), "attention here is causal")
    # The first releases said gelu and meant the approximation, as the reference takes it.
    keys.expect("hidden_act", ("gelu_pytorch_tanh", "gelu"), "Gemma has the tanh approximation")
    keys.expect("hidden_activation", (None, "gelu_pytorch_tanh"), "Gemma has the approximation")
    return decoder_config(
        keys,
        norm=NormConfig(epsilon=keys.number("rms_norm_eps"), scale_offset=1.0),
        attention_bias=keys.flag("attention_bias", False),
        tied_by_default=True,
        activation=MlpKind.GEGLU_TANH,
        model={"embedding_scale": keys.integer("hidden_size") ** 0.5},
    )


def write_gemma(config: ModelConfig) -> dict[str, Any]:
    """Writes Gemma 1; inverse of ``read_gemma``."""
    return decoder_keys(config) | {"attention_bias": dense_block(config)[0].out_bias}


def read_gemma3(keys: Keys) -> ModelConfig:
    """Reads Gemma 3 text: windows with a rotation of their own, norms of heads, SANDWICH norms."""
    keys.require("num_key_value_heads", "head_dim", "sliding_window")
    keys.expect("use_bidirectional_attention", (None, False), "attention here is causal")
    keys.expect("attn_logit_softcapping", (None,), "implementations differ in whether it is used")
    types, windows = layer_types(keys, every=keys.integer("sliding_window_pattern", 6))
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"), scale_offset=1.0)
    ropes = read_ropes(keys)
    return decoder_config(
        keys,
        activation_key="hidden_activation",
        layers=rotated_by_type(types, windows, ropes),
        rope=ropes[FULL],
        norm=norm,
        qk_norm=norm,
        attention_bias=keys.flag("attention_bias", False),
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        tied_by_default=True,
        block={"norm_placement": NormPlacement.SANDWICH},
        model={
            "embedding_scale": keys.integer("hidden_size") ** 0.5,
            "logit_soft_cap": keys.number("final_logit_softcapping", None),
        },
    )


def read_ropes(keys: Keys) -> dict[str, RopeConfig]:
    """Reads the rotary embedding of layers with a window and of those without."""
    max_positions = keys.integer("max_position_embeddings")
    found = read_ropes_by_type(keys, (SLIDING, FULL), max_positions=max_positions)
    if found is None:  # as releases before transformers 5 wrote
        local = RopeConfig(theta=keys.number("rope_local_base_freq", 10_000.0))
        full = read_rope(keys, max_positions=max_positions, default_theta=1e6)
        return {SLIDING: local, FULL: full}
    keys.ignore("rope_theta", "rope_local_base_freq")
    return found


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Writes Gemma 3 text; inverse of ``read_gemma3``."""
    return with_ropes_by_type(write_gemma2(config), config)


GEMMA3 = dataclasses.replace(GEMMA2, layer=(*GEMMA2.layer, *QK_NORM))

FAMILIES = {
    "gemma2": Family("Gemma2ForCausalLM", read_gemma2, write_gemma2, GEMMA2),
    "gemma": Family("GemmaForCausalLM", read_gemma, write_gemma, LLAMA),
    "gemma3_text": Family("Gemma3ForCausalLM", read_gemma3, write_gemma3, GEMMA3),
}
