"""Configs of Gemma 4's dense text models, both ways."""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import NormPlacement
from jaxinfra.config.model import GroupedAttentionConfig, ModelConfig, NormConfig
from jaxinfra.config.rope import RopeConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.gemma import GEMMA3, ropes_by_type
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import read_ropes_by_type, write_ropes_by_type
from jaxinfra.hf.shared import FULL, SLIDING, decoder_config, decoder_keys, typed_windows
from jaxinfra.hf.weights import rule

_ROPES = {
    SLIDING: RopeConfig(theta=10_000.0),
    FULL: RopeConfig(theta=1_000_000.0, turning=0.25),
}


def read_gemma4(keys: Keys) -> ModelConfig:
    """Reads Gemma 4 text: heads of other widths in global layers, norms of values, scaled streams.

    Raises:
        ConfigError: layers that share keys and values, inputs per layer, or experts.
    """
    keys.require("head_dim", "num_key_value_heads", "hidden_size_per_layer_input")
    keys.expect("use_bidirectional_attention", (None, False), "attention here is causal")
    keys.expect("num_kv_shared_layers", (0, None), "a layer here has its own keys and values")
    keys.expect("hidden_size_per_layer_input", (0,), "layers here read the stream alone")
    keys.expect("enable_moe_block", (False, None), "dense layers beside experts are not supported")
    keys.ignore("vocab_size_per_layer_input", "use_double_wide_mlp")  # of layers that share keys
    keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    num_layers = keys.integer("num_hidden_layers")
    types = _types(keys, num_layers)
    window = keys.integer("sliding_window")
    windows = typed_windows(types, window, num_layers=num_layers)
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    max_positions = keys.integer("max_position_embeddings")
    ropes = read_ropes_by_type(keys, (SLIDING, FULL), max_positions=max_positions) or _ROPES
    shared, heads = keys.flag("attention_k_eq_v", False), _global_heads(keys, types)
    fields = {FULL: heads | {"values_are_keys": shared}, SLIDING: {}}
    bias = keys.flag("attention_bias", False)
    return decoder_config(
        keys,
        activation_key="hidden_activation",
        layers=[
            {"window": window, "rope": ropes[kind], **fields[kind]}
            for window, kind in zip(windows, types, strict=True)
        ],
        rope=ropes[FULL],
        norm=norm,
        qk_norm=norm,
        value_norm=dataclasses.replace(norm, scale=False),
        qkv_bias=bias,
        out_bias=bias,
        scale=1.0,
        tied_by_default=True,
        block={"norm_placement": NormPlacement.SANDWICH, "stream_scale": True},
        model={
            "embedding_scale": keys.integer("hidden_size") ** 0.5,
            "logit_soft_cap": keys.number("final_logit_softcapping", None),
        },
    )


def _types(keys: Keys, num_layers: int) -> list[str]:
    default = [SLIDING if (i + 1) % 6 else FULL for i in range(num_layers)]
    types = list(keys.sequence("layer_types", default))
    return [*types[:-1], FULL]  # as the reference forces it


def _global_heads(keys: Keys, types: list[str]) -> dict[str, int]:
    """Reads the heads of global layers, by keys of their own or as each layer's settings."""
    each_layer = keys.mapping("per_layer_config")
    if each_layer is None:
        heads = {"head_dim": keys.integer("global_head_dim", 512)}
        key_heads = keys.integer("num_global_key_value_heads", None)
        is_used = key_heads is not None and keys.flag("attention_k_eq_v", False)
        return heads | ({"num_kv_heads": key_heads} if is_used else {})
    wanted = {str(i) for i, kind in enumerate(types) if kind == FULL}
    first, *others = [dict(each_layer[name]) for name in sorted(each_layer)]
    if {*each_layer} != wanted or any(each != first for each in others):
        raise ConfigError(
            f"per_layer_config of layers {', '.join(sorted(each_layer))}: the settings of all "
            f"global layers alike, and of no others, are read here ({', '.join(sorted(wanted))})"
        )
    known = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if unknown := {*first} - {*known}:
        raise ConfigError(f"per_layer_config: {', '.join(sorted(unknown))} is not supported")
    return {known[name]: value for name, value in first.items()}


def write_gemma4(config: ModelConfig) -> dict[str, Any]:
    """Writes Gemma 4 text; inverse of ``read_gemma4``."""
    mixers = [block.mixer for block in config.layers]
    types = [FULL if each.window is None else SLIDING for each in mixers]
    whole = mixers[-1]
    local = next((each for each in mixers if each.window is not None), whole)
    if not isinstance(whole, GroupedAttentionConfig):
        raise ConfigError(f"{type(whole).__name__}: grouped attention is what this writes")
    keys = decoder_keys(config)
    for name in ("rope_theta", "rope_scaling"):
        keys.pop(name, None)
    return keys | {
        "hidden_activation": keys.pop("hidden_act"),
        "head_dim": local.head_dim,
        "num_key_value_heads": local.num_kv_heads,
        "per_layer_config": {
            str(i): {"head_dim": whole.head_dim, "num_key_value_heads": whole.num_kv_heads}
            for i, kind in enumerate(types)
            if kind == FULL
        },
        "layer_types": types,
        # The reference makes a mask of windows whether a layer has one or not.
        "sliding_window": local.window or config.max_positions,
        "attention_k_eq_v": whole.values_are_keys,
        "attention_bias": whole.out_bias,
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        **write_ropes_by_type(ropes_by_type(config)),
    }


GEMMA4 = dataclasses.replace(
    GEMMA3, layer=(*GEMMA3.layer, rule("layer_scalar", "stream_scale", "R -> R"))
)
