"""Configs of Nemotron-H and Nemotron 3, both ways: layers of one branch each.

A layer is a Mamba 2 mixer, attention without positions, a feed-forward layer or experts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.recurrent import NoMixer, StateSpaceConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.mamba import (
    LARGEST_STEP,
    MAMBA2,
    read_step_limit,
    smallest_mixer,
    state_space,
)
from jaxinfra.hf.shared import (
    ACTIVATION_NAMES,
    FULL,
    LINEAR,
    UNGATED,
    model_keys,
    model_of,
)
from jaxinfra.hf.sparse import LOSSES, read_sigmoid_routing
from jaxinfra.hf.weights import Family, experts, inward, norm, outward, rule, ungated, without

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
_OLDER = {"mamba": LINEAR, "attention": FULL}


def read_nemotron_h(keys: Keys) -> ModelConfig:
    """Reads Nemotron-H (arXiv 2504.03624) and Nemotron 3, whose layers have one branch each."""
    keys.expect("mamba_hidden_act", ("silu",), "convolutions and gates have this activation")
    keys.expect("attention_bias", (False,), "implementations differ in whether it is used")
    keys.expect("tie_word_embeddings", (False,), "implementations differ in whether it is used")
    keys.expect("mamba_proj_bias", (False, None), "use_bias says it")
    keys.ignore(*LOSSES, "expand", "chunk_size", "mamba_chunk_size", "mamba_ssm_cache_dtype")
    keys.ignore("time_step_max", "time_step_floor", "time_step_rank")
    keys.ignore("mamba_expand", "mamba_dt_max", "mamba_dt_init_floor")
    keys.ignore("rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels")
    keys.ignore("num_logits_to_keep", "moe_shared_expert_overlap", "num_nextn_predict_layers")
    keys.ignore("mtp_layers_block_type", "mtp_hybrid_override_pattern")
    kinds = _kinds(keys)
    stream = NormConfig(epsilon=keys.number("layer_norm_epsilon", 1e-5))
    for name in ("norm_eps", "rms_norm_eps"):
        keys.expect(name, (stream.epsilon, None), "layer_norm_epsilon says it")
    layers: dict[str, dict[str, Any]] = {
        LINEAR: {"mixer": _state_space(keys), "feed_forward": None},
        FULL: {"mixer": _attention(keys), "feed_forward": None},
    }
    layers |= _feed_forwards(keys, kinds)
    blocks = [BlockConfig(**layers[kind], norm=stream) for kind in kinds]
    return model_of(keys, blocks)


def _kinds(keys: Keys) -> list[str]:
    """Reads each layer's kind: by name, or a letter each."""
    letters = keys.text("hybrid_override_pattern", None)
    unknown = sorted({*(letters or "")} - {*_LETTERS})
    if unknown:
        raise ConfigError(
            f"hybrid_override_pattern: {', '.join(map(repr, unknown))} is no kind of layer; known: "
            f"{' '.join(_LETTERS)}"
        )
    by_letter = None if letters is None else [_LETTERS[each] for each in letters]
    named = keys.sequence("layers_block_type", keys.sequence("layer_types", by_letter))
    if named is None:
        raise ConfigError("layers_block_type is missing; add the kind of each layer")
    kinds = [_OLDER.get(each, each) for each in named]
    unknown = sorted({str(each) for each in kinds if each not in _LETTERS.values()})
    if unknown:
        raise ConfigError(
            f"layers_block_type: {', '.join(unknown)} is not supported; known: "
            f"{', '.join(_LETTERS.values())}"
        )
    keys.expect("num_hidden_layers", (len(kinds), None), "each layer's kind is named")
    return kinds


