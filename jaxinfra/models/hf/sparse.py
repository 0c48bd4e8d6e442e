"""Mixtures of experts and latent attention: configs of Mixtral, Qwen-MoE and DeepSeek into ours.

What decides how tokens choose their experts and how these are weighed is read with the layers that
will run them; until then no model of these can be built to run.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxinfra.config.model import (
    ExpertsConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    ModelConfig,
    NormConfig,
    Stack,
    stacked,
)
from jaxinfra.config.rope import YarnScaling
from jaxinfra.config.routing import GroupScore, RoutingConfig, Scoring
from jaxinfra.models.hf.keys import Keys
from jaxinfra.models.hf.rope import yarn_temperature
from jaxinfra.models.hf.shared import decoder_config, layer_windows, period

# Keys of the choice of experts, and of nothing that is planned.
_ROUTING = (
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "norm_topk_prob"),
    *("n_group", "topk_group", "routed_scaling_factor", "scoring_func", "seq_aux", "topk_method"),
    *("aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "rope_interleave"),
    "quantization_config",
)


def read_mixtral(keys: Keys) -> ModelConfig:
    """Mixtral: experts in every layer (arXiv 2401.04088)."""
    dense = decoder_config(keys, windows=(keys.integer("sliding_window", None),))
    experts = ExpertsConfig(
        num_experts=keys.integer("num_local_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer("intermediate_size"),
    )
    return _routed(keys, dense, experts, [True] * dense.num_layers)


def read_qwen2_moe(keys: Keys) -> ModelConfig:
    """Qwen 1.5 and 2 with experts, one of them shared and gated."""
    dense = decoder_config(keys, windows=layer_windows(keys), qkv_bias=True)
    experts = dataclasses.replace(
        _qwen_experts(keys),
        shared_hidden_dim=keys.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _routed(keys, dense, experts, _qwen_layers(keys))


def read_qwen3_moe(keys: Keys) -> ModelConfig:
    """Qwen 3 with experts (arXiv 2505.09388)."""
    bias = keys.flag("attention_bias", False)
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    dense = decoder_config(
        keys, windows=layer_windows(keys), qkv_bias=bias, out_bias=bias, qk_norm=norm
    )
    return _routed(keys, dense, _qwen_experts(keys), _qwen_layers(keys))


def _qwen_experts(keys: Keys) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=keys.integer("moe_intermediate_size"),
    )


def _qwen_layers(keys: Keys) -> list[bool]:
    dense_only = set(keys.sequence("mlp_only_layers", ()))
    stride = keys.integer("decoder_sparse_step", 1)
    layers = range(keys.integer("num_hidden_layers"))
    return [i not in dense_only and (i + 1) % stride == 0 for i in layers]


def read_deepseek(keys: Keys) -> ModelConfig:
    """DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), without multi-token prediction."""
    keys.expect("attention_bias", (False,), "latent attention here has no biases")
    dense = decoder_config(keys)
    block = dense.blocks[0]
    nope_dim, rope_dim = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    rope, scale = block.mixer.rope, None
    if rope is not None and isinstance(rope.scaling, YarnScaling):
        scaling = keys.mapping("rope_scaling") or keys.mapping("rope_parameters") or {}
        temperature = yarn_temperature(rope.scaling.factor, scaling.get("mscale_all_dim") or 0.0)
        scale = (nope_dim + rope_dim) ** -0.5 * temperature**2
    latent = LatentAttentionConfig(
        num_q_heads=keys.integer("num_attention_heads"),
        query_rank=keys.integer("q_lora_rank", None),
        kv_rank=keys.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.integer("v_head_dim"),
        rope=rope,
        norm=block.norm,
        scale=scale,
    )
    expert_dim = keys.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=keys.integer("n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=expert_dim,
        shared_hidden_dim=expert_dim * keys.integer("n_shared_experts", 0),
        routing=_deepseek_routing(keys),
    )
    first, stride = keys.integer("first_k_dense_replace", 0), keys.integer("moe_layer_freq", 1)
    stacks = stacked(dataclasses.replace(block, mixer=latent), num_layers=dense.num_layers)
    return _routed(
        keys,
        dataclasses.replace(dense, stacks=stacks),
        experts,
        [i >= first and i % stride == 0 for i in range(dense.num_layers)],
    )


def _deepseek_routing(keys: Keys) -> RoutingConfig:
    third = keys.text("model_type").endswith("v3")
    method = keys.text("topk_method", "noaux_tc" if third else "greedy")
    scoring = keys.text("scoring_func", "sigmoid" if third else "softmax")
    grouped = method != "greedy"
    return RoutingConfig(
        scoring=Scoring(scoring),
        renormalize=keys.flag("norm_topk_prob", third),
        scale=keys.number("routed_scaling_factor", 2.5 if third else 1.0),
        num_groups=keys.integer("n_group", 1) if grouped else 1,
        top_groups=keys.integer("topk_group", 1) if grouped else 1,
        group_score=GroupScore.TOP2_SUM if method == "noaux_tc" else GroupScore.MAX,
        correction_bias=method == "noaux_tc",
    )


def _routed(
    keys: Keys, dense: ModelConfig, experts: ExpertsConfig, routes: Sequence[bool]
) -> ModelConfig:
    """The dense model with experts in the layers that route."""
    keys.ignore(*_ROUTING)

    def feed_forward(given: FeedForwardConfig, routed: bool) -> FeedForwardConfig:
        return experts if routed else given

    layers = [
        dataclasses.replace(block, feed_forward=feed_forward(block.feed_forward, routed))
        for block, routed in zip(dense.layers, routes, strict=True)
    ]
    pattern = period(layers)
    if len(pattern) < len(layers):
        stacks = stacked(*pattern, num_layers=len(layers))
    else:
        runs = ((block, len(list(same))) for block, same in itertools.groupby(layers))
        stacks = tuple(Stack(pattern=(block,), repeats=count) for block, count in runs)
    return dataclasses.replace(dense, stacks=stacks)
