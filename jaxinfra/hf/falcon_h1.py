"""Configs of Falcon-H1, both ways: attention and Mamba 2 side by side, with multipliers."""

import dataclasses
from typing import Any

from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    GroupedAttentionConfig,
    ModelConfig,
)
from jaxinfra.config.recurrent import StateSpaceConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.bamba import FEED_FORWARD, NORMS, OUTER
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.mamba import hybrid_mixer_keys, read_hybrid_mixer, state_space
from jaxinfra.hf.shared import decoder_config, decoder_keys, dense_block, with_mixers
from jaxinfra.hf.weights import LLAMA, OUT, QKV, Family, Rule


def read_falcon_h1(keys: Keys) -> ModelConfig:
    """Reads Falcon-H1: the sum of attention and Mamba 2 in every layer."""
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.ignore("num_logits_to_keep", "mlp_expansion_factor")
    keys.expect("mamba_use_mlp", (True, None), "every layer has a feed-forward layer")
    keys.expect("attn_layer_indices", (None,), "every layer attends")
    model = decoder_config(
        keys,
        attention_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
        model={
            "embedding_scale": keys.number("embedding_multiplier", 1.0),
            "logit_scale": keys.number("lm_head_multiplier", 1.0),
        },
    )
    (block,) = model.blocks
    attention, mlp = dense_block(model)
    gate, down = _scales(keys, "mlp_multipliers", 2)
    mlp = dataclasses.replace(mlp, gate_scale=gate, out_scale=down)
    if (scale := keys.number("key_multiplier", 1.0)) != 1.0:
        attention = dataclasses.replace(attention, scale=attention.head_dim**-0.5 * scale)
    mixer = AttentionBesideStateConfig(
        attention=attention,
        state_space=_state_space(keys, model.model_dim),
        attention_in_scale=keys.number("attention_in_multiplier", 1.0),
        attention_out_scale=keys.number("attention_out_multiplier", 1.0),
        state_in_scale=keys.number("ssm_in_multiplier", 1.0),
        state_out_scale=keys.number("ssm_out_multiplier", 1.0),
    )
    (stack,) = model.stacks
    pattern = (dataclasses.replace(block, mixer=mixer, feed_forward=mlp),)
    return dataclasses.replace(model, stacks=(dataclasses.replace(stack, pattern=pattern),))


def _state_space(keys: Keys, model_dim: int) -> StateSpaceConfig:
    """Reads the mixer beside attention, which may have a width of its own and no norm."""
    expanded = keys.integer("mamba_expand", 2) * model_dim
    is_normed = keys.flag("mamba_rms_norm", False)
    norm_first = keys.flag("mamba_norm_before_gate", True)
    scales = _scales(keys, "ssm_multipliers", 5)
    fields: dict[str, Any] = {"norm_before_gate": is_normed and norm_first}
    if not is_normed:
        fields["norm_heads"] = None
    if any(each != 1.0 for each in scales):
        # Theirs are of gates, values, keys (B), queries (C) and steps too.
        fields["projection_scales"] = scales
    out_bias = keys.flag("projectors_bias", False)
    mixer = read_hybrid_mixer(keys, width=keys.integer("mamba_d_ssm", expanded), **fields)
    if mixer.bias != out_bias:
        raise ConfigError(
            f"mamba_proj_bias={mixer.bias} with projectors_bias={out_bias}: projections into and "
            "out of Mamba have biases together here, or none"
        )
    return mixer


def _scales(keys: Keys, name: str, count: int) -> tuple[float, ...]:
    if keys.sequence(name, None) is None:
        return (1.0,) * count
    scales = keys.numbers(name)
    if len(scales) != count:
        raise ConfigError(f"{name} has {len(scales)} numbers; give {count}")
    return scales


def write_falcon_h1(config: ModelConfig) -> dict[str, Any]:
    """Writes Falcon-H1; inverse of ``read_falcon_h1``."""
    mixer = config.blocks[0].mixer
    if not isinstance(mixer, AttentionBesideStateConfig):
        raise ConfigError("attention beside a state space in every layer is what this writes")
    alike = with_mixers(config, [mixer.attention] * config.num_layers)
    attention, mlp = dense_block(alike)
    ssm, width = mixer.state_space, config.model_dim
    return decoder_keys(alike) | {
        **hybrid_mixer_keys(ssm, width),
        "mamba_expand": 2,
        "mamba_d_ssm": ssm.value_width,
        "mamba_rms_norm": ssm.norm_heads is not None,
        "mamba_norm_before_gate": ssm.norm_before_gate,
        "projectors_bias": ssm.bias,
        "attention_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
        "mlp_multipliers": [mlp.gate_scale, mlp.out_scale],
        "key_multiplier": _key_multiplier(attention),
        "attention_in_multiplier": mixer.attention_in_scale,
        "attention_out_multiplier": mixer.attention_out_scale,
        "ssm_multipliers": list(ssm.projection_scales or (1.0,) * 5),
        "ssm_in_multiplier": mixer.state_in_scale,
        "ssm_out_multiplier": mixer.state_out_scale,
    }


def _key_multiplier(attention: GroupedAttentionConfig) -> float:
    """The shortest number by which keys give these scores."""
    if attention.scale is None:
        return 1.0
    plain = attention.head_dim**-0.5
    exact = attention.scale / plain
    found = (float(f"{exact:.{digits}g}") for digits in range(1, 18))
    return next((each for each in found if plain * each == attention.scale), exact)


def _within(part: str, rule: Rule) -> Rule:
    """The rule of a tensor of a part of the mixer."""
    inner = f"attention/{part}/"
    return dataclasses.replace(
        rule,
        parts=tuple((p.replace("attention/", inner, 1), layout) for p, layout in rule.parts),
        beside=None,
    )


FALCON_H1 = dataclasses.replace(
    LLAMA,
    layer=(
        *NORMS,
        *(_within("attention", each) for each in (*QKV, *OUT)),
        *(_within("state_space", each) for each in state_space("mamba")),
        *FEED_FORWARD,
    ),
    outside=OUTER,
)

FAMILIES = {
    "falcon_h1": Family("FalconH1ForCausalLM", read_falcon_h1, write_falcon_h1, FALCON_H1),
}
