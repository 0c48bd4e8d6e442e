"""Configs of GLM 4 and of GLM 4.5 with experts, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import NormPlacement
from jaxinfra.config.model import ModelConfig, NormConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import decoder_config, decoder_keys, dense_block
from jaxinfra.hf.sparse import (
    LOSSES,
    read_experts_after_dense,
    read_sigmoid_routing,
    sigmoid_keys,
)
from jaxinfra.hf.weights import (
    DOWN,
    FUSED_GATE_UP,
    LLAMA,
    NEXT_LAYER,
    OUT,
    PRE_NORMS,
    PROJECTIONS,
    QKV,
    Family,
    experts,
    norm,
)


def read_glm(keys: Keys) -> ModelConfig:
    """Reads GLM 4 of 2024: half of each head is rotated, by neighbours; gate and up are fused."""
    return _dense(keys)


def read_glm4(keys: Keys) -> ModelConfig:
    """Reads GLM 4 of 2025: as of 2024, with norms before and after each layer."""
    return _dense(keys, block={"norm_placement": NormPlacement.SANDWICH})


def _dense(keys: Keys, **more: Any) -> ModelConfig:
    keys.require("head_dim", "num_key_value_heads")
    return decoder_config(
        keys,
        partial_rotary=True,
        default_fraction=0.5,
        pairs=RopePairs.NEIGHBOURS,
        qkv_bias=keys.flag("attention_bias", True),
        **more,
    )


def write_glm(config: ModelConfig) -> dict[str, Any]:
    """Writes either GLM 4; inverse of ``read_glm`` and of ``read_glm4``."""
    attention, _ = dense_block(config)
    fraction = 1.0 if attention.rope is None else attention.rope.fraction
    return decoder_keys(config) | {
        "attention_bias": attention.qkv_bias,
        "partial_rotary_factor": fraction,
    }


def read_glm4_moe(keys: Keys) -> ModelConfig:
    """Reads GLM 4.5 to 4.7: sigmoid scores with a correction, dense layers before the others."""
    keys.require("num_key_value_heads")
    keys.ignore(*LOSSES)
    predicts = keys.integer("num_nextn_predict_layers", 0) > 0
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    dense = decoder_config(
        keys,
        partial_rotary=True,
        default_fraction=0.5,
        qkv_bias=keys.flag("attention_bias", False),
        qk_norm=norm if keys.flag("use_qk_norm", False) else None,
        model={"mtp": predicts},
    )
    routing = read_sigmoid_routing(keys, renormalizes=True)
    return read_experts_after_dense(keys, dense, routing, dense_by_default=1)


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes GLM 4.5; inverse of ``read_glm4_moe``."""
    attention, keys = sigmoid_keys(config)
    fraction = 1.0 if attention.rope is None else attention.rope.fraction
    return keys | {
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm is not None,
        "partial_rotary_factor": fraction,
        "num_nextn_predict_layers": int(config.mtp),
    }


_BRANCHES = (*QKV, *OUT, FUSED_GATE_UP, *DOWN)
GLM = dataclasses.replace(LLAMA, layer=(*PRE_NORMS, *_BRANCHES))
GLM4 = dataclasses.replace(
    GLM,
    layer=(
        *norm("input_layernorm", "attention_norm"),
        *norm("post_self_attn_layernorm", "attention_post_norm"),
        *norm("post_attention_layernorm", "mlp_norm"),
        *norm("post_mlp_layernorm", "mlp_post_norm"),
        *_BRANCHES,
    ),
)
SIGMOID_EXPERTS = dataclasses.replace(
    LLAMA,
    layer=(*LLAMA.layer, *experts("mlp", *PROJECTIONS, shared="shared_experts")),
    extra_layers=True,
    prediction=NEXT_LAYER,
)
"""Weights of models with experts as in DeepSeek-V3 over grouped attention."""

FAMILIES = {
    "glm": Family("GlmForCausalLM", read_glm, write_glm, GLM),
    "glm4": Family("Glm4ForCausalLM", read_glm4, write_glm, GLM4),
    "glm4_moe": Family("Glm4MoeForCausalLM", read_glm4_moe, write_glm4_moe, SIGMOID_EXPERTS),
}
