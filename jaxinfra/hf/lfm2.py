"""Configs of LFM2, dense and with experts, both ways: short convolutions and attention.

Letters of layouts beside those of ``tensor_layout.py``: W taps of a convolution.
"""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import GroupedAttentionConfig, ModelConfig, NormConfig
from jaxinfra.config.recurrent import ShortConvolutionConfig
from jaxinfra.config.routing import RoutingConfig, Scoring
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import (
    FULL,
    as_attending,
    decoder_config,
    decoder_keys,
    dense_block,
    renamed,
    routes,
    state_types,
    with_mixers,
)
from jaxinfra.hf.sparse import LOSSES, as_wide, layers_of, read_experts_after_dense
from jaxinfra.hf.weights import (
    ATTENDS,
    LLAMA,
    Family,
    Rule,
    beside,
    experts,
    head_norms,
    linear,
    norm,
    outside,
    outward,
    rule,
    without,
)

_CONV = "conv"


def read_lfm2(keys: Keys) -> ModelConfig:
    """Reads LFM2: short convolutions, and attention in some layers."""
    width = keys.named("intermediate_size", "block_ff_dim")
    if keys.flag("block_auto_adjust_ff_dim", True):
        width = int(keys.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = keys.integer("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    else:
        keys.ignore("block_ffn_dim_multiplier", "block_multiple_of")
    keys.ignore("block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init")
    keys.ignore("use_pos_enc", "block_dim", "conv_dim", "conv_dim_out", "num_heads", "theta")
    keys.ignore("block_mlp_init_scale", "block_out_init_scale", "block_norm_eps")
    num_layers = keys.integer("num_hidden_layers")
    attends = keys.sequence("full_attn_idxs", None)
    attends = range(num_layers) if attends is None else attends
    by_default = [FULL if i in attends else _CONV for i in range(num_layers)]
    return _with_convolutions(keys, _attending(keys, width), by_default)


def read_lfm2_moe(keys: Keys) -> ModelConfig:
    """Reads LFM2 with experts in all layers but the first ones."""
    keys.ignore(*LOSSES)
    model = _attending(keys, keys.integer("intermediate_size"))
    routing = RoutingConfig(
        scoring=Scoring.SIGMOID,
        renormalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        correction_bias=keys.flag("use_expert_bias", True),
    )
    named = keys.named_as(first_k_dense_replace="num_dense_layers")
    model = read_experts_after_dense(named, model, routing, dense_by_default=2, shared_by_default=0)
    return _with_convolutions(keys, model, [FULL] * model.num_layers)


def _attending(keys: Keys, hidden_dim: int) -> ModelConfig:
    norm = NormConfig(epsilon=keys.number("norm_eps"))
    model = decoder_config(
        keys,
        num_kv_heads=None if keys.has("num_key_value_heads") else 8,
        hidden_dim=hidden_dim,
        norm=norm,
        qk_norm=norm,
        activation=MlpKind.SWIGLU,
        default_theta=1e6,
        tied_by_default=True,
    )
    tied = keys.flag("tie_embedding", model.tie_embeddings)  # the name of the first releases
    return dataclasses.replace(model, tie_embeddings=tied)


def _with_convolutions(keys: Keys, model: ModelConfig, by_default: list[str]) -> ModelConfig:
    heads, width = keys.integer("num_attention_heads"), model.model_dim
    mixer = ShortConvolutionConfig(
        num_heads=heads if width % heads == 0 else 1,
        head_dim=width // heads if width % heads == 0 else width,
        conv_width=keys.integer("conv_L_cache", 3),
        bias=keys.flag("conv_bias", False),
    )
    types = state_types(keys, by_default, state=_CONV)
    return with_mixers(model, [mixer if each == _CONV else None for each in types])


def write_lfm2(config: ModelConfig) -> dict[str, Any]:
    """Writes LFM2; inverse of ``read_lfm2``."""
    alike, keys = _as_attending(config)
    _, mlp = dense_block(alike)
    return keys | _own(decoder_keys(alike, mlp=mlp)) | {"block_auto_adjust_ff_dim": False}


def write_lfm2_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes LFM2 with experts; inverse of ``read_lfm2_moe``."""
    alike, keys = _as_attending(config)
    _, experts, dense = layers_of(alike)
    return (
        keys
        | _own(decoder_keys(alike, mlp=dense or as_wide(experts)))
        | {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.hidden_dim,
            "num_dense_layers": routes(config).count(False),
            "norm_topk_prob": experts.routing.renormalize,
            "routed_scaling_factor": experts.routing.scale,
            "use_expert_bias": experts.routing.correction_bias,
        }
    )


def _own(keys: dict[str, Any]) -> dict[str, Any]:
    return renamed(keys, rms_norm_eps="norm_eps", hidden_act=None)


def _as_attending(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    absent = ShortConvolutionConfig(num_heads=1, head_dim=config.model_dim)
    alike, mixer = as_attending(config, absent)
    is_conv = [isinstance(block.mixer, ShortConvolutionConfig) for block in config.layers]
    if all(is_conv):  # its heads are then only the convolutions'
        heads = GroupedAttentionConfig(
            num_q_heads=mixer.num_heads,
            num_kv_heads=mixer.num_heads,
            head_dim=mixer.head_dim,
            rope=None,
        )
        alike = with_mixers(alike, [heads] * config.num_layers)
    return alike, {
        "layer_types": [_CONV if each else FULL for each in is_conv],
        "conv_L_cache": mixer.conv_width,
        "conv_bias": mixer.bias,
    }


_INWARD = ("in_gate", "out_gate", "value")
_CONVOLUTION = (
    *(
        Rule(
            name=f"conv.in_proj.{kind}",
            parts=tuple((f"attention/{part}/{kind}", layout) for part in _INWARD),
        )
        for kind, layout in (("weight", "(N H) D -> D N H"), ("bias", "(N H) -> N H"))
    ),
    *linear("conv.conv", "attention/value_conv", "(N H) 1 W -> N H W", "(N H) -> N H"),
    *linear("conv.out_proj", "attention/out", "D (N H) -> N H D", "D -> D"),
)
LFM2 = dataclasses.replace(
    LLAMA,
    layer=(
        *norm("operator_norm", "attention_norm"),
        *norm("ffn_norm", "mlp_norm"),
        *(each for each in ATTENDS if "o_proj" not in each.name),
        *without(
            "attention/value_conv/weight",
            outward("self_attn.out_proj"),
        ),
        *head_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
        *beside("attention/value_conv/weight", _CONVOLUTION),
        rule("feed_forward.w1.weight", "mlp/gate/weight", "F D -> D F"),
        rule("feed_forward.w3.weight", "mlp/up/weight", "F D -> D F"),
        rule("feed_forward.w2.weight", "mlp/down/weight", "D F -> F D"),
        *experts("feed_forward", "w1", "w3", "w2", correction="expert_bias"),
    ),
    outside=outside("model.embed_tokens.weight", "model.embedding_norm"),
)

FAMILIES = {
    "lfm2": Family("Lfm2ForCausalLM", read_lfm2, write_lfm2, LFM2),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", read_lfm2_moe, write_lfm2_moe, LFM2),
}
