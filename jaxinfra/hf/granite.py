"""Configs of Granite 3, dense and with experts, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.model import ModelConfig
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import decoder_config, decoder_keys, dense_block, inverse
from jaxinfra.hf.sparse import LOSSES, experts_keys, layers_of, read_experts
from jaxinfra.hf.weights import LLAMA, OUT, PRE_NORMS, QKV, Rule, rule


def read_granite(keys: Keys) -> ModelConfig:
    """Reads Granite 3: Llama with multipliers of embeddings, scores, layers' results and logits."""
    return _dense(keys, mlp_bias=keys.flag("mlp_bias", False))


def read_granitemoe(keys: Keys) -> ModelConfig:
    """Reads Granite 3 with experts in every layer."""
    keys.ignore(*LOSSES)
    return read_experts(keys, _dense(keys), width_key="intermediate_size")


def read_granitemoeshared(keys: Keys) -> ModelConfig:
    """Reads Granite 3 with experts in every layer, and a shared one."""
    keys.ignore(*LOSSES)
    return read_experts(
        keys,
        _dense(keys),
        width_key="intermediate_size",
        shared_hidden_dim=keys.integer("shared_intermediate_size", 0),
    )


def _dense(keys: Keys, **more: Any) -> ModelConfig:
    bias = keys.flag("attention_bias", False)
    return decoder_config(
        keys,
        qkv_bias=bias,
        out_bias=bias,
        scale=keys.number("attention_multiplier", 1.0),
        block={"residual_scale": keys.number("residual_multiplier", 1.0)},
        model={
            "embedding_scale": keys.number("embedding_multiplier", 1.0),
            "logit_scale": 1.0 / keys.number("logits_scaling", 1.0),
        },
        **more,
    )


def write_granite(config: ModelConfig) -> dict[str, Any]:
    """Writes Granite 3; inverse of ``read_granite``."""
    attention, mlp = dense_block(config)
    return decoder_keys(config) | {
        "attention_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
        **_multipliers(config),
    }


def write_granitemoe(config: ModelConfig) -> dict[str, Any]:
    """Writes Granite 3 with experts; inverse of ``read_granitemoe``."""
    attention, keys = experts_keys(config)
    keys["num_local_experts"] = keys.pop("num_experts")
    del keys["norm_topk_prob"]
    return keys | {"attention_bias": attention.out_bias, **_multipliers(config)}


def write_granitemoeshared(config: ModelConfig) -> dict[str, Any]:
    """Writes Granite 3 with experts and a shared one; inverse of ``read_granitemoeshared``."""
    _, experts, _ = layers_of(config)
    return write_granitemoe(config) | {"shared_intermediate_size": experts.shared_hidden_dim}


def _multipliers(config: ModelConfig) -> dict[str, Any]:
    block = config.blocks[0]
    scale = block.mixer.scale
    return {
        "attention_multiplier": block.mixer.head_dim**-0.5 if scale is None else scale,
        "residual_multiplier": block.residual_scale,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": inverse(config.logit_scale),
    }


GRANITE_MOE = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *QKV, *OUT),
        rule("block_sparse_moe.router.layer.weight", "mlp/router/weight", "E D -> D E"),
        Rule(
            name="block_sparse_moe.input_linear.weight",
            parts=(("mlp/gate", "E F D -> E D F"), ("mlp/up", "E F D -> E D F")),
            fused_dim=1,
        ),
        rule("block_sparse_moe.output_linear.weight", "mlp/down", "E D F -> E F D"),
        Rule(
            name="shared_mlp.input_linear.weight",
            parts=(
                ("mlp/shared_gate/weight", "F D -> D F"),
                ("mlp/shared_up/weight", "F D -> D F"),
            ),
        ),
        rule("shared_mlp.output_linear.weight", "mlp/shared_down/weight", "D F -> F D"),
    ),
)
