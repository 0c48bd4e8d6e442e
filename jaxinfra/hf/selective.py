"""Configs of models with Mamba 1 layers, both ways: Mamba, Falcon-Mamba and Jamba.

Letters of layouts beside those of ``tensor_layout.py``: M channels, W taps of a convolution.
"""

import dataclasses
import math
from typing import Any

from jaxinfra.config.model import BlockConfig, ExpertsConfig, ModelConfig, NormConfig
from jaxinfra.config.recurrent import SelectiveScanConfig
from jaxinfra.config.routing import RoutingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.bamba import BAMBA, FEED_FORWARD, NORMS
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.mamba import MAMBA2, MAX_POSITIONS, RESCALED
from jaxinfra.hf.shared import (
    as_attending,
    decoder_config,
    decoder_keys,
    mlp_kind,
    model_keys,
    model_of,
    routed,
    routes,
    with_mixers,
)
from jaxinfra.hf.sparse import LOSSES, as_wide, layers_of
from jaxinfra.hf.weights import ATTENDS, PROJECTIONS, Family, Rule, beside, experts, linear, norm

_IGNORED = """
    fused_add_norm pad_vocab_size_multiple time_step_scale time_step_min time_step_max
    time_step_init_scheme time_step_floor residual_in_fp32 use_mambapy use_falcon_mambapy
    use_associative_scan
"""


