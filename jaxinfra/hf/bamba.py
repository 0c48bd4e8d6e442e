"""Configs of Bamba, both ways: Mamba 2 layers and attention, each with a feed-forward layer."""

import dataclasses
from typing import Any

from jaxinfra.config.model import ModelConfig
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.mamba import (
    hybrid_mixer_keys,
    read_hybrid_mixer,
    smallest_mixer,
    state_space,
)
from jaxinfra.hf.rope import in_rope_parameters
from jaxinfra.hf.shared import as_attending, decoder_config, decoder_keys, dense_block, with_mixers
from jaxinfra.hf.weights import ATTENDS, LLAMA, Family, gated, norm, outside


def read_bamba(keys: Keys) -> ModelConfig:
    """Reads Bamba: Mamba 2 in all layers but those that are named."""
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.ignore("num_logits_to_keep", "z_loss_coefficient")
    keys.expect(
        "partial_rotary_factor",
        (0.5, None),
        "the reference takes 0.5 whatever stands here; write it in rope_parameters",
    )
    model = decoder_config(
        keys,
        num_kv_heads=None if keys.has("num_key_value_heads") else 8,
        attention_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
        partial_rotary=True,
        default_fraction=0.5,
    )
    attention, _ = dense_block(model)
    rotated = attention.head_dim * (1.0 if attention.rope is None else attention.rope.fraction)
    keys.expect("attn_rotary_emb", (rotated, None), "it is the part of a head that is rotated")
    width = keys.integer("mamba_expand", 2) * model.model_dim
    mixer = read_hybrid_mixer(keys, width=width)
    attends = keys.sequence("attn_layer_indices", None) or ()
    return with_mixers(model, [None if i in attends else mixer for i in range(model.num_layers)])


def write_bamba(config: ModelConfig) -> dict[str, Any]:
    """Writes Bamba; inverse of ``read_bamba``."""
    alike, mixer = as_attending(config, smallest_mixer(config))
    attention, mlp = dense_block(alike)
    mixers = [block.mixer for block in config.layers]
    fraction = 1.0 if attention.rope is None else attention.rope.fraction
    keys = decoder_keys(alike) | {"partial_rotary_factor": fraction}
    return in_rope_parameters(keys) | {
        **hybrid_mixer_keys(mixer, config.model_dim),
        "attn_layer_indices": [i for i, each in enumerate(mixers) if each == attention],
        "attention_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
    }


FEED_FORWARD = gated("feed_forward")
NORMS = (
    *norm("input_layernorm", "attention_norm"),
    *norm("pre_ff_layernorm", "mlp_norm"),
)
OUTER = outside("model.embed_tokens.weight", "model.final_layernorm")
BAMBA = dataclasses.replace(
    LLAMA,
    layer=(*NORMS, *ATTENDS, *state_space("mamba"), *FEED_FORWARD),
    outside=OUTER,
)

FAMILIES = {
    "bamba": Family("BambaForCausalLM", read_bamba, write_bamba, BAMBA),
}
