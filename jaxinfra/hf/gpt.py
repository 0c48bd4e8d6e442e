"""Configs of GPT-2, GPT-NeoX, GPT-J, GPT-Neo and OPT, both ways."""

from typing import Any

from jaxinfra.config.kinds import Branches, NormKind
from jaxinfra.config.model import ModelConfig, NormConfig
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.layer_norm_models import layer_norm
from jaxinfra.hf.shared import decoder_config, decoder_keys, dense_block, renamed
from jaxinfra.hf.weights import (
    GPT2,
    PRE_NORMS,
    Family,
    Rule,
    WeightTable,
    inward,
    norm,
    outside,
    outward,
    rule,
    ungated,
)

_GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}


def read_gpt2(keys: Keys) -> ModelConfig:
    """Reads GPT-2: learned positions, LayerNorm, biases everywhere."""
    width, heads = keys.integer("n_embd"), keys.integer("n_head")
    keys.expect("n_ctx", (keys.integer("n_positions"),), "it must equal n_positions")
    named = keys.named_as(**_GPT_NAMES)
    return decoder_config(
        named,
        num_kv_heads=heads,
        hidden_dim=keys.integer("n_inner", 4 * width),
        layers=[{"scale": scale} for scale in _gpt2_scales(keys, width // heads)],
        norm=layer_norm(keys, "layer_norm_epsilon"),
        has_rope=False,
        activation_default="gelu_new",
        gated=False,
        mlp_bias=True,
        attention_bias=True,
        tied_by_default=True,
        model={"learned_positions": True, "dropout_rate": keys.number("resid_pdrop", 0.1)},
    )


def _gpt2_scales(keys: Keys, head_dim: int) -> list[float | None]:
    """Factor of each layer's scores; None: 1/sqrt(head_dim)."""
    is_scaled = keys.flag("scale_attn_weights", True)
    if not keys.flag("scale_attn_by_inverse_layer_idx", False):
        return [None if is_scaled else 1.0] * keys.integer("n_layer")
    base = head_dim**-0.5 if is_scaled else 1.0
    return [base / (i + 1) for i in range(keys.integer("n_layer"))]


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Writes GPT-2; inverse of ``read_gpt2``."""
    attention, _ = dense_block(config)
    keys = renamed(
        decoder_keys(config),
        **_GPT_NAMES,
        rms_norm_eps="layer_norm_epsilon",
        head_dim=None,
        num_key_value_heads=None,
    )
    is_scaled = attention.scale in (None, attention.head_dim**-0.5)
    return keys | {
        "scale_attn_weights": is_scaled,
        "scale_attn_by_inverse_layer_idx": len({each.mixer.scale for each in config.blocks}) > 1,
        "resid_pdrop": config.dropout_rate,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": 0.0,
    }


def read_gpt_neox(keys: Keys) -> ModelConfig:
    """Reads GPT-NeoX and Pythia: layers side by side with two norms, a part of heads rotated."""
    is_parallel = keys.flag("use_parallel_residual", True)
    keys.ignore("classifier_dropout")
    # Releases before transformers 5 wrote two numbers under a second name, which is not read.
    again = "it is another name for {}, which says otherwise"
    for name, other, default in (
        ("rope_theta", "rotary_emb_base", 10_000.0),
        ("partial_rotary_factor", "rotary_pct", 0.25),
    ):
        keys.expect(name, (keys.number(other, default), None), again.format(other))
    return decoder_config(
        keys.named_as(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base"),
        num_kv_heads=keys.integer("num_attention_heads"),
        norm=layer_norm(keys, "layer_norm_eps"),
        partial_rotary=True,
        default_fraction=0.25,
        gated=False,
        mlp_bias=True,
        attention_bias=keys.flag("attention_bias", True),
        block={"branches": Branches.PARALLEL if is_parallel else Branches.SEQUENTIAL},
    )


def write_gpt_neox(config: ModelConfig) -> dict[str, Any]:
    """Writes GPT-NeoX; inverse of ``read_gpt_neox``."""
    attention, _ = dense_block(config)
    keys = renamed(
        decoder_keys(config),
        rms_norm_eps="layer_norm_eps",
        rope_theta="rotary_emb_base",
        partial_rotary_factor="rotary_pct",
        head_dim=None,
        num_key_value_heads=None,
    )
    return keys | {
        "rotary_pct": 1.0 if attention.rope is None else attention.rope.fraction,
        "attention_bias": attention.out_bias,
        "use_parallel_residual": config.blocks[0].branches is not Branches.SEQUENTIAL,
    }


def read_gptj(keys: Keys) -> ModelConfig:
    """Reads GPT-J: layers side by side behind one norm, neighbours of a part of heads rotated."""
    width = keys.integer("n_embd")
    head_dim = width // keys.integer("n_head")
    rotated = keys.integer("rotary_dim")
    keys.expect("rotary", (True, None), "queries and keys are rotated here")
    keys.expect("scale_attn_weights", (True, None), "scores are divided by sqrt(head_dim) here")
    keys.ignore("gradient_checkpointing", "n_ctx")
    hidden = keys.integer("n_inner", 4 * width)
    named = keys.named_as(**_GPT_NAMES)
    named.ignore("n_inner")
    return decoder_config(
        named,
        num_kv_heads=keys.integer("n_head"),
        hidden_dim=hidden,
        norm=layer_norm(keys, "layer_norm_epsilon"),
        rope=RopeConfig(fraction=rotated / head_dim, pairs=RopePairs.NEIGHBOURS),
        partial_rotary=True,
        gated=False,
        mlp_bias=True,
        block={"branches": Branches.SHARED_NORM},
        model={"logit_bias": True},
    )


def write_gptj(config: ModelConfig) -> dict[str, Any]:
    """Writes GPT-J; inverse of ``read_gptj``."""
    attention, _ = dense_block(config)
    rope = attention.rope or RopeConfig()
    keys = renamed(
        decoder_keys(config),
        **_GPT_NAMES,
        rms_norm_eps="layer_norm_epsilon",
        head_dim=None,
        num_key_value_heads=None,
        rope_theta=None,
        rope_scaling=None,
        partial_rotary_factor=None,
    )
    return keys | {"rotary_dim": rope.rotary_dim(attention.head_dim)}


def read_gpt_neo(keys: Keys) -> ModelConfig:
    """Reads GPT-Neo: learned positions, windows in every other layer, unscaled scores."""
    num_layers = keys.integer("num_layers")
    named = [each for kinds, count in keys.sequence("attention_types") for each in kinds * count]
    layers = keys.sequence("attention_layers", named)
    if len(layers) != num_layers or {*layers} - {"global", "local"}:
        raise ConfigError(
            f"attention_layers={list(layers)}: global or local for each of {num_layers} layers"
        )
    keys.ignore("classifier_dropout", "gradient_checkpointing")
    window = keys.integer("window_size", 256)
    width = keys.integer("hidden_size")
    return decoder_config(
        keys.named_as(
            num_hidden_layers="num_layers",
            num_attention_heads="num_heads",
            hidden_act="activation_function",
        ),
        num_kv_heads=keys.integer("num_heads"),
        hidden_dim=keys.integer("intermediate_size", 4 * width),
        windows=[window if each == "local" else None for each in layers],
        norm=layer_norm(keys, "layer_norm_epsilon"),
        has_rope=False,
        gated=False,
        mlp_bias=True,
        out_bias=True,
        scale=1.0,
        tied_by_default=True,
        model={"learned_positions": True},
    )


def write_gpt_neo(config: ModelConfig) -> dict[str, Any]:
    """Writes GPT-Neo; inverse of ``read_gpt_neo``."""
    windows = [block.mixer.window for block in config.layers]
    layers = ["global" if each is None else "local" for each in windows]
    keys = renamed(
        decoder_keys(config),
        num_hidden_layers="num_layers",
        num_attention_heads="num_heads",
        hidden_act="activation_function",
        rms_norm_eps="layer_norm_epsilon",
        head_dim=None,
        num_key_value_heads=None,
    )
    return keys | {
        "attention_types": [[layers, 1]],
        "attention_layers": layers,
        "window_size": next((each for each in windows if each is not None), 256),
    }


def read_opt(keys: Keys) -> ModelConfig:
    """Reads OPT: learned positions from row 2 on, ReLU, LayerNorm before each layer."""
    keys.expect("do_layer_norm_before", (True,), "norms behind the residual sum (OPT-350m)")
    keys.expect("_remove_final_layer_norm", (False,), "a model without its final norm")
    keys.expect("layer_norm_elementwise_affine", (True,), "norms have scales and biases here")
    width = keys.integer("hidden_size")
    keys.expect("word_embed_proj_dim", (width, None), "embeddings as wide as the model are needed")
    keys.ignore("dropout", "layerdrop", "activation_dropout")
    bias = keys.flag("enable_bias", True)
    return decoder_config(
        keys.named_as(
            intermediate_size="ffn_dim",
            hidden_act="activation_function",
            initializer_range="init_std",
        ),
        num_kv_heads=keys.integer("num_attention_heads"),
        norm=NormConfig(kind=NormKind.LAYER, bias=True),
        has_rope=False,
        gated=False,
        mlp_bias=bias,
        attention_bias=bias,
        tied_by_default=True,
        model={"learned_positions": True, "position_offset": 2},
    )


def write_opt(config: ModelConfig) -> dict[str, Any]:
    """Writes OPT; inverse of ``read_opt``."""
    keys = renamed(
        decoder_keys(config),
        intermediate_size="ffn_dim",
        hidden_act="activation_function",
        initializer_range="init_std",
        rms_norm_eps=None,
        head_dim=None,
        num_key_value_heads=None,
    )
    return keys | {
        "enable_bias": dense_block(config)[1].bias,
        "word_embed_proj_dim": config.model_dim,
        "do_layer_norm_before": True,
    }


def grouped_qkv(theirs: str) -> tuple[Rule, Rule]:
    """Makes the rules of a fused projection: each key head's queries, its key and its value."""
    parts = [("query", "N"), ("key", "K"), ("value", "K")]
    return (
        Rule(
            name=f"{theirs}.weight",
            parts=tuple(
                (f"attention/{name}/weight", f"({heads} H) D -> D {heads} H")
                for name, heads in parts
            ),
            groups="K",
        ),
        Rule(
            name=f"{theirs}.bias",
            parts=tuple(
                (f"attention/{name}/bias", f"({heads} H) -> {heads} H") for name, heads in parts
            ),
            groups="K",
        ),
    )


GPT_NEOX = WeightTable(
    layer_prefix="gpt_neox.layers.{}.",
    layer=(
        *PRE_NORMS,
        *grouped_qkv("attention.query_key_value"),
        *outward("attention.dense"),
        *ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    outside=outside("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out"),
    root="gpt_neox.",
    ignored=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)
GPTJ = WeightTable(
    layer_prefix="transformer.h.{}.",
    layer=(
        *norm("ln_1", "attention_norm"),
        *(*inward("attn"), *outward("attn.out_proj")),
        *ungated("mlp.fc_in", "mlp.fc_out"),
    ),
    outside=(
        *outside("transformer.wte.weight", "transformer.ln_f"),
        rule("lm_head.bias", "logit_bias", "V -> V"),
    ),
    root="transformer.",
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
)
GPT_NEO = WeightTable(
    layer_prefix="transformer.h.{}.",
    layer=(
        *(*norm("ln_1", "attention_norm"), *norm("ln_2", "mlp_norm")),
        *(*inward("attn.attention"), *outward("attn.attention.out_proj")),
        *ungated("mlp.c_fc", "mlp.c_proj"),
    ),
    outside=outside(
        *("transformer.wte.weight", "transformer.ln_f"), positions="transformer.wpe.weight"
    ),
    root="transformer.",
    ignored=r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",
)
OPT = WeightTable(
    layer_prefix="model.decoder.layers.{}.",
    layer=(
        *norm("self_attn_layer_norm", "attention_norm"),
        *norm("final_layer_norm", "mlp_norm"),
        *(*inward("self_attn"), *outward("self_attn.out_proj")),
        *ungated("fc1", "fc2"),
    ),
    outside=outside(
        "model.decoder.embed_tokens.weight",
        "model.decoder.final_layer_norm",
        positions="model.decoder.embed_positions.weight",
    ),
    root="model.",
)

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", read_gpt2, write_gpt2, GPT2),
    "gpt_neox": Family("GPTNeoXForCausalLM", read_gpt_neox, write_gpt_neox, GPT_NEOX),
    "gptj": Family("GPTJForCausalLM", read_gptj, write_gptj, GPTJ),
    "gpt_neo": Family("GPTNeoForCausalLM", read_gpt_neo, write_gpt_neo, GPT_NEO),
    "opt": Family("OPTForCausalLM", read_opt, write_opt, OPT),
}
