"""Configs of decoders with LayerNorm and Llama's names: StarCoder 2, StableLM, Phi 1 and 2, and
Nemotron, both ways.
"""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import Branches, NormKind, QkNormOver
from jaxinfra.config.model import ModelConfig, NormConfig
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import decoder_config, decoder_keys, dense_block, renamed
from jaxinfra.hf.weights import (
    LLAMA,
    OUT,
    PRE_NORMS,
    QKV,
    Family,
    head_norms,
    outside,
    outward,
    rule,
    ungated,
)


def read_starcoder2(keys: Keys) -> ModelConfig:
    """Reads StarCoder 2: LayerNorm, biases everywhere, GELU without a gate."""
    keys.require("num_key_value_heads")
    keys.expect("norm_type", ("layer_norm", None), "norms are LayerNorm here")
    keys.expect("mlp_type", ("default", None), "feed-forward layers have no gate here")
    keys.ignore("activation_function")  # released configs say gelu; hidden_act is what is read
    keys.expect("scale_attn_weights", (True, None), "scores are divided by sqrt(head_dim) here")
    epsilon = keys.number("norm_epsilon", 1e-5)
    keys.expect("layer_norm_epsilon", (epsilon, None), "norm_epsilon says otherwise")
    keys.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    bias = keys.flag("use_bias", True)
    return decoder_config(
        keys,
        norm=layer_norm(keys, "norm_epsilon"),
        windows=(keys.integer("sliding_window", None),),
        gated=False,
        mlp_bias=bias,
        attention_bias=bias,
        tied_by_default=True,
    )


def layer_norm(keys: Keys, name: str, *, bias: bool = True) -> NormConfig:
    """Reads LayerNorm whose epsilon is under this name."""
    return NormConfig(kind=NormKind.LAYER, epsilon=keys.number(name, 1e-5), bias=bias)


def write_starcoder2(config: ModelConfig) -> dict[str, Any]:
    """Writes StarCoder 2; inverse of ``read_starcoder2``."""
    attention, mlp = dense_block(config)
    keys = renamed(decoder_keys(config), rms_norm_eps="norm_epsilon")
    return keys | {"use_bias": mlp.bias, "sliding_window": attention.window}


def read_stablelm(keys: Keys) -> ModelConfig:
    """Reads StableLM: LayerNorm, a quarter of each head rotated; optionally side by side."""
    keys.require("num_key_value_heads")
    for name, value in (
        ("norm_eps", keys.number("layer_norm_eps", 1e-5)),
        ("rope_pct", keys.number("partial_rotary_factor", 0.25)),
    ):
        keys.expect(name, (value, None), "it is an older name of another key, which says otherwise")
    is_parallel = keys.flag("use_parallel_residual", False)
    is_normed = keys.flag("qk_layernorm", False)
    return decoder_config(
        keys,
        norm=layer_norm(keys, "layer_norm_eps"),
        partial_rotary=True,
        default_fraction=0.25,
        qkv_bias=keys.flag("use_qkv_bias", False),
        qk_norm=layer_norm(keys, "layer_norm_eps", bias=False) if is_normed else None,
        qk_norm_over=QkNormOver.EACH_HEAD,
        block={"branches": Branches.SHARED_NORM if is_parallel else Branches.SEQUENTIAL},
    )


def write_stablelm(config: ModelConfig) -> dict[str, Any]:
    """Writes StableLM; inverse of ``read_stablelm``."""
    attention, _ = dense_block(config)
    keys = renamed(decoder_keys(config), rms_norm_eps="layer_norm_eps", head_dim=None)
    return keys | {
        "partial_rotary_factor": 1.0 if attention.rope is None else attention.rope.fraction,
        "use_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm is not None,
        "use_parallel_residual": config.blocks[0].branches is not Branches.SEQUENTIAL,
    }


