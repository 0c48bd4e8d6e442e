"""Configs of Kimi Linear (arXiv 2510.26692), both ways: delta attention and latent attention.

Letters of layouts beside those of ``tensor_layout.py``: M value heads, W taps of a convolution.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.recurrent import GatedDeltaConfig, OutputGate
from jaxinfra.errors import ConfigError
from jaxinfra.hf.deepseek import latent_keys, read_latent
from jaxinfra.hf.keys import SILU, Keys
from jaxinfra.hf.shared import FULL, LINEAR, model_keys, model_of, state_types
from jaxinfra.hf.sparse import (
    fewest_experts,
    mlp_layer_types,
    read_routes,
    read_sigmoid_routing,
)
from jaxinfra.hf.weights import (
    LATENT,
    LLAMA,
    OUT,
    PRE_NORMS,
    Family,
    WeightTable,
    beside,
    experts,
    gated,
    rule,
)

_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


def read_kimi_linear(keys: Keys) -> ModelConfig:
    """Reads Kimi Linear: delta attention with a decay per channel, latent attention unrotated."""
    keys = keys.named_as(**{ours: theirs for ours, theirs in _NAMES.items() if keys.has(theirs)})
    keys.expect("hidden_act", SILU, "convolutions and feed-forward layers have it")
    keys.expect("moe_router_activation_func", ("sigmoid",), "scores are sigmoid here")
    keys.expect("topk_method", ("noaux_tc", None), "its router always has a bias")
    keys.expect("moe_layer_freq", (1,), "every layer after the dense ones routes")
    keys.expect("use_grouped_topk", (True, None), "groups are as num_expert_group says")
    keys.expect("mla_use_nope", (True, None), "latent attention is not rotated here")
    keys.expect("attention_bias", (False,), "implementations differ in which layers have it")
    keys.ignore("output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers")
    keys.ignore("rope_theta", "rope_scaling", "qk_head_dim", "head_dim")  # nothing is rotated
    linear = dict(keys.mapping("linear_attn_config") or {})
    types = _types(keys, linear)
    stream = NormConfig(epsilon=keys.number("rms_norm_eps"))
    mixers = {LINEAR: _delta(keys, linear, stream.epsilon), FULL: read_latent(keys, rope=None)}
    feeds = _feed_forwards(keys)
    blocks = [
        BlockConfig(mixer=mixers[each], feed_forward=feed, norm=stream)
        for each, feed in zip(types, feeds, strict=True)
    ]
    return model_of(keys, blocks)


def _types(keys: Keys, linear: Mapping[str, Any]) -> tuple[str, ...]:
    """Reads each layer's type: by name, or the released numbers of layers that attend, from 1."""
    num_layers = keys.integer("num_hidden_layers")
    by_default = [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    if "full_attn_layers" in linear:
        attends, others = linear["full_attn_layers"], linear.get("kda_layers", [])
        by_default = [FULL if i + 1 in attends else LINEAR for i in range(num_layers)]
        if sorted([*attends, *others]) != [*range(1, num_layers + 1)]:
            raise ConfigError(
                f"linear_attn_config: full_attn_layers={attends} and kda_layers={others} do not "
                f"name each of {num_layers} layers once"
            )
    return state_types(keys, by_default)


def _delta(keys: Keys, linear: Mapping[str, Any], epsilon: float) -> GatedDeltaConfig:
    older = Keys(linear, what="linear_attn_config")
    older.ignore("full_attn_layers", "kda_layers")
    heads = older.integer("num_heads", keys.integer("linear_num_heads", None))
    width = older.integer("head_dim", keys.integer("linear_head_dim", None))
    taps = older.integer("short_conv_kernel_size", keys.integer("linear_conv_kernel_dim", 4))
    older.finish(neutral=())
    if heads is None or width is None:
        raise ConfigError("linear_num_heads and linear_head_dim are missing; add them")
    return GatedDeltaConfig(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=width,
        value_dim=width,
        conv_width=taps,
        channel_decay=True,
        rank=width,
        gate=OutputGate.SIGMOID,
        norm_epsilon=epsilon,
    )


def _feed_forwards(keys: Keys) -> list[MlpConfig | ExpertsConfig]:
    """Reads each layer's feed-forward layer: dense ones first, or as ``mlp_layer_types`` says."""
    width = keys.integer("moe_intermediate_size")
    dense = MlpConfig(hidden_dim=keys.integer("intermediate_size"))
    routed = ExpertsConfig(
        num_experts=keys.named("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_dim=width,
        routing=read_sigmoid_routing(keys, renormalizes=True, scale=2.446),
        shared_hidden_dim=width * keys.integer("n_shared_experts", 1),
    )
    return [routed if each else dense for each in read_routes(keys, dense_by_default=1)]


def write_kimi_linear(config: ModelConfig) -> dict[str, Any]:
    """Writes Kimi Linear; inverse of ``read_kimi_linear``."""
    layers = [each for b in config.blocks for each in (b.mixer, b.feed_forward)]
    latent = next((x for x in layers if isinstance(x, LatentAttentionConfig)), None)
    delta = next((x for x in layers if isinstance(x, GatedDeltaConfig)), None)
    routed = next((x for x in layers if isinstance(x, ExpertsConfig)), None)
    dense = next((x for x in layers if isinstance(x, MlpConfig)), None)
    routed = fewest_experts(dense) if routed is None and dense is not None else routed
    if latent is None or delta is None or routed is None:
        raise ConfigError("delta attention, latent attention and experts are what this writes")
    return {
        **model_keys(config),
        "intermediate_size": (dense or routed).hidden_dim,
        "moe_intermediate_size": routed.hidden_dim,
        "num_attention_heads": latent.num_q_heads,
        "num_key_value_heads": latent.num_q_heads,
        **latent_keys(latent),
        "layer_types": [
            LINEAR if isinstance(b.mixer, GatedDeltaConfig) else FULL for b in config.layers
        ],
        "mlp_layer_types": mlp_layer_types(config),
        "linear_num_heads": delta.num_value_heads,
        "linear_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        "num_experts": routed.num_experts,
        "num_experts_per_token": routed.top_k,
        "num_shared_experts": routed.shared_hidden_dim // routed.hidden_dim,
        "moe_renormalize": routed.routing.renormalize,
        "routed_scaling_factor": routed.routing.scale,
        "num_expert_group": routed.routing.num_groups,
        "topk_group": routed.routing.top_groups,
        "hidden_act": "silu",
        "model_max_length": config.max_positions,
        "rms_norm_eps": config.final_norm.epsilon,
    }


_HEADS, _TAPS = "(M V) D -> D M V", "(M V) 1 W -> M V W"
_DELTA = (
    *(
        rule(f"self_attn.{theirs}_{kind}.weight", f"attention/{ours}/weight", layout)
        for theirs, name in (("q", "query"), ("k", "key"), ("v", "value"))
        for kind, ours, layout in (("proj", name, _HEADS), ("conv1d", f"{name}_conv", _TAPS))
    ),
    rule("self_attn.b_proj.weight", "attention/beta/weight", "M D -> D M"),
    rule("self_attn.f_a_proj.weight", "attention/decay_down/weight", "R D -> D R"),
    rule("self_attn.f_b_proj.weight", "attention/decay/weight", "(M V) R -> R M V"),
    rule("self_attn.dt_bias", "attention/decay_bias", "(M V) -> M V"),
    rule("self_attn.A_log", "attention/decay_log", "1 1 M 1 -> M"),
    rule("self_attn.g_a_proj.weight", "attention/gate_down/weight", "R D -> D R"),
    rule("self_attn.g_b_proj.weight", "attention/gate/weight", "(M V) R -> R M V"),
    rule("self_attn.o_norm.weight", "attention/norm/scale", "V -> V"),
)


def _table(dense: str) -> WeightTable:
    return dataclasses.replace(
        LLAMA,
        layer=(
            *(*PRE_NORMS, *OUT),
            *gated(dense),
            *beside("attention/kv_down/weight", LATENT),
            *beside("attention/decay_log", _DELTA),
            *experts("block_sparse_moe", "w1", "w3", "w2", shared="shared_experts"),
        ),
        extra_layers=True,
    )


KIMI_LINEAR = dataclasses.replace(_table("mlp"), others=(_table("block_sparse_moe"),))
"""Tensors of Kimi Linear; the reference implementation saves dense layers by experts' name."""

FAMILIES = {
    "kimi_linear": Family(
        "KimiLinearForCausalLM", read_kimi_linear, write_kimi_linear, KIMI_LINEAR
    ),
}
