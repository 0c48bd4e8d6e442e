"""Configs of Llama 4's text models, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.model import (
    ExpertsConfig,
    GroupedAttentionConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.rope import QueryScaling, RopePairs
from jaxinfra.config.routing import RoutingConfig, Scoring
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import read_rope
from jaxinfra.hf.shared import FULL, decoder_config, decoder_keys, mlp_kind, routed, routes
from jaxinfra.hf.sparse import LOSSES, as_wide, layers_of
from jaxinfra.hf.weights import LLAMA, OUT, PRE_NORMS, QKV, Family, Rule, gated, rule

_CHUNKED = "chunked_attention"


def read_llama4(keys: Keys) -> ModelConfig:
    """Reads Llama 4: chunks, layers without rotary, experts whose inputs are scaled."""
    keys.require("num_key_value_heads", "head_dim", "attention_chunk_size", "intermediate_size_mlp")
    keys.ignore(*LOSSES, "router_jitter_noise", "for_llm_compressor")
    num_layers = keys.integer("num_hidden_layers")
    rope = read_rope(
        keys,
        max_positions=keys.integer("max_position_embeddings"),
        default_theta=500_000.0,
        pairs=RopePairs.NEIGHBOURS,
    )
    layers = _layers(keys, num_layers)
    for each in layers:
        each["rope"] = rope if each["rope"] else None
    dense = decoder_config(
        keys.named_as(intermediate_size="intermediate_size_mlp"),
        layers=layers,
        rope=rope,
        attention_bias=keys.flag("attention_bias", False),
        qk_norm_after_rope=True,
    )
    width = keys.integer("intermediate_size")
    experts = ExpertsConfig(
        num_experts=keys.named("num_local_experts", "num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=width,
        kind=mlp_kind(dense),
        routing=RoutingConfig(scoring=Scoring.SIGMOID, renormalize=False, scales_inputs=True),
        shared_hidden_dim=width,
    )
    step = keys.integer("interleave_moe_layer_step", 1)
    default = [i for i in range(num_layers) if step and (i + 1) % step == 0]
    with_experts = set(keys.sequence("moe_layers", default))
    return routed(dense, [experts if i in with_experts else None for i in range(num_layers)])


def _layers(keys: Keys, num_layers: int) -> list[dict[str, Any]]:
    """Fields of attention by layer, with true or false for its rotary embedding."""
    every = keys.integer("no_rope_layer_interval", 4)
    keys.expect("nope_layer_interval", (every, None), "an older name of no_rope_layer_interval")
    default = [int((i + 1) % every > 0) for i in range(num_layers)]
    rotates = keys.sequence("no_rope_layers", None) or default
    types = keys.sequence("layer_types", [_CHUNKED if each else FULL for each in rotates])
    if not len(rotates) == len(types) == num_layers or {*types} - {_CHUNKED, FULL}:
        raise ConfigError(
            f"no_rope_layers={list(rotates)} and layer_types={list(types)}: each has an entry for "
            f"each of {num_layers} layers; types are {_CHUNKED} and {FULL}"
        )
    chunk = keys.integer("attention_chunk_size", None)
    norm = None
    if keys.flag("use_qk_norm", True):
        norm = NormConfig(epsilon=keys.number("rms_norm_eps"), scale=False)
    scaling = QueryScaling(
        rate=keys.number("attn_scale", 0.1), every=keys.integer("floor_scale", 8192), first=1
    )
    # A number in the first releases' configs.
    tuning = keys.raw("attn_temperature_tuning")
    keys.ignore("attn_temperature_tuning")
    grows = tuning is None or bool(tuning)
    return [
        {
            "rope": bool(rotated),
            "chunk": chunk if kind == _CHUNKED else None,
            "qk_norm": norm if rotated else None,
            "query_scaling": scaling if grows and not rotated else None,
        }
        for rotated, kind in zip(rotates, types, strict=True)
    ]


def write_llama4(config: ModelConfig) -> dict[str, Any]:
    """Writes Llama 4; inverse of ``read_llama4``."""
    attention, experts, dense = layers_of(config)
    keys = decoder_keys(config, mlp=dense or as_wide(experts))
    mixers = [
        each for block in config.layers if isinstance(each := block.mixer, GroupedAttentionConfig)
    ]
    scaling = next((each.query_scaling for each in mixers if each.query_scaling), None)
    keys["intermediate_size_mlp"] = keys["intermediate_size"]
    return keys | {
        "intermediate_size": experts.hidden_dim,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_layers": [i for i, has in enumerate(routes(config)) if has],
        "attention_bias": attention.out_bias,
        "attention_chunk_size": next((each.chunk for each in mixers if each.chunk), None),
        "layer_types": [_CHUNKED if each.chunk else FULL for each in mixers],
        "no_rope_layers": [int(each.rope is not None) for each in mixers],
        "use_qk_norm": any(each.qk_norm is not None for each in mixers),
        "attn_temperature_tuning": scaling is not None,
        "attn_scale": 0.1 if scaling is None else scaling.rate,
        "floor_scale": 8192 if scaling is None else scaling.every,
    }


LLAMA4 = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *QKV, *OUT, *gated("feed_forward")),
        rule("feed_forward.router.weight", "mlp/router/weight", "E D -> D E"),
        Rule(
            name="feed_forward.experts.gate_up_proj",
            parts=(("mlp/gate", "E D F -> E D F"), ("mlp/up", "E D F -> E D F")),
            fused_dim=2,
        ),
        rule("feed_forward.experts.down_proj", "mlp/down", "E F D -> E F D"),
        *gated("feed_forward.shared_expert", "mlp/shared_"),
    ),
)

FAMILIES = {
    "llama4_text": Family("Llama4ForCausalLM", read_llama4, write_llama4, LLAMA4),
}
