"""Configs of Gemma 3n's text models, both ways."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfra.config.kinds import NormPlacement
from jaxinfra.config.model import GroupedAttentionConfig, MlpConfig, ModelConfig, NormConfig
from jaxinfra.config.streams import StreamsConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.gemma import GEMMA3, read_ropes
from jaxinfra.hf.gemma4 import LAYER_INPUT, LAYER_INPUTS, TAKERS_HAVE, sharing, takes_keys
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import (
    FULL,
    SLIDING,
    decoder_config,
    decoder_keys,
    in_runs,
    layer_types,
    rotated_by_type,
    with_ropes_by_type,
)
from jaxinfra.hf.weights import Family, WeightTable, norm, rule


def read_gemma3n(keys: Keys) -> ModelConfig:
    """Reads Gemma 3n text: several streams, inputs per layer, last layers that attend to others'
    keys, sparse gates.
    """
    keys.require("num_key_value_heads", "head_dim", "sliding_window", "num_kv_shared_layers")
    keys.require("hidden_size_per_layer_input", "intermediate_size")
    # Of training; and scores are not scaled, whatever the last says.
    keys.ignore("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar")
    num_layers = keys.integer("num_hidden_layers")
    types, windows = layer_types(keys, every=5)
    kind, ropes = NormConfig(epsilon=keys.number("rms_norm_eps")), read_ropes(keys)
    widths, sparsity = _widths(keys, num_layers), _sparsity(keys, num_layers)
    streams = StreamsConfig(
        num_streams=keys.integer("altup_num_inputs", 4),
        active=keys.integer("altup_active_idx", 0),
        residual_rank=keys.integer("laurel_rank", 64),
        scales_output=keys.flag("altup_correct_scale", True),
    )
    config = decoder_config(
        keys,
        activation_key="hidden_activation",
        layers=rotated_by_type(types, windows, ropes),
        hidden_dim=widths[0],
        rope=ropes[FULL],
        norm=kind,
        qk_norm=kind,
        value_norm=dataclasses.replace(kind, scale=False),
        attention_bias=keys.flag("attention_bias", False),
        scale=1.0,
        tied_by_default=True,
        block={
            "norm_placement": NormPlacement.SANDWICH,
            "layer_input_dim": keys.integer("hidden_size_per_layer_input"),
            "streams": streams,
        },
        model={
            "layer_input_rows": keys.integer("vocab_size_per_layer_input", 262_144),
            "embedding_scale": keys.integer("hidden_size") ** 0.5,
            "logit_soft_cap": keys.number("final_logit_softcapping", 30.0),
        },
    )
    return _with_layers(config, keys, types, widths, sparsity)


def _with_layers(
    config: ModelConfig,
    keys: Keys,
    types: Sequence[str],
    widths: Sequence[int],
    sparsity: Sequence[float],
) -> ModelConfig:
    """Returns the model with each layer's own width and sparsity, and with shared keys."""
    blocks = []
    for block, width, share in zip(config.layers, widths, sparsity, strict=True):
        mlp = block.feed_forward
        assert isinstance(mlp, MlpConfig), "decoder_config"
        mlp = dataclasses.replace(mlp, hidden_dim=width, sparsity=share)
        blocks.append(dataclasses.replace(block, feed_forward=mlp))
    config = dataclasses.replace(config, stacks=in_runs(blocks))
    num_shared = keys.integer("num_kv_shared_layers")
    return sharing(config, types, num_shared) if num_shared else config


def _widths(keys: Keys, num_layers: int) -> tuple[int, ...]:
    found = keys.either("intermediate_size", int, list)
    return _of_layers("intermediate_size", found, num_layers)


def _sparsity(keys: Keys, num_layers: int) -> tuple[float, ...]:
    num_sparse = 10 if num_layers > 10 else 0
    default = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    found = keys.either("activation_sparsity_pattern", int, float, list)
    found = default if found is None else found
    return tuple(map(float, _of_layers("activation_sparsity_pattern", found, num_layers)))


def _of_layers(name: str, found: Any, num_layers: int) -> tuple[Any, ...]:
    each = tuple(found) if isinstance(found, list) else (found,) * num_layers
    if len(each) != num_layers:
        raise ConfigError(f"{name} has {len(each)} entries for {num_layers} layers")
    return each


def write_gemma3n(config: ModelConfig) -> dict[str, Any]:
    """Writes Gemma 3n text; inverse of ``read_gemma3n``."""
    keys, first = with_ropes_by_type(decoder_keys(config), config), config.layers[0]
    attention, streams = first.mixer, first.streams
    if streams is None or not isinstance(attention, GroupedAttentionConfig):
        raise ConfigError("a model of one stream: Gemma 3n has several (streams)")
    fed = [each.feed_forward for each in config.layers]
    windows = [each.mixer.window for each in config.layers]
    return keys | {
        "hidden_activation": keys.pop("hidden_act"),
        "intermediate_size": [each.hidden_dim for each in fed if isinstance(each, MlpConfig)],
        "activation_sparsity_pattern": [e.sparsity for e in fed if isinstance(e, MlpConfig)],
        "layer_types": [FULL if each is None else SLIDING for each in windows],
        # The reference makes a mask of windows whether a layer has one or not.
        "sliding_window": max((e for e in windows if e is not None), default=config.max_positions),
        "attention_bias": attention.out_bias,
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_size_per_layer_input": first.layer_input_dim,
        "vocab_size_per_layer_input": config.layer_input_rows,
        "num_kv_shared_layers": sum(map(takes_keys, config.layers)),
        "altup_num_inputs": streams.num_streams,
        "altup_active_idx": streams.active,
        "altup_correct_scale": streams.scales_output,
        "laurel_rank": streams.residual_rank,
    }


_STREAMS = (
    *norm("altup.router_norm", "streams/router_norm"),
    rule("altup.modality_router.weight", "streams/router/weight", "E D -> D E"),
    rule("altup.prediction_coefs.weight", "streams/prediction/weight", "F E -> E F"),
    rule("altup.correction_coefs.weight", "streams/correction/weight", "F E -> E F"),
    rule("altup.correct_output_scale", "streams/out_scale", "D -> D"),
    rule("laurel.linear_left.weight", "streams/down/weight", "R D -> D R"),
    rule("laurel.linear_right.weight", "streams/up/weight", "D R -> R D"),
    *norm("laurel.post_laurel_norm", "streams/residual_norm"),
)


def gemma3n(config: ModelConfig) -> WeightTable:
    """Returns the table of a Gemma 3n text model, which has projections of each stream."""
    streams = config.blocks[0].streams
    names = (("altup_projections", "into"), ("altup_unembed_projections", "back"))
    projections = [
        rule(f"model.{theirs}.{i}.weight", f"streams/{ours}/{i}/weight", "F D -> D F")
        for theirs, ours in names
        for i in range(0 if streams is None else streams.num_streams - 1)
    ]
    return dataclasses.replace(
        GEMMA3,
        layer=(*GEMMA3.layer, *LAYER_INPUT, *_STREAMS),
        outside=(*GEMMA3.outside, *LAYER_INPUTS, *projections),
        takers_have=TAKERS_HAVE,
    )


FAMILIES = {
    "gemma3n_text": Family("Gemma3nForCausalLM", read_gemma3n, write_gemma3n, gemma3n),
}
