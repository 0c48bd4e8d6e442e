"""Configs of further mixtures of experts, both ways: dots.1, Solar Open, K-EXAONE, Hy3,
MiniMax M2, ERNIE 4.5, Hunyuan and Phi-3.5.
"""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import NormKind, QkNormOver
from jaxinfra.config.model import ExpertsConfig, ModelConfig, NormConfig
from jaxinfra.config.rope import LongRopeScaling, RopeConfig
from jaxinfra.config.routing import RoutingConfig, Scoring
from jaxinfra.errors import ConfigError
from jaxinfra.hf.glm import SIGMOID_EXPERTS
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.llama_variants import (
    HUNYUAN_ATTENTION,
    ernie_decoder,
    exaone_decoder,
    exaone_windows,
    hunyuan_decoder,
    hunyuan_keys,
    without_alpha,
)
from jaxinfra.hf.rope import read_rope
from jaxinfra.hf.shared import (
    FULL,
    SLIDING,
    decoder_config,
    renamed,
    routed,
    routes,
    typed_windows,
    window_keys,
)
from jaxinfra.hf.sparse import (
    LOSSES,
    experts_keys,
    layers_of,
    mlp_layer_types,
    read_experts,
    read_experts_after_dense,
    read_sigmoid_routing,
    sigmoid_keys,
)
from jaxinfra.hf.weights import (
    LLAMA,
    MIXTRAL,
    OUT,
    OUTSIDE,
    PRE_NORMS,
    PROJECTIONS,
    QKV,
    Family,
    experts,
    head_norms,
    rule,
)


