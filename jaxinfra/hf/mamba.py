"""Configs of Mamba 2, both ways: layers with a state alone.

Letters of layouts beside those of ``tensor_layout.py``: M value heads, W taps of a convolution.
"""

from collections.abc import Sequence
from typing import Any

from jaxinfra.config.model import BlockConfig, ModelConfig, NormConfig
from jaxinfra.config.recurrent import StateSpaceConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.shared import model_keys, model_of
from jaxinfra.hf.weights import Family, Rule, WeightTable, beside, linear, norm, outside, rule

RESCALED = "implementations differ in whether stored weights are scaled by it again"
"""Reason to refuse what is meant for initial weights alone."""
LARGEST_STEP = 3e38
"""The upper bound of steps that have none: a finite number, which any JSON may hold."""
MAX_POSITIONS = 1 << 20
"""Longest text of models whose states know no positions: as long as a request may be."""


def read_mamba2(keys: Keys) -> ModelConfig:
    """Reads Mamba 2 (Dao and Gu 2024)."""
    keys.expect("hidden_act", SILU, "convolutions and gates have this activation")
    keys.ignore("expand", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor")
    keys.ignore("residual_in_fp32", "chunk_size", "norm_before_gate")
    keys.expect("rescale_prenorm_residual", (False, None), RESCALED)
    keys.ignore("rms_norm", "intermediate_size")
    heads, epsilon = keys.integer("num_heads"), keys.number("layer_norm_epsilon", 1e-5)
    groups = keys.integer("n_groups")
    if groups < 1 or heads % groups:
        raise ConfigError(f"num_heads={heads} is not a multiple of n_groups={groups}")
    mixer = StateSpaceConfig(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=keys.integer("state_size"),
        value_dim=keys.integer("head_dim"),
        conv_width=keys.integer("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=keys.flag("use_bias", False),
        norm_heads=heads // groups,
        norm_epsilon=epsilon,
        step_limit=read_step_limit(keys),
    )
    block = BlockConfig(mixer=mixer, feed_forward=None, norm=NormConfig(epsilon=epsilon))
    blocks = [block] * keys.integer("num_hidden_layers")
    return model_of(keys, blocks, max_positions=MAX_POSITIONS, init_std=0.1)


def read_step_limit(keys: Keys) -> tuple[float, float] | None:
    """Reads the bounds of a token's step; None for those that bound nothing.

    Releases write infinity as a number of JSON's extension, or as an object of its name.
    """
    values = keys.sequence("time_step_limit", None)
    if values is None:
        return None
    if len(values) != 2:
        raise ConfigError(f"time_step_limit={list(values)}: give the least and the largest step")
    least, most = (float(x["__float__"] if isinstance(x, dict) else x) for x in values)
    return None if least <= 0.0 and most > LARGEST_STEP else (least, min(most, LARGEST_STEP))


def step_limit_keys(mixer: StateSpaceConfig) -> dict[str, Any]:
    """Writes the bounds of a token's step; inverse of ``read_step_limit``."""
    return {} if mixer.step_limit is None else {"time_step_limit": mixer.step_limit}


def write_mamba2(config: ModelConfig) -> dict[str, Any]:
    """Writes Mamba 2; inverse of ``read_mamba2``."""
    mixer, width = config.blocks[0].mixer, config.model_dim
    if not isinstance(mixer, StateSpaceConfig):
        raise ConfigError(f"{type(mixer).__name__}: state spaces are what this writes")
    inner = mixer.num_value_heads * mixer.value_dim
    return {
        **model_keys(config),
        "num_heads": mixer.num_value_heads,
        "head_dim": mixer.value_dim,
        "state_size": mixer.key_dim,
        "n_groups": mixer.num_key_heads,
        "expand": inner // width if inner % width == 0 else inner / width,
        "conv_kernel": mixer.conv_width,
        "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": mixer.norm_epsilon,
        **step_limit_keys(mixer),
    }


def read_hybrid_mixer(keys: Keys, *, width: int, **fields: Any) -> StateSpaceConfig:
    """Reads a Mamba 2 mixer by the names that it has beside attention: ``mamba_n_heads``.

    Args:
        width: width of all values.
        fields: further fields of ``StateSpaceConfig``; ``norm_heads`` is by default those that
            share a key head.
    """
    heads, groups = keys.integer("mamba_n_heads"), keys.integer("mamba_n_groups", 1)
    if groups < 1 or heads % groups:
        raise ConfigError(f"mamba_n_heads={heads} is not a multiple of mamba_n_groups={groups}")
    head_dim = keys.either("mamba_d_head", int, str)
    if head_dim in (None, "auto"):
        head_dim = width // heads
    if head_dim * heads != width:
        raise ConfigError(
            f"mamba_d_head={head_dim} of mamba_n_heads={heads} are not the {width} that values "
            "have together"
        )
    keys.ignore("mamba_chunk_size")
    plain = {"norm_heads": heads // groups, "norm_epsilon": keys.number("rms_norm_eps")}
    return StateSpaceConfig(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=keys.integer("mamba_d_state"),
        value_dim=head_dim,
        conv_width=keys.integer("mamba_d_conv", 4),
        conv_bias=keys.flag("mamba_conv_bias", True),
        bias=keys.flag("mamba_proj_bias", False),
        step_limit=read_step_limit(keys),
        **plain | fields,
    )


def smallest_mixer(config: ModelConfig) -> StateSpaceConfig:
    """Returns a mixer for the keys of a model of such a family whose layers all attend."""
    width = 2 * config.model_dim
    return StateSpaceConfig(
        num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=width, norm_heads=1
    )


def hybrid_mixer_keys(mixer: StateSpaceConfig, width: int) -> dict[str, Any]:
    """Writes the keys that ``read_hybrid_mixer`` reads, for a model of this width."""
    inner = mixer.value_width
    return {
        "mamba_n_heads": mixer.num_value_heads,
        "mamba_n_groups": mixer.num_key_heads,
        "mamba_d_state": mixer.key_dim,
        "mamba_d_head": mixer.value_dim,
        "mamba_expand": inner // width if inner % width == 0 else inner / width,
        "mamba_d_conv": mixer.conv_width,
        "mamba_conv_bias": mixer.conv_bias,
        "mamba_proj_bias": mixer.bias,
        **step_limit_keys(mixer),
    }


def state_space(theirs: str) -> tuple[Rule, ...]:
    """Returns the rules of a Mamba 2 mixer's tensors; its one projection has all inputs."""

    def fused(name: str, kind: str, parts: Sequence[tuple[str, str]]) -> Rule:
        paths = tuple((f"attention/{path}/{kind}", layout) for path, layout in parts)
        return Rule(name=f"{theirs}.{name}.{kind}", parts=paths)

    values, keys = "(M V) D -> D M V", "(N H) D -> D N H"
    inward = (("gate", values), ("value", values), ("key", keys), ("query", keys))
    taps, key_taps = "(M V) 1 W -> M V W", "(N H) 1 W -> N H W"
    convs = (("value_conv", taps), ("key_conv", key_taps), ("query_conv", key_taps))
    each, key_each = "(M V) -> M V", "(N H) -> N H"
    biases = (("gate", each), ("value", each), ("key", key_each), ("query", key_each))
    conv_biases = (("value_conv", each), ("key_conv", key_each), ("query_conv", key_each))
    rules = (
        fused("in_proj", "weight", (*inward, ("step", "M D -> D M"))),
        fused("in_proj", "bias", (*biases, ("step", "M -> M"))),
        fused("conv1d", "weight", convs),
        fused("conv1d", "bias", conv_biases),
        rule(f"{theirs}.dt_bias", "attention/step_bias", "M -> M"),
        rule(f"{theirs}.A_log", "attention/decay_log", "M -> M"),
        rule(f"{theirs}.D", "attention/skip", "M -> M"),
        rule(f"{theirs}.norm.weight", "attention/norm/scale", "(M V) -> M V"),
        *linear(f"{theirs}.out_proj", "attention/out", "D (M V) -> M V D", "D -> D"),
    )
    return beside("attention/step_bias", rules)


MAMBA2 = WeightTable(
    layer_prefix="backbone.layers.{}.",
    layer=(*norm("norm", "attention_norm"), *state_space("mixer")),
    outside=outside("backbone.embeddings.weight", "backbone.norm_f"),
    root="backbone.",
)

FAMILIES = {
    "mamba2": Family("Mamba2ForCausalLM", read_mamba2, write_mamba2, MAMBA2),
}
