"""Configs of Cohere's Command R and Command A, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import Branches, NormKind, QkNormOver
from jaxinfra.config.model import ModelConfig, NormConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import read_rope
from jaxinfra.hf.shared import (
    decoder_config,
    decoder_keys,
    dense_block,
    layer_types,
    renamed,
    type_keys,
)
from jaxinfra.hf.weights import LLAMA, MLP, OUT, QKV, Family, norm


def read_cohere(keys: Keys) -> ModelConfig:
    """Reads Command R: layers side by side behind one LayerNorm without bias, scaled logits."""
    has_norms = keys.flag("use_qk_norm", False)
    return _read(
        keys,
        default_theta=500_000.0,
        qk_norm=_norm(keys) if has_norms else None,
        qk_norm_over=QkNormOver.EACH_HEAD,
    )


def read_cohere2(keys: Keys) -> ModelConfig:
    """Reads Command R7B and A: layers with a window are rotated, the others are not."""
    keys.require("sliding_window")
    every = keys.integer("sliding_window_pattern", 4)
    keys.expect("layer_switch", (every, None), "sliding_window_pattern says otherwise")
    _, windows = layer_types(keys, every=every)
    rope = read_rope(
        keys, max_positions=keys.integer("max_position_embeddings"), pairs=RopePairs.NEIGHBOURS
    )
    # Older configs say in words what the types of layers say.
    keys.expect("order_of_interleaved_layers", ("local_attn_first", None), "layer_types says it")
    return _read(
        keys,
        layers=[{"window": window, "rope": rope if window else None} for window in windows],
        rope=rope,
    )


def _norm(keys: Keys) -> NormConfig:
    return NormConfig(kind=NormKind.LAYER, epsilon=keys.number("layer_norm_eps", 1e-5))


def _read(keys: Keys, **more: Any) -> ModelConfig:
    keys.expect("position_embedding_type", ("rope_gptj", None), "neighbours are rotated")
    keys.expect("rotary_pct", (1.0, None), "whole heads are rotated")
    keys.expect("use_parallel_block", (True, None), "layers are side by side here")
    keys.expect("use_gated_activation", (True, None), "feed-forward layers have gates here")
    keys.expect("use_embedding_sharing", (True, None), "tie_word_embeddings says otherwise")
    keys.expect("use_parallel_embedding", (False, True, None), "a switch of training code")
    keys.ignore("model_max_length")
    return decoder_config(
        keys,
        norm=_norm(keys),
        pairs=RopePairs.NEIGHBOURS,
        attention_bias=keys.flag("attention_bias", False),
        tied_by_default=True,
        block={"branches": Branches.SHARED_NORM},
        model={"logit_scale": keys.number("logit_scale", 0.0625)},
        **more,
    )


def write_cohere(config: ModelConfig) -> dict[str, Any]:
    """Writes Command R; inverse of ``read_cohere``."""
    attention, _ = dense_block(config)
    return _keys(config) | {"use_qk_norm": attention.qk_norm is not None}


def write_cohere2(config: ModelConfig) -> dict[str, Any]:
    """Writes Command R7B and A; inverse of ``read_cohere2``."""
    return _keys(config) | type_keys(config)


def _keys(config: ModelConfig) -> dict[str, Any]:
    keys = renamed(decoder_keys(config), rms_norm_eps="layer_norm_eps")
    return keys | {
        "logit_scale": config.logit_scale,
        "attention_bias": dense_block(config)[0].out_bias,
    }


COHERE = dataclasses.replace(
    LLAMA,
    layer=(
        *norm("input_layernorm", "attention_norm"),
        *norm("self_attn.q_norm", "attention/query_norm", "N H -> N H"),
        *norm("self_attn.k_norm", "attention/key_norm", "K H -> K H"),
        *(*QKV, *OUT, *MLP),
    ),
)

FAMILIES = {
    "cohere": Family("CohereForCausalLM", read_cohere, write_cohere, COHERE),
    "cohere2": Family("Cohere2ForCausalLM", read_cohere2, write_cohere2, COHERE),
}
