"""Configs of mixtures of experts over grouped attention: Mixtral, Qwen-MoE and gpt-oss.

Keys of auxiliary losses are ignored, since they do not change a model's outputs; a run uses
``ExpertsConfig.balance``.
"""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import (
    ExpertsConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.routing import GroupScore, RoutingConfig, Scoring
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.shared import (
    ACTIVATION_NAMES,
    decoder_config,
    decoder_keys,
    layer_types,
    layer_windows,
    mlp_kind,
    routed,
    routes,
    type_keys,
    window_keys,
)
from jaxinfra.hf.weights import GPT_OSS, MIXTRAL, QWEN_MOE, Family

LOSSES = ("router_aux_loss_coef", "output_router_logits")
"""Keys of auxiliary losses, without effect on what a model computes."""
_DENSE, _SPARSE = "dense", "sparse"
_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def read_experts(
    keys: Keys,
    dense: ModelConfig,
    *,
    width_key: str = "moe_intermediate_size",
    renormalizes: bool | None = None,
    **fields: Any,
) -> ModelConfig:
    """Returns the dense model with experts in every layer.

    Args:
        width_key: key of the width of an expert.
        renormalizes: what ``norm_topk_prob`` is by default; None: always, and there is no such key.
        fields: further fields of ``ExpertsConfig``, and ``routing`` where it has more to it.
    """
    weighed = True if renormalizes is None else keys.flag("norm_topk_prob", renormalizes)
    routing = fields.pop("routing", RoutingConfig())
    experts = ExpertsConfig(
        num_experts=keys.named("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer(width_key),
        kind=mlp_kind(dense),
        routing=dataclasses.replace(routing, renormalize=weighed),
        **fields,
    )
    return routed(dense, [experts] * dense.num_layers)


def read_experts_after_dense(
    keys: Keys,
    dense: ModelConfig,
    routing: RoutingConfig,
    *,
    dense_by_default: int,
    shared_by_default: int = 1,
    has_types: bool = False,
) -> ModelConfig:
    """Returns the dense model with DeepSeek-V3's experts in all layers but the first ones.

    Args:
        dense_by_default, shared_by_default: numbers of dense layers and of shared experts.
        has_types: whether ``mlp_layer_types`` may say which layers have experts.
    """
    width = keys.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=keys.named("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=width,
        kind=mlp_kind(dense),
        routing=routing,
        shared_hidden_dim=width * keys.integer("n_shared_experts", shared_by_default),
    )
    each_routes = read_routes(keys, dense_by_default=dense_by_default, has_types=has_types)
    return routed(dense, [experts if each else None for each in each_routes])


def read_routes(keys: Keys, *, dense_by_default: int, has_types: bool = True) -> list[bool]:
    """Reads which layers have experts: all but the first ones, or as ``mlp_layer_types`` says.

    Args:
        dense_by_default, has_types: as in ``read_experts_after_dense``.
    """
    num_layers = keys.integer("num_hidden_layers")
    first = keys.integer("first_k_dense_replace", dense_by_default)
    kinds = keys.sequence("mlp_layer_types", None) if has_types else None
    if kinds is None:
        return [i >= first for i in range(num_layers)]
    if len(kinds) != num_layers or not {*map(str, kinds)} <= {_DENSE, _SPARSE}:
        raise ConfigError(
            f"mlp_layer_types={list(kinds)}: name {_DENSE} or {_SPARSE} for each of {num_layers} "
            "layers"
        )
    return [each == _SPARSE for each in kinds]


def mlp_layer_types(config: ModelConfig) -> list[str]:
    """Writes which layers have experts; inverse of ``read_routes``."""
    return [_SPARSE if each else _DENSE for each in routes(config)]


def read_sigmoid_routing(
    keys: Keys, *, renormalizes: bool, scale: float = 1.0, groups: int | None = 1
) -> RoutingConfig:
    """Reads DeepSeek-V3's routing: sigmoid scores, and a bias that only affects experts' choice.

    Args:
        renormalizes: default of ``norm_topk_prob``.
        scale: default of ``routed_scaling_factor``.
        groups: default of ``n_group`` and ``topk_group``; None: the config has to name them.
    """
    default = () if groups is None else (groups,)
    return RoutingConfig(
        scoring=Scoring.SIGMOID,
        renormalize=keys.flag("norm_topk_prob", renormalizes),
        scale=keys.number("routed_scaling_factor", scale),
        num_groups=keys.integer("n_group", *default),
        top_groups=keys.integer("topk_group", *default),
        group_score=GroupScore.TOP2_SUM,
        correction_bias=True,
    )


def sigmoid_keys(config: ModelConfig) -> tuple[GroupedAttentionConfig, dict[str, Any]]:
    """Returns the attention, and the keys of what ``read_experts_after_dense`` reads."""
    attention, experts, dense = layers_of(config)
    keys = decoder_keys(config, mlp=dense or as_wide(experts))
    return attention, keys | expert_keys(config, experts)


def expert_keys(config: ModelConfig, experts: ExpertsConfig) -> dict[str, Any]:
    """Writes the keys of experts and their routing that ``read_experts_after_dense`` reads."""
    return {
        "moe_intermediate_size": experts.hidden_dim,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": experts.shared_hidden_dim // experts.hidden_dim,
        "first_k_dense_replace": routes(config).count(False),
        "norm_topk_prob": experts.routing.renormalize,
        "routed_scaling_factor": experts.routing.scale,
        "n_group": experts.routing.num_groups,
        "topk_group": experts.routing.top_groups,
    }


def experts_keys(config: ModelConfig) -> tuple[GroupedAttentionConfig, dict[str, Any]]:
    """Returns the attention, and the keys of a model with experts in every layer."""
    attention, experts, dense = layers_of(config)
    return attention, decoder_keys(config, mlp=dense or as_wide(experts)) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.routing.renormalize,
    }


def read_mixtral(keys: Keys) -> ModelConfig:
    """Reads Mixtral: experts in every layer (arXiv 2401.04088)."""
    keys.require("num_key_value_heads", "sliding_window")
    keys.expect("router_jitter_noise", (0.0, None), "inputs of routers get no noise in training")
    keys.ignore(*LOSSES)
    dense = decoder_config(keys, windows=(keys.integer("sliding_window", None),), default_theta=1e6)
    return read_experts(keys, dense, width_key="intermediate_size")


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    """Writes Mixtral; inverse of ``read_mixtral``."""
    attention, experts, _ = layers_of(config)
    keys = decoder_keys(config, mlp=as_wide(experts))
    return keys | {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "sliding_window": attention.window,
    }


def read_qwen2_moe(keys: Keys) -> ModelConfig:
    """Reads Qwen 1.5 and 2 with experts, one of them shared and gated."""
    keys.require("num_key_value_heads")
    if keys.flag("use_sliding_window", False):
        # Releases differ in which layers have windows where none are named.
        keys.sequence("layer_types")
    dense = decoder_config(keys, windows=layer_windows(keys), qkv_bias=keys.flag("qkv_bias", True))
    return read_qwen_experts(
        keys,
        dense,
        shared_hidden_dim=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_qwen3_moe(keys: Keys) -> ModelConfig:
    """Reads Qwen 3 with experts (arXiv 2505.09388); a window applies to all layers."""
    keys.require("num_key_value_heads")
    keys.expect("use_qk_norm", (True, None), "queries and keys are normalized here")
    window = keys.integer("sliding_window", None)
    if keys.flag("use_sliding_window", False):
        keys.require("sliding_window")
        keys.expect("max_window_layers", (0, None), "releases differ in which layers have windows")
    else:
        keys.ignore("max_window_layers")
        window = None
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    dense = decoder_config(
        keys, windows=(window,), attention_bias=keys.flag("attention_bias", False), qk_norm=norm
    )
    return read_qwen_experts(keys, dense)


def read_qwen_experts(
    keys: Keys, dense: ModelConfig, *, renormalizes: bool = False, **shared: Any
) -> ModelConfig:
    """Returns the dense model with Qwen's experts in the layers that have them.

    Args:
        renormalizes: default of ``norm_topk_prob``.
        shared: fields of ``ExpertsConfig`` about shared experts.
    """
    keys.ignore(*LOSSES)
    dense_only = set(keys.sequence("mlp_only_layers", ()))
    stride = keys.integer("decoder_sparse_step", 1)
    num_experts = keys.named("num_experts", "num_local_experts")
    names = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    if num_experts < 1:
        keys.ignore(*names)
        return dense
    experts = ExpertsConfig(
        num_experts=num_experts,
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer("moe_intermediate_size"),
        kind=mlp_kind(dense),
        routing=RoutingConfig(renormalize=keys.flag("norm_topk_prob", renormalizes)),
        **shared,
    )
    return routed(
        dense,
        [
            experts if i not in dense_only and (i + 1) % stride == 0 else None
            for i in range(dense.num_layers)
        ],
    )


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes Qwen 2 with experts; inverse of ``read_qwen2_moe``."""
    attention, experts, _ = layers_of(config)
    return qwen_keys(config) | {
        **window_keys(config),
        "qkv_bias": attention.qkv_bias,
        "max_window_layers": config.num_layers,
        "shared_expert_intermediate_size": max(experts.shared_hidden_dim, 1),
    }


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes Qwen 3 with experts; inverse of ``read_qwen3_moe``."""
    attention, _, _ = layers_of(config)
    return qwen_keys(config) | {
        "attention_bias": attention.out_bias,
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
    }


def qwen_keys(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys of a decoder with Qwen's experts."""
    _, experts, dense = layers_of(config)
    return decoder_keys(config, mlp=dense or as_wide(experts)) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "norm_topk_prob": experts.routing.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, has in enumerate(routes(config)) if not has],
    }


def read_gpt_oss(keys: Keys) -> ModelConfig:
    """Reads gpt-oss: sinks, alternating windows, biases, a clamped gate (arXiv 2508.10925)."""
    keys.require("num_key_value_heads", "head_dim", "sliding_window")
    keys.expect("hidden_act", SILU, "its gate is one of its own")
    for name, value in _GATE.items():
        keys.expect(name, (value,), f"the gate here has {value}")
    top_k = keys.named("num_experts_per_tok", "experts_per_token")
    keys.ignore(*LOSSES, "initial_context_length")  # said again in the rope's scaling
    bias = keys.flag("attention_bias", True)
    if not keys.mapping("rope_scaling") and not keys.mapping("rope_parameters"):
        raise ConfigError(
            "gpt_oss config: rope_scaling is missing or null, which releases of the reference "
            "implementation take for YaRN by 32 or for no scaling; write what the model was "
            'trained with, {"rope_type": "default"} if unscaled'
        )
    dense = decoder_config(
        keys,
        windows=layer_types(keys, every=2)[1],
        attention_bias=bias,
        sinks=True,
        default_theta=150_000.0,
    )
    experts = ExpertsConfig(
        num_experts=keys.named("num_local_experts", "num_experts"),
        top_k=top_k,
        hidden_dim=keys.integer("intermediate_size"),
        kind=MlpKind.SWIGLU_CLAMPED,
        bias=True,
        routing=RoutingConfig(logit_bias=True),
    )
    return routed(dense, [experts] * dense.num_layers)


def write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    """Writes gpt-oss; inverse of ``read_gpt_oss``."""
    attention, experts, _ = layers_of(config)
    wide = dataclasses.replace(as_wide(experts), kind=MlpKind.SWIGLU)
    keys = decoder_keys(config, mlp=wide)
    # Null would be read as YaRN.
    scaling = keys.get("rope_scaling") or {"rope_type": "default"}
    return keys | {
        "rope_scaling": scaling,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "attention_bias": attention.out_bias,
        **type_keys(config),
        **_GATE,
    }


def layers_of(
    config: ModelConfig,
) -> tuple[GroupedAttentionConfig, ExpertsConfig, MlpConfig | None]:
    """Reads attention, experts, and dense layers where the model has some.

    A model without experts has the fewest, for the keys of architectures that may have some.
    """
    attention = config.blocks[0].mixer
    feed_forwards = {type(block.feed_forward): block.feed_forward for block in config.blocks}
    experts, dense = feed_forwards.get(ExpertsConfig), feed_forwards.get(MlpConfig)
    if experts is None and isinstance(dense, MlpConfig):
        experts = fewest_experts(dense)
    if not isinstance(attention, GroupedAttentionConfig) or not isinstance(experts, ExpertsConfig):
        raise ConfigError("experts over grouped attention are what these write")
    return attention, experts, dense if isinstance(dense, MlpConfig) else None


def fewest_experts(dense: MlpConfig) -> ExpertsConfig:
    """Returns experts for the keys of a model whose layers are all dense."""
    return ExpertsConfig(num_experts=2, top_k=1, hidden_dim=dense.hidden_dim, kind=dense.kind)


def as_wide(experts: ExpertsConfig) -> MlpConfig:
    """A dense layer as wide as one expert."""
    assert experts.kind in ACTIVATION_NAMES or experts.kind is MlpKind.SWIGLU_CLAMPED
    return MlpConfig(hidden_dim=experts.hidden_dim, kind=experts.kind)


FAMILIES = {
    "mixtral": Family("MixtralForCausalLM", read_mixtral, write_mixtral, MIXTRAL),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", read_qwen2_moe, write_qwen2_moe, QWEN_MOE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, QWEN_MOE),
    "gpt_oss": Family("GptOssForCausalLM", read_gpt_oss, write_gpt_oss, GPT_OSS),
}
