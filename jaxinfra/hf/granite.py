"""Configs of Granite 3, dense and with experts, and of Granite 4 with Mamba 2, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.model import ExpertsConfig, ModelConfig
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.mamba import (
    hybrid_mixer_keys,
    read_hybrid_mixer,
    smallest_mixer,
    state_space,
)
from jaxinfra.hf.shared import (
    FULL,
    LINEAR,
    as_attending,
    decoder_config,
    decoder_keys,
    dense_block,
    inverse,
    state_types,
    with_mixers,
)
from jaxinfra.hf.sparse import LOSSES, experts_keys, layers_of, read_experts
from jaxinfra.hf.weights import ATTENDS, LLAMA, OUT, PRE_NORMS, QKV, Family, Rule, rule


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


def read_granitemoehybrid(keys: Keys) -> ModelConfig:
    """Reads Granite 4: Mamba 2 and attention, each with experts and a shared one, or dense."""
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.ignore(*LOSSES)
    wide = keys.integer("shared_intermediate_size")
    keys.ignore("init_method")
    keys.expect("normalization_function", ("rmsnorm", None), "norms are RMSNorm here")
    keys.expect("position_embedding_type", (None, "nope", "rope"), "known are rope and nope")
    is_rotated = keys.text("position_embedding_type", None) == "rope"
    if not is_rotated:
        keys.ignore("rope_parameters", "rope_theta", "rope_scaling")
    model = _dense(keys, hidden_dim=wide, has_rope=is_rotated)
    num_experts = keys.named("num_local_experts", "num_experts")
    keys.ignore("intermediate_size", "num_experts_per_tok")
    if num_experts > 0:
        model = read_experts(keys, model, width_key="intermediate_size", shared_hidden_dim=wide)
    mixer = read_hybrid_mixer(keys, width=keys.integer("mamba_expand", 2) * model.model_dim)
    types = state_types(keys, [LINEAR] * model.num_layers)
    return with_mixers(model, [mixer if each == LINEAR else None for each in types])


def _dense(keys: Keys, **more: Any) -> ModelConfig:
    return decoder_config(
        keys,
        attention_bias=keys.flag("attention_bias", False),
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


def write_granitemoehybrid(config: ModelConfig) -> dict[str, Any]:
    """Writes Granite 4; inverse of ``read_granitemoehybrid``."""
    alike, mixer = as_attending(config, smallest_mixer(config))
    attention = alike.blocks[0].mixer
    if isinstance(alike.blocks[0].feed_forward, ExpertsConfig):
        keys = write_granitemoeshared(alike)
    else:
        keys = write_granite(alike) | {"num_local_experts": 0}
        keys["shared_intermediate_size"] = keys.pop("intermediate_size")
    return keys | {
        **hybrid_mixer_keys(mixer, config.model_dim),
        "layer_types": [FULL if b.mixer == attention else LINEAR for b in config.layers],
        "position_embedding_type": None if attention.rope is None else "rope",
    }


def _multipliers(config: ModelConfig) -> dict[str, Any]:
    block = config.blocks[0]
    scale = block.mixer.scale
    return {
        "attention_multiplier": block.mixer.head_dim**-0.5 if scale is None else scale,
        "residual_multiplier": block.residual_scale,
        "embedding_multiplier": config.embedding_scale,
        "logits_scaling": inverse(config.logit_scale),
    }


_SHARED = "shared_mlp.input_linear.weight"
_FEED_FORWARD = (
    rule("block_sparse_moe.router.layer.weight", "mlp/router/weight", "E D -> D E"),
    Rule(
        name="block_sparse_moe.input_linear.weight",
        parts=(("mlp/gate", "E F D -> E D F"), ("mlp/up", "E F D -> E D F")),
        fused_dim=1,
    ),
    rule("block_sparse_moe.output_linear.weight", "mlp/down", "E D F -> E F D"),
    Rule(
        name=_SHARED,
        parts=(("mlp/shared_gate/weight", "F D -> D F"), ("mlp/shared_up/weight", "F D -> D F")),
    ),
    rule("shared_mlp.output_linear.weight", "mlp/shared_down/weight", "D F -> F D"),
)
GRANITE_MOE = dataclasses.replace(LLAMA, layer=(*PRE_NORMS, *QKV, *OUT, *_FEED_FORWARD))
GRANITE_HYBRID = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *ATTENDS, *state_space("mamba"), *_FEED_FORWARD),
        # Without experts, the shared one is the whole layer.
        Rule(
            name=_SHARED, parts=(("mlp/gate/weight", "F D -> D F"), ("mlp/up/weight", "F D -> D F"))
        ),
        rule("shared_mlp.output_linear.weight", "mlp/down/weight", "D F -> F D"),
    ),
)

FAMILIES = {
    "granite": Family("GraniteForCausalLM", read_granite, write_granite, LLAMA),
    "granitemoe": Family("GraniteMoeForCausalLM", read_granitemoe, write_granitemoe, GRANITE_MOE),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM", read_granitemoeshared, write_granitemoeshared, GRANITE_MOE
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", read_granitemoehybrid, write_granitemoehybrid, GRANITE_HYBRID
    ),
}