def read_mamba(keys: Keys, **norms: Any) -> ModelConfig:
    """Reads Mamba (Gu and Dao 2023)."""
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.expect("rescale_prenorm_residual", (False, None), RESCALED)
    keys.ignore(*_IGNORED.split())
    width, num_layers = keys.integer("hidden_size"), keys.integer("num_hidden_layers")
    # A number of channels goes before a factor, as in Falcon-Mamba 7B, whose two differ.
    channels = keys.integer("intermediate_size", int(keys.number("expand", 2) * width))
    for name, value in (("d_model", width), ("d_inner", channels), ("n_layer", num_layers)):
        keys.expect(name, (value, None), "it says again what another key says")
    keys.expect("rms_norm", (True, None), "norms are RMSNorm here")
    keys.expect("ssm_cfg", ({}, None), "other keys say what mixers are")
    mixer = SelectiveScanConfig(
        num_channels=channels,
        state_dim=keys.integer("state_size"),
        rank=_rank(keys, "time_step_rank", width),
        conv_width=keys.integer("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=keys.flag("use_bias", False),
        **norms,
    )
    stream = NormConfig(epsilon=keys.number("layer_norm_epsilon", 1e-5))
    blocks = [BlockConfig(mixer=mixer, feed_forward=None, norm=stream)] * num_layers
    around = {"max_positions": MAX_POSITIONS, "tied_by_default": True, "init_std": 0.1}
    return model_of(keys, blocks, **around)


def read_falcon_mamba(keys: Keys) -> ModelConfig:
    """Reads Falcon-Mamba: keys, queries and steps are normalized, without scales."""
    epsilon = keys.number("mixer_rms_eps", 1e-6)
    return read_mamba(keys, norm_epsilon=epsilon, norm_scale=False)


def _rank(keys: Keys, name: str, width: int) -> int:
    rank = keys.either(name, int, str)
    return math.ceil(width / 16) if rank in (None, "auto") else rank


def write_mamba(config: ModelConfig) -> dict[str, Any]:
    """Writes Mamba; inverse of ``read_mamba``."""
    mixer, width = config.blocks[0].mixer, config.model_dim
    if not isinstance(mixer, SelectiveScanConfig):
        raise ConfigError(f"{type(mixer).__name__}: selective scans are what this writes")
    return {
        **model_keys(config),
        "state_size": mixer.state_dim,
        "intermediate_size": mixer.num_channels,
        # A whole number for strict readers; the number of channels goes before it.
        "expand": max(mixer.num_channels // width, 1),
        "time_step_rank": mixer.rank,
        "conv_kernel": mixer.conv_width,
        "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.blocks[0].norm.epsilon,
    }


def write_falcon_mamba(config: ModelConfig) -> dict[str, Any]:
    """Writes Falcon-Mamba; inverse of ``read_falcon_mamba``."""
    keys, mixer = write_mamba(config), config.blocks[0].mixer
    assert isinstance(mixer, SelectiveScanConfig), "write_mamba"
    return keys | {"mixer_rms_eps": mixer.norm_epsilon}


def read_jamba(keys: Keys) -> ModelConfig:
    """Reads Jamba: Mamba 1 layers, some with attention; experts in some layers, no positions."""
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.expect("mamba_inner_layernorms", (True, None), "all known models have these norms")
    keys.ignore(*LOSSES, "use_mamba_kernels", "use_mambapy", "use_associative_scan")
    keys.ignore("num_logits_to_keep", "calc_logits_for_entire_prompt", "n_ctx")
    model = decoder_config(
        keys, has_rope=False, num_kv_heads=None if keys.has("num_key_value_heads") else 8
    )
    layers = range(model.num_layers)
    num_experts = keys.named("num_experts", "num_local_experts")
    top_k = keys.integer("num_experts_per_tok")
    chosen = _each(keys, "expert_layer", layers, period=2, offset=1)
    if num_experts > 1 and any(chosen):
        sparse = ExpertsConfig(
            num_experts=num_experts,
            top_k=top_k,
            hidden_dim=keys.integer("intermediate_size"),
            kind=mlp_kind(model),
            routing=RoutingConfig(renormalize=False),
        )
        model = routed(model, [sparse if each else None for each in chosen])
    mixer = SelectiveScanConfig(
        num_channels=keys.integer("mamba_expand", 2) * model.model_dim,
        state_dim=keys.integer("mamba_d_state", 16),
        rank=_rank(keys, "mamba_dt_rank", model.model_dim),
        conv_width=keys.integer("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        bias=keys.flag("mamba_proj_bias", False),
        norm_epsilon=keys.number("rms_norm_eps"),
    )
    attends = _each(keys, "attn_layer", layers, period=8, offset=4)
    return with_mixers(model, [None if each else mixer for each in attends])


def _each(keys: Keys, name: str, layers: range, *, period: int, offset: int) -> list[bool]:
    """Reads which layers are of a kind: every ``period``-th from ``offset`` on."""
    period = keys.integer(f"{name}_period", period)
    offset = keys.integer(f"{name}_offset", offset)
    if not 0 <= offset < period:
        raise ConfigError(f"{name}_offset={offset} must be below {name}_period={period}")
    return [i % period == offset for i in layers]


def write_jamba(config: ModelConfig) -> dict[str, Any]:
    """Writes Jamba; inverse of ``read_jamba``."""
    absent = SelectiveScanConfig(num_channels=config.model_dim, state_dim=1, rank=1)
    alike, mixer = as_attending(config, absent)
    has = routes(alike)
    sparse = layers_of(alike)[1] if any(has) else None
    keys = decoder_keys(alike, mlp=None if sparse is None else as_wide(sparse))
    scans = [isinstance(block.mixer, SelectiveScanConfig) for block in config.layers]
    return keys | {
        "num_experts": 1 if sparse is None else sparse.num_experts,
        "num_experts_per_tok": 1 if sparse is None else sparse.top_k,
        **_period("expert_layer", has),
        **_period("attn_layer", [not each for each in scans]),
        "mamba_d_state": mixer.state_dim,
        "mamba_d_conv": mixer.conv_width,
        "mamba_expand": mixer.num_channels // config.model_dim,
        "mamba_dt_rank": mixer.rank,
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.bias,
    }


def _period(name: str, chosen: list[bool]) -> dict[str, int]:
    """Writes which layers are of a kind; inverse of ``_each``."""
    found = [i for i, each in enumerate(chosen) if each]
    offset = found[0] if found else len(chosen)
    period = found[1] - offset if len(found) > 1 else max(len(chosen), offset + 1)
    return {f"{name}_period": period, f"{name}_offset": offset}


def selective_scan(theirs: str) -> tuple[Rule, ...]:
    """Returns the rules of a Mamba 1 mixer's tensors."""

    def fused(name: str, layout: str, *paths: str) -> Rule:
        return Rule(name=f"{theirs}.{name}", parts=tuple((f"attention/{p}", layout) for p in paths))

    inward, channel = "(M V) D -> D M V", "(M V) -> M V"
    return (
        fused("in_proj.weight", inward, "value/weight", "gate/weight"),
        fused("in_proj.bias", channel, "value/bias", "gate/bias"),
        fused("conv1d.weight", "(M V) 1 W -> M V W", "value_conv/weight"),
        fused("conv1d.bias", channel, "value_conv/bias"),
        fused(
            "x_proj.weight",
            "R (M V) -> M V R",
            *("step_down/weight", "key/weight", "query/weight"),
        ),
        fused("dt_proj.weight", "M R -> R M", "step/weight"),
        fused("dt_proj.bias", "M -> M", "step_bias"),
        fused("A_log", "M H -> M H", "decay_log"),
        fused("D", "M -> M", "skip"),
        *linear(f"{theirs}.out_proj", "attention/out", "D (M V) -> M V D", "D -> D"),
        fused("dt_layernorm.weight", "R -> R", "step_norm/scale"),
        fused("b_layernorm.weight", "R -> R", "key_norm/scale"),
        fused("c_layernorm.weight", "R -> R", "query_norm/scale"),
    )


_BESIDE = "attention/step_bias"
MAMBA = dataclasses.replace(
    MAMBA2, layer=(*norm("norm", "attention_norm"), *beside(_BESIDE, selective_scan("mixer")))
)
JAMBA = dataclasses.replace(
    BAMBA,
    layer=(
        *(*NORMS, *ATTENDS, *beside(_BESIDE, selective_scan("mamba")), *FEED_FORWARD),
        *experts("feed_forward", *PROJECTIONS, router="router.weight"),
    ),
)

FAMILIES = {
    "mamba": Family("MambaForCausalLM", read_mamba, write_mamba, MAMBA),
    "falcon_mamba": Family("FalconMambaForCausalLM", read_falcon_mamba, write_falcon_mamba, MAMBA),
    "jamba": Family("JambaForCausalLM", read_jamba, write_jamba, JAMBA),
}