def read_phi(keys: Keys) -> ModelConfig:
    """Reads Phi 1, 1.5 and 2: layers side by side behind one LayerNorm, biases everywhere."""
    config = decoder_config(
        keys,
        norm=layer_norm(keys, "layer_norm_eps"),
        partial_rotary=True,
        default_fraction=0.5,
        gated=False,
        mlp_bias=True,
        attention_bias=True,
        qk_norm=layer_norm(keys, "layer_norm_eps") if keys.flag("qk_layernorm", False) else None,
        block={"branches": Branches.SHARED_NORM},
        model={"logit_bias": True},
    )
    attention = config.blocks[0].mixer
    assert attention.rope is not None, "every layer is rotated"
    rotated = int(attention.rope.fraction * attention.head_dim)
    keys.expect("rotary_dim", (rotated, None), f"partial_rotary_factor says {rotated}")
    return config


def write_phi(config: ModelConfig) -> dict[str, Any]:
    """Writes Phi 1 and 2; inverse of ``read_phi``."""
    attention, _ = dense_block(config)
    keys = renamed(decoder_keys(config), rms_norm_eps="layer_norm_eps")
    return keys | {
        "partial_rotary_factor": 1.0 if attention.rope is None else attention.rope.fraction,
        "qk_layernorm": attention.qk_norm is not None,
    }


def read_nemotron(keys: Keys) -> ModelConfig:
    """Reads Nemotron 4: LayerNorm of 1 + scale, squared ReLU, half of each head rotated."""
    norm = dataclasses.replace(layer_norm(keys, "norm_eps"), scale_offset=1.0)
    by_default = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    for name, other, value in (
        ("kv_channels", "head_dim", keys.integer("head_dim", by_default)),
        ("rope_percent", "partial_rotary_factor", keys.number("partial_rotary_factor", 0.5)),
    ):
        keys.expect(name, (value, None), f"it is another name for {other}, which says otherwise")
    return decoder_config(
        keys,
        norm=norm,
        partial_rotary=True,
        default_fraction=0.5,
        gated=False,
        mlp_bias=keys.flag("mlp_bias", False),
        attention_bias=keys.flag("attention_bias", False),
    )


def write_nemotron(config: ModelConfig) -> dict[str, Any]:
    """Writes Nemotron 4; inverse of ``read_nemotron``."""
    attention, mlp = dense_block(config)
    return renamed(decoder_keys(config), rms_norm_eps="norm_eps") | {
        "partial_rotary_factor": 1.0 if attention.rope is None else attention.rope.fraction,
        "attention_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
    }


STARCODER2 = dataclasses.replace(
    LLAMA, layer=(*PRE_NORMS, *QKV, *OUT, *ungated("mlp.c_fc", "mlp.c_proj"))
)
STABLELM = dataclasses.replace(
    LLAMA,
    layer=(
        *LLAMA.layer[: len(PRE_NORMS) + len(QKV) + len(OUT)],
        rule("self_attn.q_layernorm.norms.{}.weight", "attention/query_norm/scale", "H -> H"),
        rule("self_attn.k_layernorm.norms.{}.weight", "attention/key_norm/scale", "H -> H"),
        *LLAMA.layer[-6:],
    ),
)
PHI = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *QKV),
        *outward("self_attn.dense"),
        *head_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
        *ungated("mlp.fc1", "mlp.fc2"),
    ),
    outside=(
        *outside("model.embed_tokens.weight", "model.final_layernorm"),
        rule("lm_head.bias", "logit_bias", "V -> V"),
    ),
)
NEMOTRON = dataclasses.replace(
    LLAMA, layer=(*PRE_NORMS, *QKV, *OUT, *ungated("mlp.up_proj", "mlp.down_proj"))
)

FAMILIES = {
    "starcoder2": Family("Starcoder2ForCausalLM", read_starcoder2, write_starcoder2, STARCODER2),
    "stablelm": Family("StableLmForCausalLM", read_stablelm, write_stablelm, STABLELM),
    "phi": Family("PhiForCausalLM", read_phi, write_phi, PHI),
    "nemotron": Family("NemotronForCausalLM", read_nemotron, write_nemotron, NEMOTRON),
}
