"""Configs of models that differ from Llama in one or two ways, both ways: Seed-OSS, Helium, Arcee,
SmolLM3, EXAONE 4, ERNIE 4.5, Hunyuan, Apertus, Ministral and CWM.
"""

import dataclasses
from typing import Any

from jaxinfra.config.kinds import NormPlacement
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.rope import NtkScaling, QueryScaling, RopeConfig, RopePairs
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.rope import in_rope_parameters, read_rope
from jaxinfra.hf.shared import (
    FULL,
    SLIDING,
    decoder_config,
    decoder_keys,
    dense_block,
    type_keys,
    typed_windows,
    window_keys,
)
from jaxinfra.hf.weights import (
    DOWN,
    LLAMA,
    MLP,
    OUT,
    PRE_NORMS,
    QK_NORM,
    QKV,
    Family,
    head_norms,
    linear,
    norm,
    rule,
)


def read_seed_oss(keys: Keys) -> ModelConfig:
    """Reads Seed-OSS: biases of queries, keys and values."""
    keys.require("num_key_value_heads", "head_dim")
    return decoder_config(
        keys,
        qkv_bias=keys.flag("attention_bias", True),
        out_bias=keys.flag("attention_out_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write_seed_oss(config: ModelConfig) -> dict[str, Any]:
    """Writes Seed-OSS; inverse of ``read_seed_oss``."""
    attention, mlp = dense_block(config)
    return decoder_keys(config) | {
        "attention_bias": attention.qkv_bias,
        "attention_out_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
    }


def read_helium(keys: Keys) -> ModelConfig:
    """Reads Helium: neighbours are rotated."""
    keys.require("num_key_value_heads", "head_dim")
    heads, head_dim = keys.integer("num_attention_heads"), keys.integer("head_dim")
    if heads * head_dim != keys.integer("hidden_size"):
        raise ConfigError(
            f"head_dim={head_dim} of num_attention_heads={heads}: all heads of this architecture "
            "are as wide together as hidden_size"
        )
    return decoder_config(
        keys,
        pairs=RopePairs.NEIGHBOURS,
        default_theta=100_000.0,
        qkv_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write_helium(config: ModelConfig) -> dict[str, Any]:
    """Writes Helium; inverse of ``read_helium``."""
    attention, mlp = dense_block(config)
    return decoder_keys(config) | {"attention_bias": attention.qkv_bias, "mlp_bias": mlp.bias}


def read_arcee(keys: Keys) -> ModelConfig:
    """Reads Arcee: squared ReLU without a gate."""
    return decoder_config(
        keys,
        gated=False,
        attention_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )


def read_apertus(keys: Keys) -> ModelConfig:
    """Reads Apertus: xIELU without a gate, norms of heads."""
    _require_rope(keys)
    keys.expect("qk_norm", (True, None), "queries and keys are normalized here")
    keys.expect("post_norm", (False, None), "norms are before layers here")
    return decoder_config(
        keys,
        gated=False,
        default_theta=12e6,
        attention_bias=keys.flag("attention_bias", False),
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
    )


def write_biased(config: ModelConfig) -> dict[str, Any]:
    """Writes Arcee and Apertus; inverse of their readers."""
    attention, mlp = dense_block(config)
    return _with_scaling(decoder_keys(config)) | {
        "attention_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
    }


def _with_scaling(keys: dict[str, Any]) -> dict[str, Any]:
    """Names the scaling of a rotation that has none, since null may stand for another."""
    return keys | {"rope_scaling": keys.get("rope_scaling") or {"rope_type": "default"}}


def read_smollm3(keys: Keys) -> ModelConfig:
    """Reads SmolLM3: every fourth layer is not rotated."""
    keys.require("num_key_value_heads")
    keys.ignore("max_window_layers")
    num_layers = keys.integer("num_hidden_layers")
    every = keys.integer("no_rope_layer_interval", 4)
    has_rope = keys.sequence(
        "no_rope_layers", [int((i + 1) % every > 0) for i in range(num_layers)]
    )
    if len(has_rope) != num_layers or any(each not in (0, 1) for each in has_rope):
        raise ConfigError(
            f"no_rope_layers={list(has_rope)}: 1 (rotated) or 0 for each of {num_layers} layers"
        )
    window = keys.integer("sliding_window", None)
    if not keys.flag("use_sliding_window", False):
        window = None
    default = [SLIDING if window and not each else FULL for each in has_rope]
    types = keys.sequence("layer_types", default)
    windows = typed_windows(types, window, num_layers=num_layers)
    rope = _rope(keys, default_theta=2e6)
    return decoder_config(
        keys,
        layers=[
            {"window": window, "rope": rope if rotates else None}
            for window, rotates in zip(windows, has_rope, strict=True)
        ],
        rope=rope,
        attention_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
        tied_by_default=True,
    )


def _require_rope(keys: Keys) -> None:
    """Refuses a config without a rotation, which the reference implementation scales then."""
    if not keys.mapping("rope_scaling") and not keys.mapping("rope_parameters"):
        raise ConfigError(
            "rope_scaling is missing or null, which the reference implementation takes for a "
            'scaling; write what the model was trained with, {"rope_type": "default"} if unscaled'
        )


def _rope(keys: Keys, **more: Any) -> RopeConfig:
    return read_rope(keys, max_positions=keys.integer("max_position_embeddings"), **more)


def write_smollm3(config: ModelConfig) -> dict[str, Any]:
    """Writes SmolLM3; inverse of ``read_smollm3``."""
    windows = window_keys(config)
    del windows["max_window_layers"]
    return (
        write_biased(config)
        | windows
        | {"no_rope_layers": [int(block.mixer.rope is not None) for block in config.layers]}
    )


def read_exaone4(keys: Keys) -> ModelConfig:
    """Reads EXAONE 4: norms after each layer only; of layers with and without window, the latter
    are not rotated.
    """
    # Of EXAONE 4.5's multi-token prediction, which is left out.
    keys.ignore("_num_mtp_layers", "num_nextn_predict_layers", "mtp_loss_scaling_factor")
    keys.ignore("mtp_share_layers")
    return exaone_decoder(keys, block={"norm_placement": NormPlacement.POST})


def exaone_decoder(keys: Keys, **more: Any) -> ModelConfig:
    """Reads what EXAONE 4 and K-EXAONE have in common; ``more`` is as in ``decoder_config``."""
    keys.require("num_key_value_heads", "sliding_window")
    num_layers = keys.integer("num_hidden_layers")
    window = keys.integer("sliding_window", None)
    keys.ignore("sliding_window_pattern")
    by_default = () if window is not None else ([FULL] * num_layers,)
    types = keys.sequence("layer_types", *by_default)
    windows = typed_windows(types, window, num_layers=num_layers)
    rope = _rope(keys)
    return decoder_config(
        keys,
        layers=[{"window": each, "rope": rope if each or not window else None} for each in windows],
        rope=rope,
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
        **more,
    )


def write_exaone4(config: ModelConfig) -> dict[str, Any]:
    """Writes EXAONE 4; inverse of ``read_exaone4``."""
    return decoder_keys(config) | exaone_windows(config)


def exaone_windows(config: ModelConfig) -> dict[str, Any]:
    """Writes the windows that ``exaone_decoder`` reads."""
    windows = window_keys(config)
    if any(block.mixer.window is None and block.mixer.rope is None for block in config.blocks):
        # A window, even of no layer, says that layers without one are not rotated.
        windows["sliding_window"] = windows["sliding_window"] or config.max_positions
    return {name: windows[name] for name in ("sliding_window", "layer_types")}


def read_ernie(keys: Keys) -> ModelConfig:
    """Reads ERNIE 4.5: neighbours are rotated."""
    keys.require("head_dim")
    return ernie_decoder(keys)


def ernie_decoder(keys: Keys) -> ModelConfig:
    """Reads what ERNIE's dense models and those with experts have in common."""
    keys.require("num_key_value_heads")
    keys.ignore("ignored_index", "micro_batch_size", "weight_share_add_bias")
    keys.expect("compression_ratio", (1.0, None), "positions are whole numbers here")
    keys.expect("use_rmsnorm", (True, None), "norms are RMSNorm here")
    bias = keys.flag("use_bias", False)
    return decoder_config(
        keys,
        pairs=RopePairs.NEIGHBOURS,
        default_theta=500_000.0,
        attention_bias=bias,
        mlp_bias=bias,
        tied_by_default=True,
    )


def write_ernie(config: ModelConfig) -> dict[str, Any]:
    """Writes ERNIE 4.5; inverse of ``read_ernie``."""
    return decoder_keys(config) | {"use_bias": dense_block(config)[0].out_bias}


def read_hunyuan(keys: Keys) -> ModelConfig:
    """Reads Hunyuan: norms of heads behind the rotation, whose base a fixed alpha stretches."""
    keys = keys.alike("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
    keys.expect("num_experts", (1, None), "layers here have no experts")
    keys.ignore("moe_topk", "num_shared_expert", "moe_intermediate_size")
    return hunyuan_decoder(keys, mlp_bias=False)


def hunyuan_decoder(keys: Keys, **more: Any) -> ModelConfig:
    """Reads what Hunyuan's dense models and those with experts have in common."""
    keys.ignore("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "text_end_id")
    keys.ignore("cla_share_factor", "dense_list", "class_num", "pool_type", "org_vocab_size")
    keys.ignore("text_start_id", "mask_init_id", "skip_cls_token", "num_media_embeds")
    keys.expect("norm_type", ("rms", None), "norms are RMSNorm here")
    keys.expect("use_mla", (False, None), "attention is grouped here")
    keys.expect("use_rotary_pos_emb", (True, None), "queries and keys are rotated here")
    keys.expect("position_embedding_xdrope", (False, None), "positions are plain here")
    keys.expect("add_classification_head", (False, None), "a language model is needed")
    keys.expect("use_qk_norm", (True, None), "queries and keys are normalized here")
    keys.expect("use_cla", (False, None), "each layer has keys and values of its own")
    keys.expect("mlp_bias", (False, None), "feed-forward layers here have no biases")
    by_default = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", by_default)
    keys.expect("attention_head_dim", (head_dim, None), f"heads are {head_dim} wide here")
    # Of latent attention and routing by groups, which other code of its makers has.
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        keys.expect(name, (None,), "attention is grouped here")
    keys.expect("v_head_dim", (None,), "values are as wide as keys here")
    for name in ("n_group", "topk_group", "group_limited_greedy", "routed_scaling_factor"):
        keys.expect(name, (None, False), "experts are chosen without groups or factors here")
    keys.ignore("pad_id")
    return decoder_config(
        keys,
        rope=_rope(keys, has_alpha=True),
        attention_bias=keys.flag("attention_bias", False),
        qk_norm=NormConfig(epsilon=keys.number("rms_norm_eps")),
        qk_norm_after_rope=True,
        **more,
    )


def write_hunyuan(config: ModelConfig) -> dict[str, Any]:
    """Writes Hunyuan; inverse of ``read_hunyuan``."""
    return hunyuan_keys(config, decoder_keys(without_alpha(config)))


def without_alpha(config: ModelConfig) -> ModelConfig:
    """Returns the model with an unscaled rotation where alpha scales it, for shared writers."""

    def changed(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer
        if not isinstance(mixer, GroupedAttentionConfig) or mixer.rope is None:
            return block
        if not isinstance(mixer.rope.scaling, NtkScaling):
            return block
        plain = dataclasses.replace(mixer.rope, scaling=None)
        return dataclasses.replace(block, mixer=dataclasses.replace(mixer, rope=plain))

    return config.with_blocks(changed)


def hunyuan_keys(config: ModelConfig, keys: dict[str, Any]) -> dict[str, Any]:
    """Adds Hunyuan's own keys to those of a decoder."""
    attention = config.blocks[0].mixer
    if not isinstance(attention, GroupedAttentionConfig):
        raise ConfigError(f"{type(attention).__name__}: grouped attention is what these write")
    scaling = None if attention.rope is None else attention.rope.scaling
    if isinstance(scaling, NtkScaling):
        keys["rope_scaling"] = {"rope_type": "dynamic", "alpha": scaling.factor, "factor": 1.0}
    return keys | {"attention_bias": attention.out_bias}


def read_ministral(keys: Keys) -> ModelConfig:
    """Reads Ministral: Mistral with windows by layer."""
    keys.require("num_key_value_heads")
    num_layers, window = keys.integer("num_hidden_layers"), keys.integer("sliding_window", None)
    types = keys.sequence("layer_types", [SLIDING if window else FULL] * num_layers)
    return decoder_config(keys, windows=typed_windows(types, window, num_layers=num_layers))


def write_ministral(config: ModelConfig) -> dict[str, Any]:
    """Writes Ministral; inverse of ``read_ministral``."""
    return decoder_keys(config) | type_keys(config)


def read_ministral3(keys: Keys) -> ModelConfig:
    """Reads Ministral 3: YaRN, and queries that grow with their position."""
    keys.require("num_key_value_heads", "head_dim")
    _require_rope(keys)
    known = ("llama_4_scaling_beta", "max_position_embeddings")
    values = keys.mapping("rope_scaling") or keys.mapping("rope_parameters") or {}
    rope, scaling = Keys(values, what="rope_parameters"), None
    if (rate := rope.number("llama_4_scaling_beta", 0.0)) != 0.0:
        every = keys.integer("original_max_position_embeddings", None)
        scaling = QueryScaling(
            rate=rate, every=every or rope.integer("original_max_position_embeddings")
        )
    return decoder_config(
        keys,
        windows=(keys.integer("sliding_window", None),),
        rope=_rope(keys, known=known),
        query_scaling=scaling,
    )


def write_ministral3(config: ModelConfig) -> dict[str, Any]:
    """Writes Ministral 3; inverse of ``read_ministral3``."""
    attention, _ = dense_block(config)
    keys = in_rope_parameters(decoder_keys(config))
    rope, scaling = keys["rope_parameters"], attention.query_scaling
    if scaling is None:  # the reference asks for both numbers
        every = rope.get("original_max_position_embeddings", config.max_positions)
        scaling = QueryScaling(rate=0.0, every=every)
    rope["llama_4_scaling_beta"] = scaling.rate
    rope["original_max_position_embeddings"] = scaling.every
    return keys | {"sliding_window": attention.window}


def read_cwm(keys: Keys) -> ModelConfig:
    """Reads CWM: Llama 3 with windows by layer."""
    keys.require("num_key_value_heads", "head_dim")
    _require_rope(keys)
    num_layers, window = keys.integer("num_hidden_layers"), keys.integer("sliding_window", None)
    default = [FULL if i % 4 == 0 else SLIDING for i in range(num_layers)]
    types = keys.sequence("layer_types", default)
    return decoder_config(
        keys,
        windows=typed_windows(types, window, num_layers=num_layers),
        default_theta=1e6,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write_cwm(config: ModelConfig) -> dict[str, Any]:
    """Writes CWM; inverse of ``read_cwm``."""
    return _with_scaling(write_ministral(config)) | {"mlp_bias": dense_block(config)[1].bias}


EXAONE4 = dataclasses.replace(
    LLAMA,
    layer=(
        *norm("post_attention_layernorm", "attention_post_norm"),
        *norm("post_feedforward_layernorm", "mlp_post_norm"),
        *(*QKV, *OUT, *QK_NORM, *MLP),
    ),
    ignored=r"mtp\..*",
)
HUNYUAN_ATTENTION = (
    *(*PRE_NORMS, *QKV, *OUT),
    *head_norms("self_attn.query_layernorm", "self_attn.key_layernorm"),
)
HUNYUAN = dataclasses.replace(LLAMA, layer=(*HUNYUAN_ATTENTION, *MLP))
APERTUS = dataclasses.replace(
    LLAMA,
    layer=(
        *norm("attention_layernorm", "attention_norm"),
        *norm("feedforward_layernorm", "mlp_norm"),
        *(*QKV, *OUT, *QK_NORM, *linear("mlp.up_proj", "mlp/up", "F D -> D F", "F -> F"), *DOWN),
        rule("mlp.act_fn.alpha_p", "mlp/rise", "1 -> 1"),
        rule("mlp.act_fn.alpha_n", "mlp/fall", "1 -> 1"),
        rule("mlp.act_fn.beta", "mlp/slope", " -> "),
        rule("mlp.act_fn.eps", "mlp/edge", " -> "),
    ),
)

FAMILIES = {
    "smollm3": Family("SmolLM3ForCausalLM", read_smollm3, write_smollm3, LLAMA),
    "seed_oss": Family("SeedOssForCausalLM", read_seed_oss, write_seed_oss, LLAMA),
    "helium": Family("HeliumForCausalLM", read_helium, write_helium, LLAMA),
    "arcee": Family("ArceeForCausalLM", read_arcee, write_biased, LLAMA),
    "apertus": Family("ApertusForCausalLM", read_apertus, write_biased, APERTUS),
    "exaone4": Family("Exaone4ForCausalLM", read_exaone4, write_exaone4, EXAONE4),
    "ernie4_5": Family("Ernie4_5ForCausalLM", read_ernie, write_ernie, LLAMA),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", read_hunyuan, write_hunyuan, HUNYUAN),
    "ministral": Family("MinistralForCausalLM", read_ministral, write_ministral, LLAMA),
    "ministral3": Family("Ministral3ForCausalLM", read_ministral3, write_ministral3, LLAMA),
    "cwm": Family("CwmForCausalLM", read_cwm, write_cwm, LLAMA),
}