def _state_space(keys: Keys) -> StateSpaceConfig:
    heads, groups = keys.integer("mamba_num_heads"), keys.named("n_groups", "mamba_n_groups")
    if groups < 1 or heads % groups:
        raise ConfigError(f"mamba_num_heads={heads} is not a multiple of n_groups={groups}")
    # Makers have two names for some settings; where both are given, the second one counts.
    second = {"time_step_limit": "mamba_dt_limit", "time_step_min": "mamba_dt_min"}
    second |= {"conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
    given = {name: other for name, other in second.items() if keys.has(other)}
    keys.ignore(*given)
    keys = keys.named_as(**given)
    if read_step_limit(keys) is not None:
        raise ConfigError("time_step_limit: implementations differ in whether it is used")
    least = keys.number("time_step_min", 0.001)  # the reference bounds steps by it
    return StateSpaceConfig(
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=keys.integer("ssm_state_size"),
        value_dim=keys.integer("mamba_head_dim"),
        conv_width=keys.integer("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=keys.flag("use_bias", False),
        norm_heads=heads // groups,
        norm_epsilon=keys.number("layer_norm_epsilon", 1e-5),
        step_limit=(least, LARGEST_STEP) if least > 0.0 else None,
    )


def _attention(keys: Keys) -> GroupedAttentionConfig:
    keys.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    keys.expect("num_query_groups", (kv_heads, None), "num_key_value_heads says otherwise")
    return GroupedAttentionConfig(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=keys.named("head_dim", "attention_head_dim"),
        rope=None,
    )


def _feed_forwards(keys: Keys, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Reads layers without a mixer, by kind."""
    activation = keys.choice("mlp_hidden_act", UNGATED, "relu2")
    bias = keys.flag("mlp_bias", False)
    dense = MlpConfig(hidden_dim=keys.integer("intermediate_size"), kind=activation, bias=bias)
    layers: dict[str, dict[str, Any]] = {_MLP: {"mixer": NoMixer(), "feed_forward": dense}}
    if _EXPERTS not in kinds:
        keys.ignore("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")
        keys.ignore("moe_intermediate_size", "moe_shared_expert_intermediate_size", "topk_group")
        keys.ignore("moe_latent_size", "norm_topk_prob", "routed_scaling_factor")
        return layers
    if bias:
        raise ConfigError("mlp_bias=true with experts: only dense layers have biases here")
    keys.expect("n_shared_experts", (1,), "moe_shared_expert_intermediate_size is one's width")
    routed = ExpertsConfig(
        num_experts=keys.named("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer("moe_intermediate_size"),
        kind=activation,
        routing=read_sigmoid_routing(keys, renormalizes=True),
        shared_hidden_dim=keys.integer("moe_shared_expert_intermediate_size"),
        latent_dim=keys.integer("moe_latent_size", None),
    )
    return layers | {_EXPERTS: {"mixer": NoMixer(), "feed_forward": routed}}


def write_nemotron_h(config: ModelConfig) -> dict[str, Any]:
    """Writes Nemotron-H; inverse of ``read_nemotron_h``."""
    found: Mapping[type, Any] = {
        type(each): each for block in config.blocks for each in (block.mixer, block.feed_forward)
    }
    mixer, routed = found.get(StateSpaceConfig) or smallest_mixer(config), found.get(ExpertsConfig)
    if any(block.num_layers > 1 for block in config.blocks):
        raise ConfigError("layers of one branch are what this writes")
    least, most = mixer.step_limit or (0.0, LARGEST_STEP)
    if most != LARGEST_STEP:
        raise ConfigError(f"step_limit={mixer.step_limit}: only a lower bound is what this writes")
    attention = found.get(GroupedAttentionConfig) or GroupedAttentionConfig(
        num_q_heads=1, num_kv_heads=1, head_dim=config.model_dim, rope=None
    )
    kind = MlpKind.RELU_SQUARED if routed is None else routed.kind
    dense = found.get(MlpConfig) or MlpConfig(hidden_dim=config.model_dim, kind=kind)
    return {
        **{
            name: value for name, value in model_keys(config).items() if name != "num_hidden_layers"
        },
        "layers_block_type": [_name(block) for block in config.layers],
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": attention.num_q_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": dense.hidden_dim,
        "mlp_hidden_act": ACTIVATION_NAMES.get(dense.kind),
        "mlp_bias": dense.bias,
        "mamba_num_heads": mixer.num_value_heads,
        "n_groups": mixer.num_key_heads,
        "ssm_state_size": mixer.key_dim,
        "mamba_head_dim": mixer.value_dim,
        "conv_kernel": mixer.conv_width,
        "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.bias,
        "time_step_min": least,
        "layer_norm_epsilon": config.final_norm.epsilon,
        **({} if routed is None else _experts_keys(routed)),
    }


def _name(block: BlockConfig) -> str:
    """Returns the name of the kind of a layer's one branch."""
    kinds: Mapping[type, str] = {
        StateSpaceConfig: LINEAR,
        GroupedAttentionConfig: FULL,
        MlpConfig: _MLP,
        ExpertsConfig: _EXPERTS,
    }
    branch = block.feed_forward if isinstance(block.mixer, NoMixer) else block.mixer
    if type(branch) not in kinds:
        raise ConfigError(f"{type(branch).__name__}: no kind of layer that this writes")
    return kinds[type(branch)]


def _experts_keys(routed: ExpertsConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": routed.num_experts,
        "num_experts_per_tok": routed.top_k,
        "moe_intermediate_size": routed.hidden_dim,
        "moe_shared_expert_intermediate_size": routed.shared_hidden_dim,
        "moe_latent_size": routed.latent_dim,
        "n_shared_experts": 1,
        "norm_topk_prob": routed.routing.renormalize,
        "routed_scaling_factor": routed.routing.scale,
        "n_group": routed.routing.num_groups,
        "topk_group": routed.routing.top_groups,
    }


_ATTENTION = (*inward("mixer"), *outward("mixer.o_proj"))
NEMOTRON_H = dataclasses.replace(
    MAMBA2,
    layer=(
        *norm("norm", "attention_norm"),
        *norm("norm", "mlp_norm"),
        *state_space("mixer"),
        *without("attention/value_conv/weight", _ATTENTION),
        *ungated("mixer.up_proj", "mixer.down_proj"),
        *experts("mixer", "gate_proj", "up_proj", "down_proj", shared="shared_experts"),
        rule("mixer.fc1_latent_proj.weight", "mlp/latent_down/weight", "R D -> D R"),
        rule("mixer.fc2_latent_proj.weight", "mlp/latent_up/weight", "D R -> R D"),
    ),
    ignored=r"mtp\..*",
)
"""Tensors of Nemotron-H; predictors of further tokens are left out."""

FAMILIES = {
    "nemotron_h": Family("NemotronHForCausalLM", read_nemotron_h, write_nemotron_h, NEMOTRON_H),
}
