"""Configs of Qwen3-Next and Qwen3.5, both ways: gated delta layers and gated attention.

Letters of layouts beside those of ``tensor_layout.py``: M value heads, W taps of a convolution.
"""

import dataclasses
from typing import Any

from jaxinfra.config.model import ExpertsConfig, GroupedAttentionConfig, ModelConfig, NormConfig
from jaxinfra.config.recurrent import GatedDeltaConfig
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.rope import read_rope
from jaxinfra.hf.shared import (
    FULL,
    LINEAR,
    as_attending,
    decoder_config,
    decoder_keys,
    state_types,
    with_mixers,
)
from jaxinfra.hf.sparse import (
    LOSSES,
    experts_keys,
    layers_of,
    qwen_keys,
    read_experts,
    read_qwen_experts,
)
from jaxinfra.hf.weights import (
    LLAMA,
    MLP,
    OUT,
    PRE_NORMS,
    PROJECTIONS,
    QK_NORM,
    QKV,
    Family,
    PredictionTable,
    Rule,
    WeightTable,
    beside,
    experts,
    fused_experts,
    joined_inputs,
    norm,
    rule,
)


def read_qwen3_next(keys: Keys) -> ModelConfig:
    """Reads Qwen3-Next: three layers with a state to one with attention."""
    keys.require("num_key_value_heads", "head_dim")
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    routed = read_qwen_experts(
        keys,
        _attending(keys),
        renormalizes=True,
        shared_hidden_dim=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _with_gated_delta(routed, keys)


def read_qwen3_5(keys: Keys) -> ModelConfig:
    """Reads the text part of Qwen3.5: layers of Qwen3-Next with dense feed-forward layers."""
    keys.require("num_key_value_heads", "head_dim")
    keys.ignore("mlp_only_layers")  # all are dense
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    return _with_gated_delta(_attending(keys), keys)


def read_qwen3_5_moe(keys: Keys) -> ModelConfig:
    """Reads the text part of Qwen3.5 with experts in every layer, one of them shared."""
    keys.require("num_key_value_heads", "head_dim")
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.ignore(*LOSSES)
    keys.ignore("intermediate_size")  # no layer is dense
    keys.expect("mlp_only_layers", ([], None), "every layer has experts here")
    routed = read_experts(
        keys,
        _attending(keys, hidden_dim=keys.integer("moe_intermediate_size")),
        shared_hidden_dim=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _with_gated_delta(routed, keys)


def _attending(keys: Keys, **more: Any) -> ModelConfig:
    """Reads the model as if all of its layers attended, and had dense feed-forward layers."""
    keys.expect("attn_output_gate", (True, None), "attention has a gate here")
    keys.ignore("mamba_ssm_dtype")
    keys.expect("mtp_use_dedicated_embeddings", (False, None), "the module reads the model's table")
    norm = _norm(keys)
    rope = read_rope(
        keys,
        max_positions=keys.integer("max_position_embeddings"),
        default_fraction=0.25,
        # Axes of images: a token of text has the same position on each.
        known=("mrope_section", "mrope_interleaved"),
    )
    return decoder_config(
        keys,
        norm=norm,
        rope=rope,
        partial_rotary=True,
        attention_bias=keys.flag("attention_bias", False),
        qk_norm=norm,
        out_gate=True,
        model={"mtp": keys.integer("mtp_num_hidden_layers", 0) > 0},
        **more,
    )


def _norm(keys: Keys) -> NormConfig:
    return NormConfig(epsilon=keys.number("rms_norm_eps"), scale_offset=1.0)


def _with_gated_delta(model: ModelConfig, keys: Keys) -> ModelConfig:
    """Returns the model with gated delta layers where the config names them."""
    mixer = GatedDeltaConfig(
        num_key_heads=keys.integer("linear_num_key_heads"),
        num_value_heads=keys.integer("linear_num_value_heads"),
        key_dim=keys.integer("linear_key_head_dim"),
        value_dim=keys.integer("linear_value_head_dim"),
        conv_width=keys.integer("linear_conv_kernel_dim", 4),
        norm_epsilon=keys.number("rms_norm_eps"),
    )
    every = keys.integer("full_attention_interval", 4)
    by_default = [LINEAR if (i + 1) % every else FULL for i in range(model.num_layers)]
    types = state_types(keys, by_default)
    return with_mixers(model, [mixer if each == LINEAR else None for each in types])


def write_qwen3_next(config: ModelConfig) -> dict[str, Any]:
    """Writes Qwen3-Next; inverse of ``read_qwen3_next``."""
    alike, linear = _as_attending(config)
    layers = [block.feed_forward for block in config.blocks]
    shared = [x.shared_hidden_dim for x in layers if isinstance(x, ExpertsConfig)]
    return {
        **qwen_keys(alike),
        **linear,
        "shared_expert_intermediate_size": max(shared, default=1),
    }


def write_qwen3_5(config: ModelConfig) -> dict[str, Any]:
    """Writes the text part of Qwen3.5; inverse of ``read_qwen3_5``."""
    alike, linear = _as_attending(config)
    return {**decoder_keys(alike), **linear}


def write_qwen3_5_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes the text part of Qwen3.5 with experts; inverse of ``read_qwen3_5_moe``."""
    alike, linear = _as_attending(config)
    _, experts, _ = layers_of(alike)
    _, keys = experts_keys(alike)
    del keys["intermediate_size"], keys["norm_topk_prob"]
    return keys | {
        **linear,
        "moe_intermediate_size": experts.hidden_dim,
        "shared_expert_intermediate_size": experts.shared_hidden_dim,
    }


def _as_attending(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the model as if all of its layers attended, and the keys that say which do not."""
    absent = GatedDeltaConfig(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1)
    alike, mixer = as_attending(config, absent)
    attention, is_linear = (
        alike.blocks[0].mixer,
        [isinstance(block.mixer, GatedDeltaConfig) for block in config.layers],
    )
    assert isinstance(attention, GroupedAttentionConfig), "as_attending"
    return alike, {
        "attention_bias": attention.out_bias,
        # A quarter where it is not named.
        "partial_rotary_factor": 1.0 if attention.rope is None else attention.rope.fraction,
        "layer_types": [LINEAR if each else FULL for each in is_linear],
        "linear_num_key_heads": mixer.num_key_heads,
        "linear_num_value_heads": mixer.num_value_heads,
        "linear_key_head_dim": mixer.key_dim,
        "linear_value_head_dim": mixer.value_dim,
        "linear_conv_kernel_dim": mixer.conv_width,
        "mtp_num_hidden_layers": int(config.mtp),
    }


def qwen3_next_weights(config: ModelConfig) -> WeightTable:
    """Returns the tensors of Qwen3-Next, whose gated delta layers fuse projections by key head."""
    mixers = [block.mixer for block in config.blocks]
    groups = next((m.num_key_heads for m in mixers if isinstance(m, GatedDeltaConfig)), 1)
    return _weights(_fused(groups))


def _weights(inward: tuple[Rule, ...]) -> WeightTable:
    query = ("(N H) D -> D N H", "(N H) -> N H")
    gated = tuple(
        Rule(
            name=f"self_attn.q_proj.{kind}",
            parts=((f"attention/query/{kind}", layout), (f"attention/out_gate/{kind}", layout)),
            groups="N",
        )
        for kind, layout in zip(("weight", "bias"), query, strict=True)
    )
    attends = (*gated, *QKV[2:], *OUT, *QK_NORM)
    return dataclasses.replace(
        LLAMA,
        layer=(
            *PRE_NORMS,
            *beside("attention/query_norm/scale", attends),
            *beside("attention/decay_log", (*inward, *GATED_DELTA)),
            *MLP,
            *experts("mlp", *PROJECTIONS, shared="shared_expert"),
        ),
        ignored=rf"{LLAMA.ignored}|mtp\..*",
        prediction=_PREDICTION,
    )


_PREDICTION = PredictionTable(
    prefix="mtp.",
    block="layers.0.",
    outside=(
        *norm("pre_fc_norm_embedding", "embedding_norm"),
        *norm("pre_fc_norm_hidden", "hidden_norm"),
        joined_inputs("fc.weight", "embedding_projection", "hidden_projection"),
        *norm("norm", "final_norm"),
    ),
)


def _fused(groups: int) -> tuple[Rule, ...]:
    """The projections of each key head beside those of its value heads."""
    return (
        Rule(
            name="linear_attn.in_proj_qkvz.weight",
            parts=(
                ("attention/query/weight", "(N H) D -> D N H"),
                ("attention/key/weight", "(N H) D -> D N H"),
                ("attention/value/weight", "(M V) D -> D M V"),
                ("attention/gate/weight", "(M V) D -> D M V"),
            ),
            groups=groups,
        ),
        Rule(
            name="linear_attn.in_proj_ba.weight",
            parts=(
                ("attention/beta/weight", "M D -> D M"),
                ("attention/decay/weight", "M D -> D M"),
            ),
            groups=groups,
        ),
    )


GATED_DELTA = (
    Rule(
        name="linear_attn.conv1d.weight",
        parts=(
            ("attention/query_conv/weight", "(N H) 1 W -> N H W"),
            ("attention/key_conv/weight", "(N H) 1 W -> N H W"),
            ("attention/value_conv/weight", "(M V) 1 W -> M V W"),
        ),
    ),
    rule("linear_attn.dt_bias", "attention/decay_bias", "M -> M"),
    rule("linear_attn.A_log", "attention/decay_log", "M -> M"),
    rule("linear_attn.norm.weight", "attention/norm/scale", "V -> V"),
    rule("linear_attn.out_proj.weight", "attention/out/weight", "D (M V) -> M V D"),
)
"""Tensors of a gated delta layer that are not projections of its input."""

QWEN3_5 = _weights(
    (
        Rule(
            name="linear_attn.in_proj_qkv.weight",
            parts=(
                ("attention/query/weight", "(N H) D -> D N H"),
                ("attention/key/weight", "(N H) D -> D N H"),
                ("attention/value/weight", "(M V) D -> D M V"),
            ),
        ),
        rule("linear_attn.in_proj_z.weight", "attention/gate/weight", "(M V) D -> D M V"),
        rule("linear_attn.in_proj_b.weight", "attention/beta/weight", "M D -> D M"),
        rule("linear_attn.in_proj_a.weight", "attention/decay/weight", "M D -> D M"),
    )
)
"""Tensors of Qwen3.5, each projection of its gated delta layers by itself."""
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    others=(
        dataclasses.replace(
            QWEN3_5,
            layer=(
                *(each for each in QWEN3_5.layer if ".experts." not in each.name),
                *fused_experts("mlp.experts"),
            ),
        ),
    ),
)
"""Tensors of Qwen3.5 with experts; its makers' files have all experts of a layer in one."""

FAMILIES = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", read_qwen3_next, write_qwen3_next, qwen3_next_weights
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", read_qwen3_5, write_qwen3_5, QWEN3_5),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", read_qwen3_5_moe, write_qwen3_5_moe, QWEN3_5_MOE
    ),
}