def read_dots1(keys: Keys) -> ModelConfig:
    """Reads dots.1: DeepSeek-V3's experts over attention with norms of heads, and windows."""
    keys.require("num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
    keys.expect("scoring_func", ("noaux_tc", "sigmoid", None), "scores are sigmoid here")
    keys.expect("topk_method", ("noaux_tc", None), "its router always has a bias")
    keys.expect("moe_layer_freq", (1, None), "every layer after the dense ones routes")
    keys.ignore(*LOSSES, "ep_size", "seq_aux", "aux_loss_alpha")
    num_layers, window = keys.integer("num_hidden_layers"), keys.integer("sliding_window", None)
    start = num_layers if window is None else keys.integer("max_window_layers", 62)
    keys.ignore("max_window_layers")
    types = keys.sequence(
        "layer_types", [SLIDING if i >= start else FULL for i in range(num_layers)]
    )
    bias = keys.flag("attention_bias", False)
    dense = decoder_config(
        keys,
        windows=typed_windows(types, window, num_layers=num_layers),
        attention_bias=bias,
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
    )
    routing = read_sigmoid_routing(keys, renormalizes=False)
    return read_experts_after_dense(keys, dense, routing, dense_by_default=0)


def write_dots1(config: ModelConfig) -> dict[str, Any]:
    """Writes dots.1; inverse of ``read_dots1``."""
    attention, keys = sigmoid_keys(config)
    windows = window_keys(config)
    return keys | {
        "attention_bias": attention.out_bias,
        "sliding_window": windows["sliding_window"],
        "layer_types": windows["layer_types"],
    }


def read_solar_open(keys: Keys) -> ModelConfig:
    """Reads Solar Open: DeepSeek-V3's experts in every layer over grouped attention."""
    keys.require("num_key_value_heads", "head_dim")
    keys.expect("first_k_dense_replace", (0, None), "every layer has experts here")
    keys.ignore(*LOSSES, "intermediate_size")
    dense = decoder_config(
        keys,
        hidden_dim=keys.integer("moe_intermediate_size"),
        default_theta=1e6,
        qkv_bias=keys.flag("attention_bias", False),
    )
    routing = read_sigmoid_routing(keys, renormalizes=True)
    return read_experts_after_dense(keys, dense, routing, dense_by_default=0)


def write_solar_open(config: ModelConfig) -> dict[str, Any]:
    """Writes Solar Open; inverse of ``read_solar_open``."""
    attention, keys = sigmoid_keys(config)
    return keys | {"attention_bias": attention.qkv_bias}


def read_exaone_moe(keys: Keys) -> ModelConfig:
    """Reads K-EXAONE: EXAONE 4 with norms before layers and DeepSeek-V3's experts."""
    keys = keys.named_as(n_shared_experts="num_shared_experts")
    keys.expect("scoring_func", ("sigmoid", None), "scores are sigmoid here")
    keys.expect("topk_method", ("noaux_tc", None), "its router always has a bias")
    keys.ignore(*LOSSES, "num_nextn_predict_layers")
    routing = read_sigmoid_routing(keys, renormalizes=True, scale=2.5)
    config = read_experts_after_dense(
        keys, exaone_decoder(keys), routing, dense_by_default=1, has_types=True
    )
    has_experts = routes(config)
    keys.expect("is_moe_layer", (has_experts, None), f"{has_experts} by other keys")
    num_dense = has_experts.count(False)
    keys.expect("first_last_k_dense_replace", (num_dense, None), f"{num_dense} by other keys")
    return config


def write_exaone_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes K-EXAONE; inverse of ``read_exaone_moe``."""
    _, keys = sigmoid_keys(config)
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    types = {"mlp_layer_types": mlp_layer_types(config)}
    return renamed(keys, **names) | exaone_windows(config) | types


def read_hy_v3(keys: Keys) -> ModelConfig:
    """Reads Hy3: norms of heads, sigmoid scores with a correction and a factor, a shared expert."""
    keys = keys.named_as(n_shared_experts="num_shared_experts")
    keys.require("num_key_value_heads", "head_dim")
    for name in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        keys.expect(name, (True, None), "it is true in every Hy3 that is read")
    keys.expect("route_norm", (True, None), "weights of chosen experts sum to 1 here")
    width = keys.integer("moe_intermediate_size")
    keys.expect("expert_hidden_dim", (width, None), "moe_intermediate_size says otherwise")
    # Precision of sums, and multi-token prediction, which is left out.
    keys.ignore("enable_moe_fp32_combine", "enable_attention_fp32_softmax", "enable_lm_head_fp32")
    keys.ignore(*LOSSES, "num_nextn_predict_layers")
    if not keys.has("mlp_layer_types"):
        keys.expect("first_k_dense_replace", (1, None), "write mlp_layer_types")
    dense = decoder_config(
        keys,
        default_theta=11_158_840.0,
        attention_bias=keys.flag("attention_bias", False),
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
    )
    routing = RoutingConfig(
        scoring=Scoring.SIGMOID,
        correction_bias=True,
        scale=keys.number("router_scaling_factor", 2.826),
    )
    return read_experts_after_dense(keys, dense, routing, dense_by_default=1, has_types=True)


def write_hy_v3(config: ModelConfig) -> dict[str, Any]:
    """Writes Hy3; inverse of ``read_hy_v3``."""
    attention, keys = sigmoid_keys(config)
    names = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
        **dict.fromkeys(("norm_topk_prob", "n_group", "topk_group")),
    }
    types = {"mlp_layer_types": mlp_layer_types(config)}
    return renamed(keys, **names) | types | {"attention_bias": attention.out_bias}


def read_minimax_m2(keys: Keys) -> ModelConfig:
    """Reads MiniMax M2: norms over all heads, sigmoid scores with a correction."""
    keys.require("num_key_value_heads", "head_dim")
    _expect_minimax(keys)
    head_dim, rotated = keys.integer("head_dim"), keys.integer("rotary_dim", None)
    fraction = 1.0 if rotated is None else rotated / head_dim
    dense = decoder_config(
        keys,
        partial_rotary=True,
        default_fraction=fraction,
        default_theta=5e6,
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
        qk_norm_over=QkNormOver.ALL_HEADS,
    )
    routing = RoutingConfig(scoring=Scoring.SIGMOID, correction_bias=True)
    return read_experts(keys, dense, width_key="intermediate_size", routing=routing)


def _expect_minimax(keys: Keys) -> None:
    keys.expect("use_qk_norm", (True, None), "queries and keys are normalized here")
    keys.expect("qk_norm_type", ("per_layer", None), "norms are over all heads here")
    keys.expect("use_routing_bias", (True, None), "its router always has a bias")
    keys.expect("scoring_func", ("sigmoid", None), "scores of this architecture are sigmoid")
    keys.expect("shared_intermediate_size", (0, None), "there are no shared experts here")
    types = keys.sequence("attn_type_list", ())
    if any(each != 1 for each in types):
        raise ConfigError(f"attn_type_list={list(types)}: every layer has full attention (1) here")
    for name in ("full_attention", "linear_attention", "mlp"):
        keys.expect(f"layernorm_{name}_beta", (1.0, None), "residual sums have no factors here")
    keys.ignore(*LOSSES, "router_jitter_noise", "use_mtp", "num_mtp_modules")
    keys.ignore("mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")


def write_minimax_m2(config: ModelConfig) -> dict[str, Any]:
    """Writes MiniMax M2; inverse of ``read_minimax_m2``."""
    _, keys = experts_keys(config)
    keys = renamed(keys, num_experts="num_local_experts", norm_topk_prob=None)
    return keys | {"router_aux_loss_coef": 0.0}


def read_ernie_moe(keys: Keys) -> ModelConfig:
    """Reads ERNIE 4.5 with experts: softmax scores with a correction, in some of the layers."""
    keys.ignore(*LOSSES, "moe_capacity", "moe_group", "num_nextn_predict_layers")
    keys.ignore("moe_multimodal_dispatch_use_allgather")
    keys.expect("moe_gate", ("topk", None), "the best experts are chosen here")
    keys.expect("moe_gate_act", ("softmax", None), "scores are softmax here")
    keys.expect("moe_norm_gate_logits", (True, None), "weights of experts sum to 1 here")
    keys.expect("moe_use_hard_gate", (False, None), "each token chooses its experts here")
    keys.expect(
        "moe_norm_min", (1e-12, None), "the sum of a token's scores has no other bound here"
    )
    keys.expect("moe_use_aux_free", (True, None), "its router always has a bias")
    dense = ernie_decoder(keys)
    width = keys.integer("moe_intermediate_size")
    named = keys.named_as(num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    routing = RoutingConfig(correction_bias=True)
    bias = keys.flag("use_bias", False)
    if bias:
        raise ConfigError("use_bias=true with experts: implementations differ in which have biases")
    sparse = read_experts(
        named,
        dense,
        routing=routing,
        shared_hidden_dim=width * keys.integer("moe_num_shared_experts", 2),
    )
    first, every = keys.integer("moe_layer_start_index", 1), keys.integer("moe_layer_interval", 1)
    last = keys.integer("moe_layer_end_index", -1)
    last = dense.num_layers - 1 if last == -1 else last
    layer = sparse.blocks[0].feed_forward
    assert isinstance(layer, ExpertsConfig), "read_experts"
    return routed(
        dense,
        [
            layer if (i + 1) % every == 0 and first <= i <= last else None
            for i in range(dense.num_layers)
        ],
    )


def write_ernie_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes ERNIE 4.5 with experts; inverse of ``read_ernie_moe``."""
    _, experts, _ = layers_of(config)
    _, keys = experts_keys(config)
    has = routes(config)
    first = has.index(True) if any(has) else len(has)
    last = len(has) - 1 - (has[::-1].index(True) if any(has) else 0)
    every = next((n for n in range(1, len(has) + 1) if _at(has, first, last, n)), 1)
    keys = renamed(
        keys, num_experts="moe_num_experts", num_experts_per_tok="moe_k", norm_topk_prob=None
    )
    return keys | {
        "use_bias": False,
        "moe_intermediate_size": experts.hidden_dim,
        "moe_num_shared_experts": experts.shared_hidden_dim // experts.hidden_dim,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": every,
    }


def _at(has: list[bool], first: int, last: int, every: int) -> bool:
    """Whether these layers are every n-th from first to last."""
    wanted = [first <= i <= last and (i + 1) % every == 0 for i in range(len(has))]
    return wanted == has


def read_hunyuan_moe(keys: Keys) -> ModelConfig:
    """Reads Hunyuan with experts in every layer and one shared expert as wide as they are."""
    keys.ignore(*LOSSES, "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor")
    keys.expect("use_mixed_mlp_moe", (True, None), "there is a shared expert here")
    keys.expect("norm_topk_prob", (True, None), "weights of experts sum to 1 here")
    keys.expect("moe_layer_num_skipped", (0, None), "every layer has experts here")
    # Released configs have a list of some numbers, with the same for every layer.
    keys = keys.alike("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
    dense = hunyuan_decoder(keys)
    width, shared = keys.integer("intermediate_size"), "the shared expert is one, as wide as others"
    keys.expect("num_shared_expert", (1, None), shared)
    keys.expect("moe_intermediate_size", (width, None), shared)
    named = keys.named_as(num_experts_per_tok="moe_topk")
    return read_experts(named, dense, width_key="intermediate_size", shared_hidden_dim=width)


def write_hunyuan_moe(config: ModelConfig) -> dict[str, Any]:
    """Writes Hunyuan with experts; inverse of ``read_hunyuan_moe``."""
    _, keys = experts_keys(without_alpha(config))
    keys = renamed(keys, num_experts_per_tok="moe_topk", norm_topk_prob=None)
    return hunyuan_keys(config, keys)


def read_phimoe(keys: Keys) -> ModelConfig:
    """Reads Phi-3.5-MoE: LayerNorm, biases, and SparseMixer's two experts (arXiv 2409.12136)."""
    keys.require("num_key_value_heads", "num_local_experts")
    keys.ignore(*LOSSES, "input_jitter_noise")
    keys.expect("num_experts_per_tok", (2,), "SparseMixer chooses two experts")
    bias = keys.flag("attention_bias", False)
    rope = read_rope(
        keys,
        max_positions=keys.integer("max_position_embeddings"),
        default_theta=1e6,
        known=("short_mscale", "long_mscale"),
    )
    dense = decoder_config(
        keys,
        rope=_with_mscale(keys, rope),
        norm=NormConfig(kind=NormKind.LAYER, epsilon=keys.number("rms_norm_eps"), bias=True),
        windows=(keys.integer("sliding_window", None),),
        attention_bias=bias,
        model={"logit_bias": keys.flag("lm_head_bias", False)},
    )
    routing = RoutingConfig(
        scoring=Scoring.SPARSE_MIXER, tolerance=2.0 * keys.number("router_jitter_noise", 0.01)
    )
    return read_experts(
        keys.named_as(num_experts="num_local_experts"),
        dense,
        width_key="intermediate_size",
        routing=routing,
    )


def _with_mscale(keys: Keys, rope: RopeConfig) -> RopeConfig:
    """Returns LongRoPE with Phi's own factor of cosines and sines, which has two names."""
    values = keys.mapping("rope_parameters") or keys.mapping("rope_scaling") or {}
    short, long = values.get("short_mscale"), values.get("long_mscale")
    if not isinstance(rope.scaling, LongRopeScaling) or (short, long) == (None, None):
        return rope
    if short != long or not isinstance(short, int | float):
        raise ConfigError(f"short_mscale={short} and long_mscale={long}: they must be equal here")
    scaling = dataclasses.replace(rope.scaling, attention_factor=float(short))
    return dataclasses.replace(rope, scaling=scaling)


def write_phimoe(config: ModelConfig) -> dict[str, Any]:
    """Writes Phi-3.5-MoE; inverse of ``read_phimoe``."""
    attention, keys = experts_keys(config)
    _, experts, _ = layers_of(config)
    keys = renamed(keys, num_experts="num_local_experts", norm_topk_prob=None)
    scaling = None if attention.rope is None else attention.rope.scaling
    if isinstance(scaling, LongRopeScaling):
        factor = keys["rope_scaling"].pop("attention_factor")
        keys["rope_scaling"] |= {"short_mscale": factor, "long_mscale": factor}
    return keys | {
        "attention_bias": attention.out_bias,
        "sliding_window": attention.window,
        "lm_head_bias": config.logit_bias,
        "router_jitter_noise": experts.routing.tolerance / 2.0,
    }


MINIMAX_M2 = dataclasses.replace(
    LLAMA,
    layer=(
        *(*PRE_NORMS, *QKV, *OUT),
        *head_norms("self_attn.q_norm", "self_attn.k_norm", over_all=True),
        *experts(*("block_sparse_moe", "w1", "w3", "w2"), correction="e_score_correction_bias"),
    ),
)
ERNIE_MOE = dataclasses.replace(
    LLAMA,
    ignored=rf"{LLAMA.ignored}|model\.mtp_.*",
    layer=(
        *LLAMA.layer,
        *experts(
            *("mlp", *PROJECTIONS),
            shared="shared_experts",
            correction="moe_statics.e_score_correction_bias",
            correction_layout="1 E -> E",
        ),
    ),
)
HUNYUAN_MOE = dataclasses.replace(
    LLAMA,
    layer=(
        *HUNYUAN_ATTENTION,
        *experts("mlp", *PROJECTIONS, shared="shared_mlp", router="gate.wg.weight"),
    ),
)
EXAONE_MOE = dataclasses.replace(
    LLAMA,
    layer=(
        *LLAMA.layer,
        *experts(
            *("mlp", *PROJECTIONS), shared="shared_experts", correction="e_score_correction_bias"
        ),
    ),
    ignored=r"mtp\..*",
)
"""Weights of K-EXAONE, whose multi-token prediction is left out."""
HY_V3 = dataclasses.replace(
    LLAMA,
    layer=(
        *LLAMA.layer,
        *experts(
            *("mlp", *PROJECTIONS),
            shared="shared_mlp",
            router="router.gate.weight",
            correction="expert_bias",
        ),
    ),
    extra_layers=True,
)
PHIMOE = dataclasses.replace(
    MIXTRAL, outside=(*OUTSIDE, rule("lm_head.bias", "logit_bias", "V -> V"))
)

FAMILIES = {
    "dots1": Family("Dots1ForCausalLM", read_dots1, write_dots1, SIGMOID_EXPERTS),
    "solar_open": Family(
        "SolarOpenForCausalLM", read_solar_open, write_solar_open, SIGMOID_EXPERTS
    ),
    "exaone_moe": Family("ExaoneMoeForCausalLM", read_exaone_moe, write_exaone_moe, EXAONE_MOE),
    "hy_v3": Family("HYV3ForCausalLM", read_hy_v3, write_hy_v3, HY_V3),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", read_minimax_m2, write_minimax_m2, MINIMAX_M2),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", read_ernie_moe, write_ernie_moe, ERNIE_MOE),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM", read_hunyuan_moe, write_hunyuan_moe, HUNYUAN_MOE
    ),
    "phimoe": Family("PhimoeForCausalLM", read_phimoe, write_phimoe, PHIMOE),
}
