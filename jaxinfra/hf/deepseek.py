"""Configs of DeepSeek-V2, V3 and V3.2 (arXiv 2405.04434, 2412.19437, 2512.02556), both ways.

Of V3's multi-token prediction the first module is read, and others are left out. Keys of auxiliary
losses do not change what a model computes.
"""

import dataclasses
import math
from typing import Any

from jaxinfra.config.latent import IndexerConfig
from jaxinfra.config.model import (
    ExpertsConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.rope import RopeConfig, RopePairs, YarnScaling
from jaxinfra.config.routing import GroupScore, RoutingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import yarn_temperature
from jaxinfra.hf.shared import decoder_config, decoder_keys
from jaxinfra.hf.sparse import (
    expert_keys,
    fewest_experts,
    mlp_layer_types,
    read_experts_after_dense,
    read_sigmoid_routing,
)
from jaxinfra.hf.weights import DEEPSEEK, Family

_IGNORED = (
    *("seq_aux", "aux_loss_alpha", "output_router_logits", "router_aux_loss_coef"),
    "ep_size",
)
_INDEXED = "indexed_attention"
_INDEXED_NAMES = (_INDEXED, "deepseek_sparse_attention")  # the latter of older releases
_FULL, _SHARED = "full", "shared"  # layers with an indexer of their own, and the others
_LATENT_NORM = NormConfig(epsilon=1e-6)  # whatever rms_norm_eps says


def read_deepseek_v2(keys: Keys) -> ModelConfig:
    """Reads DeepSeek-V2 and V2-Lite: softmax scores, the best groups by their best expert."""
    keys.expect("rope_interleave", (True, None), "neighbours are rotated")
    keys.expect("scoring_func", ("softmax",), "scores of this architecture are softmax")
    keys.expect("mlp_bias", (False,), "feed-forward layers here have no biases")
    keys.ignore("num_nextn_predict_layers")  # no V2 has the module
    # The reference implementation does not read it, DeepSeek's own code does.
    keys.expect("norm_topk_prob", (False, None), "implementations differ in what it does here")
    method = keys.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    if not method:
        keys.ignore("n_group", "topk_group")
    routing = RoutingConfig(
        renormalize=False,
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group") if method else 1,
        top_groups=keys.integer("topk_group") if method else 1,
        group_score=GroupScore.MAX,
    )
    return _read(keys, routing, pairs=RopePairs.NEIGHBOURS, dense_by_default=0)


def read_deepseek_v3(keys: Keys) -> ModelConfig:
    """Reads DeepSeek-V3 and R1: sigmoid scores, and a bias that only affects experts' choice."""
    keys.expect("scoring_func", ("sigmoid",), "scores of this architecture are sigmoid")
    keys.expect("topk_method", ("noaux_tc",), "its router always has a bias")
    interleaved = keys.flag("rope_interleave", True)
    routing = read_sigmoid_routing(keys, renormalizes=True, scale=2.5, groups=None)
    pairs = RopePairs.NEIGHBOURS if interleaved else RopePairs.HALVES
    predicts = keys.integer("num_nextn_predict_layers", 0) > 0
    return _read(keys, routing, pairs=pairs, dense_by_default=3, predicts=predicts)


def read_deepseek_v32(keys: Keys) -> ModelConfig:
    """Reads DeepSeek-V3.2: V3 with an indexer, which chooses the keys of every query."""
    return _read_indexed(keys, RopePairs.HALVES)


def read_glm_moe_dsa(keys: Keys) -> ModelConfig:
    """Reads GLM-5: DeepSeek-V3.2 with an indexer that rotates neighbours."""
    keys.expect("indexer_rope_interleave", (True, None), "the indexer rotates neighbours here")
    num_layers = keys.integer("num_hidden_layers")
    every = max(keys.integer("index_topk_freq", 1), 1)
    before = keys.integer("index_skip_topk_offset", 2) - 1  # layers before the first that shares
    shares = (max(i - before, 0) % every for i in range(num_layers))
    letters = keys.either("index_topk_pattern", str, list)
    by_default = [_SHARED if each else _FULL for each in shares] if letters is None else letters
    named = {"F": _FULL, "S": _SHARED}
    kinds = [named.get(str(each), each) for each in keys.sequence("indexer_types", by_default)]
    if kinds != [_FULL] * num_layers:
        raise ConfigError(
            f"indexer_types of {len(kinds)} layers, {sorted({*map(str, kinds)})}: a config whose "
            f"{num_layers} layers are all {_FULL} is read; layers that are {_SHARED} attend to the "
            "keys that an earlier layer chose, which is not computed here"
        )
    return _read_indexed(keys, RopePairs.NEIGHBOURS)


def read_glm4_moe_lite(keys: Keys) -> ModelConfig:
    """Reads GLM 4.7 Flash: DeepSeek-V3 with layers of experts by name, all but the first."""
    keys.expect("scoring_func", ("sigmoid", None), "scores of this architecture are sigmoid")
    keys.expect("topk_method", ("noaux_tc", None), "its router always has a bias")
    if not keys.has("mlp_layer_types"):
        keys.expect(
            "first_k_dense_replace",
            (1, None),
            "implementations differ in whether they read it; write mlp_layer_types",
        )
    return _read(
        keys,
        read_sigmoid_routing(keys, renormalizes=True, scale=1.8),
        pairs=RopePairs.NEIGHBOURS if keys.flag("rope_interleave", True) else RopePairs.HALVES,
        dense_by_default=1,
        predicts=keys.integer("num_nextn_predict_layers", 0) > 0,
        has_types=True,
    )


def _read_indexed(keys: Keys, pairs: RopePairs) -> ModelConfig:
    keys.expect("scoring_func", ("sigmoid",), "scores of this architecture are sigmoid")
    keys.expect("topk_method", ("noaux_tc",), "its router always has a bias")
    keys.expect("rope_interleave", (True, None), "neighbours are rotated")
    num_layers = keys.integer("num_hidden_layers")
    types = keys.sequence("layer_types", None)
    named = types is None or {*map(str, types)} <= {*_INDEXED_NAMES}
    if not named or (types is not None and len(types) != num_layers):
        raise ConfigError(
            f"layer_types of {len(types)} layers, {sorted({*map(str, types)})}: each of "
            f"{num_layers} layers is {_INDEXED} here"
        )
    keys.integer("q_lora_rank")  # the indexer reads compressed queries
    indexer = IndexerConfig(
        num_heads=keys.integer("index_n_heads"),
        head_dim=keys.integer("index_head_dim"),
        top_k=keys.integer("index_topk"),
        pairs=pairs,
    )
    return _read(
        keys,
        read_sigmoid_routing(keys, renormalizes=True, scale=2.5, groups=None),
        pairs=RopePairs.NEIGHBOURS,
        dense_by_default=3,
        predicts=keys.integer("num_nextn_predict_layers", 0) > 0,
        indexer=indexer,
        has_types=True,
    )


def _read(
    keys: Keys,
    routing: RoutingConfig,
    *,
    pairs: RopePairs,
    dense_by_default: int,
    predicts: bool = False,
    indexer: IndexerConfig | None = None,
    has_types: bool = False,
) -> ModelConfig:
    keys.require("q_lora_rank", "n_shared_experts")
    keys.ignore(*_IGNORED)
    keys.expect("moe_layer_freq", (1,), "every layer after the dense ones routes")
    nope_dim, rope_dim = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    keys.expect("qk_head_dim", (nope_dim + rope_dim, None), "it is the sum of its parts")
    scaling = keys.mapping("rope_parameters") or keys.mapping("rope_scaling") or {}

    keys.expect("head_dim", (rope_dim, None), "of a head, qk_rope_head_dim elements are rotated")

    def latent(rope: RopeConfig) -> LatentAttentionConfig:
        return read_latent(
            keys,
            rope=dataclasses.replace(rope, pairs=pairs),
            bias=keys.flag("attention_bias", False),
            scale=_scale(rope, nope_dim + rope_dim, scaling.get("mscale_all_dim")),
            indexer=indexer,
        )

    dense = decoder_config(keys, mixer=latent, model={"mtp": predicts})
    return read_experts_after_dense(
        keys,
        dense,
        routing,
        dense_by_default=dense_by_default,
        shared_by_default=0,
        has_types=has_types,
    )


def read_latent(keys: Keys, *, rope: RopeConfig | None, **fields: Any) -> LatentAttentionConfig:
    """Reads the sizes of latent attention; ``fields`` are the others of its config."""
    heads = keys.integer("num_attention_heads")
    keys.expect("num_key_value_heads", (heads, None), "every head has a key and a value here")
    return LatentAttentionConfig(
        num_q_heads=heads,
        query_rank=keys.integer("q_lora_rank", None),
        kv_rank=keys.integer("kv_lora_rank"),
        nope_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
        rope=rope,
        norm=_LATENT_NORM,
        **fields,
    )


def latent_keys(latent: LatentAttentionConfig) -> dict[str, Any]:
    """Writes the sizes of latent attention, but for its heads; inverse of ``read_latent``."""
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _scale(rope: RopeConfig, head_dim: int, all_dim: float | None) -> float | None:
    """YaRN's temperature is in the scores; None: there is none."""
    if not isinstance(rope.scaling, YarnScaling) or not all_dim:
        return None
    temperature = yarn_temperature(rope.scaling.factor, all_dim)
    return head_dim**-0.5 * temperature * temperature


def write_deepseek_v2(config: ModelConfig) -> dict[str, Any]:
    """Writes DeepSeek-V2; inverse of ``read_deepseek_v2``."""
    routing = _experts(config).routing
    return _keys(config) | {
        "topk_method": "greedy" if routing.num_groups == 1 else "group_limited_greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }


def write_deepseek_v3(config: ModelConfig) -> dict[str, Any]:
    """Writes DeepSeek-V3; inverse of ``read_deepseek_v3``."""
    rope = config.blocks[0].mixer.rope
    return _keys(config) | {
        "topk_method": "noaux_tc",
        "norm_topk_prob": _experts(config).routing.renormalize,
        "scoring_func": "sigmoid",
        "rope_interleave": rope is None or rope.pairs is RopePairs.NEIGHBOURS,
    }


def write_glm4_moe_lite(config: ModelConfig) -> dict[str, Any]:
    """Writes GLM 4.7 Flash; inverse of ``read_glm4_moe_lite``."""
    return write_deepseek_v3(config) | {"mlp_layer_types": mlp_layer_types(config)}


def write_indexed(config: ModelConfig) -> dict[str, Any]:
    """Writes DeepSeek-V3.2 or GLM-5; inverse of ``read_deepseek_v32`` and ``read_glm_moe_dsa``."""
    mixer = config.blocks[0].mixer
    if not isinstance(mixer, LatentAttentionConfig) or mixer.indexer is None:
        raise ConfigError("latent attention with an indexer is what this writes")
    return write_deepseek_v3(config) | {
        "index_n_heads": mixer.indexer.num_heads,
        "index_head_dim": mixer.indexer.head_dim,
        "index_topk": mixer.indexer.top_k,
        "layer_types": [_INDEXED] * config.num_layers,
        "mlp_layer_types": mlp_layer_types(config),
    }


def _experts(config: ModelConfig) -> ExpertsConfig:
    layers = [block.feed_forward for block in config.blocks]
    for layer in layers:
        if isinstance(layer, ExpertsConfig):
            return layer
    if isinstance(layers[0], MlpConfig):
        return fewest_experts(layers[0])
    raise ConfigError(f"{type(layers[0]).__name__}: experts or dense layers are what these write")


def _keys(config: ModelConfig) -> dict[str, Any]:
    experts, latent = _experts(config), config.blocks[0].mixer
    if not isinstance(latent, LatentAttentionConfig):
        raise ConfigError(f"{type(latent).__name__}: latent attention is what these write")
    wide = MlpConfig(hidden_dim=experts.hidden_dim, kind=experts.kind)
    layers = [block.feed_forward for block in config.blocks]
    dense = next((each for each in layers if isinstance(each, MlpConfig)), wide)
    keys = decoder_keys(config, mlp=dense)
    if latent.scale is not None and latent.rope is not None:
        keys["rope_scaling"] = (keys["rope_scaling"] or {}) | {"mscale_all_dim": _all_dim(latent)}
    return keys | {
        "head_dim": latent.rope_dim,
        **latent_keys(latent),
        "attention_bias": latent.bias,
        **expert_keys(config, experts),
        "num_nextn_predict_layers": int(config.mtp),
    }


def _all_dim(latent: LatentAttentionConfig) -> float:
    """The factor that gives this scale, to as many places as configs have."""
    scaling = None if latent.rope is None else latent.rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.factor <= 1.0 or latent.scale is None:
        raise ConfigError(f"scale={latent.scale}: one of YaRN's temperature is what these write")
    temperature = math.sqrt(latent.scale * math.sqrt(latent.head_dim))
    return round((temperature - 1.0) / (0.1 * math.log(scaling.factor)), 6)


FAMILIES = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", read_deepseek_v2, write_deepseek_v2, DEEPSEEK),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", read_deepseek_v3, write_deepseek_v3, DEEPSEEK),
    "kimi_k2": Family("DeepseekV3ForCausalLM", read_deepseek_v3, write_deepseek_v3, DEEPSEEK),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM", read_glm4_moe_lite, write_glm4_moe_lite, DEEPSEEK
    ),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", read_deepseek_v32, write_indexed, DEEPSEEK),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", read_glm_moe_dsa, write_indexed, DEEPSEEK),
}
