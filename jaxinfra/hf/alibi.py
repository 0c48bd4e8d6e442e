"""Configs of decoders whose scores fall with distance (ALiBi): BLOOM, MPT and Falcon, both ways."""

import dataclasses
import math
from typing import Any

from jaxinfra.config.kinds import Branches, MlpKind
from jaxinfra.config.model import ModelConfig
from jaxinfra.hf.gpt import grouped_qkv
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.layer_norm_models import layer_norm
from jaxinfra.hf.shared import decoder_config, decoder_keys, dense_block, renamed
from jaxinfra.hf.weights import (
    PRE_NORMS,
    Family,
    WeightTable,
    fused_qkv,
    norm,
    outside,
    outward,
    rule,
    ungated,
)

_BLOOM_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_MPT_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
_LONGEST = 2048  # positions of BLOOM's pretraining, which its configs may leave out


def slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slopes of ALiBi (arXiv 2108.12409): powers of 2^(-8/n), n a power of 2.

    With other numbers of heads, those left over have every second slope of twice as many.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    others = [2.0 ** (-4.0 * (i + 1) / whole) for i in range(0, 2 * (num_heads - whole), 2)]
    return (*first, *others)


def read_bloom(keys: Keys) -> ModelConfig:
    """Reads BLOOM: slopes, normalized embeddings, biases everywhere."""
    keys.expect(
        "apply_residual_connection_post_layernorm", (False,), "residual sums of normalized values"
    )
    keys.expect("slow_but_exact", (False, None), "the reference then leaves biases out")
    keys.ignore("offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
    keys.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
    keys.ignore("unk_token_id", "hidden_dropout_prob", "attention_dropout_prob")
    width, heads = keys.named("hidden_size", "n_embed"), keys.named("n_head", "num_attention_heads")
    keys.expect("n_inner", (4 * width, None), "feed-forward layers are 4 times as wide here")
    max_positions = keys.integer("seq_length", _LONGEST)
    norm = layer_norm(keys, "layer_norm_epsilon")
    heads_name = "n_head" if keys.has("n_head") else "num_attention_heads"
    return decoder_config(
        keys.named_as(**_BLOOM_NAMES | {"num_attention_heads": heads_name}),
        width=width,
        max_positions=max_positions,
        num_kv_heads=heads,
        hidden_dim=4 * width,
        norm=norm,
        has_rope=False,
        activation=MlpKind.GELU_TANH,
        mlp_bias=True,
        attention_bias=True,
        distance_slopes=slopes(heads),
        tied_by_default=True,
        model={"embedding_norm": norm},
    )


def write_bloom(config: ModelConfig) -> dict[str, Any]:
    """Writes BLOOM; inverse of ``read_bloom``."""
    dense_block(config)
    return renamed(
        decoder_keys(config),
        **_BLOOM_NAMES,
        max_position_embeddings="seq_length",
        rms_norm_eps="layer_norm_epsilon",
        intermediate_size=None,
        hidden_act=None,
        head_dim=None,
        num_key_value_heads=None,
    )


def read_mpt(keys: Keys) -> ModelConfig:
    """Reads MPT: slopes, no biases."""
    keys.expect("expansion_ratio", (4, None), "feed-forward layers are 4 times as wide here")
    keys.expect("no_bias", (True,), "layers here have no biases")
    keys.expect("logit_scale", (None,), "implementations differ in whether it is used")
    keys.expect("norm_type", ("low_precision_layernorm",), "norms are LayerNorm here")
    keys.expect("embedding_fraction", (1.0,), "a switch of training code that changes gradients")
    keys.ignore("learned_pos_emb", "verbose", "init_config", "fc_type", "tokenizer_name")
    attention = Keys(keys.mapping("attn_config") or {}, what="attn_config")
    attention.expect("attn_type", ("multihead_attention",), "every head has a key here")
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.expect(name, (False,), "plain causal attention is what is read")
    attention.expect("alibi", (True,), "positions are slopes here")
    attention.expect("rope", (False, None), "positions are slopes here")
    width, heads = keys.integer("d_model"), keys.integer("n_heads")
    attention.expect("alibi_bias_max", (8, None), "implementations differ in whether it is used")
    config = decoder_config(
        keys.named_as(**_MPT_NAMES),
        num_kv_heads=heads,
        hidden_dim=4 * width,
        norm=layer_norm(keys, "layer_norm_epsilon", bias=False),
        has_rope=False,
        activation=MlpKind.GELU,
        scale=attention.number("softmax_scale", None),
        qkv_clip=attention.number("clip_qkv", None),
        distance_slopes=_mpt_slopes(heads),
        tied_by_default=True,
    )
    attention.ignore("attn_pdrop", "attn_impl", "use_cache")
    attention.finish()
    return config


def _mpt_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes as MPT orders them where the number of heads is no power of 2."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    found = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    if whole != num_heads:
        found = [*found[1::2], *found[::2]][:num_heads]
    return tuple(found)


def write_mpt(config: ModelConfig) -> dict[str, Any]:
    """Writes MPT; inverse of ``read_mpt``."""
    attention, _ = dense_block(config)
    keys = renamed(
        decoder_keys(config),
        **_MPT_NAMES,
        rms_norm_eps="layer_norm_epsilon",
        intermediate_size=None,
        hidden_act=None,
        head_dim=None,
        num_key_value_heads=None,
    )
    return keys | {
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "softmax_scale": attention.scale,
            "clip_qkv": attention.qkv_clip,
        },
    }


def read_falcon(keys: Keys) -> ModelConfig:
    """Reads Falcon 1: layers side by side by one norm or two; rotary, or slopes in sequence."""
    is_new = keys.flag("new_decoder_architecture", False)
    is_parallel = is_new or keys.flag("parallel_attn", True)
    heads = keys.integer("num_attention_heads")
    keys.expect("n_head", (heads, None), "num_attention_heads says otherwise")
    keys.expect("n_layer", (keys.integer("num_hidden_layers"), None), "num_hidden_layers differs")
    if is_new:
        keys.expect("parallel_attn", (True, None), "the new architecture is side by side")
        keys.ignore("multi_query")
        kv_heads = keys.integer("num_kv_heads")
    else:
        kv_heads = 1 if keys.flag("multi_query", True) else heads
        keys.ignore("num_kv_heads")
    keys.ignore("ff_factor")  # ffn_hidden_size says it
    num_norms = keys.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    branches = Branches.SHARED_NORM if num_norms == 1 else Branches.PARALLEL
    width = keys.integer("hidden_size")
    keys.expect(
        "apply_residual_connection_post_layernorm",
        (False, None),
        "residual sums of normalized values",
    )
    if keys.flag("alibi", False):
        keys.ignore("rope_parameters", "rope_theta", "rope_scaling")
    has_slopes, bias = keys.flag("alibi", False), keys.flag("bias", False)
    head_dim = width // heads
    return decoder_config(
        keys.named_as(hidden_act="activation"),
        hidden_dim=keys.integer("ffn_hidden_size", 4 * width),
        num_kv_heads=kv_heads,
        max_positions=keys.integer("max_position_embeddings", _LONGEST),
        norm=layer_norm(keys, "layer_norm_epsilon"),
        has_rope=not has_slopes,
        activation=keys.choice("activation", {"gelu": MlpKind.GELU}, "gelu"),
        mlp_bias=bias,
        attention_bias=bias,
        # Added to scores before these are divided by sqrt(head_dim), and rounded to bfloat16.
        distance_slopes=tuple(_bfloat16(each) * head_dim**-0.5 for each in slopes(heads))
        if has_slopes
        else None,
        tied_by_default=True,
        block={"branches": branches if is_parallel else Branches.SEQUENTIAL},
    )


def _bfloat16(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256.0), exponent - 8)


def write_falcon(config: ModelConfig) -> dict[str, Any]:
    """Writes Falcon 1; inverse of ``read_falcon``."""
    attention, mlp = dense_block(config)
    branches = config.blocks[0].branches
    is_new = branches is Branches.PARALLEL or attention.num_kv_heads not in (
        1,
        attention.num_q_heads,
    )
    keys = renamed(
        decoder_keys(config),
        rms_norm_eps="layer_norm_epsilon",
        hidden_act="activation",
        intermediate_size="ffn_hidden_size",
        head_dim=None,
        num_key_value_heads="num_kv_heads",
    )
    return keys | {
        "bias": mlp.bias,
        "alibi": attention.distance_slopes is not None,
        "multi_query": attention.num_kv_heads == 1,
        "new_decoder_architecture": is_new,
        "parallel_attn": branches is not Branches.SEQUENTIAL,
        "num_ln_in_parallel_attn": 2 if branches is Branches.PARALLEL else 1,
    }


_OUTSIDE = (
    rule("transformer.word_embeddings.weight", "embedding/table", "V D -> V D"),
    *norm("transformer.word_embeddings_layernorm", "embedding_norm"),
    *norm("transformer.ln_f", "final_norm"),
    rule("lm_head.weight", "unembedding/table", "V D -> V D"),
)
_BRANCHES = (
    *grouped_qkv("self_attention.query_key_value"),
    *outward("self_attention.dense"),
    *ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)
BLOOM = WeightTable(
    layer_prefix="transformer.h.{}.",
    layer=(
        *PRE_NORMS,
        *_BRANCHES,
    ),
    outside=_OUTSIDE,
    root="transformer.",
)
MPT = WeightTable(
    layer_prefix="transformer.blocks.{}.",
    layer=(
        *(*norm("norm_1", "attention_norm"), *norm("norm_2", "mlp_norm")),
        fused_qkv("attn.Wqkv.weight"),
        rule("attn.out_proj.weight", "attention/out/weight", "D (N H) -> N H D"),
        *ungated("ffn.up_proj", "ffn.down_proj"),
    ),
    outside=outside("transformer.wte.weight", "transformer.norm_f"),
    root="transformer.",
)
_FALCON_TWO_NORMS = dataclasses.replace(
    BLOOM,
    layer=(*norm("ln_attn", "attention_norm"), *norm("ln_mlp", "mlp_norm"), *_BRANCHES),
)


def falcon_weights(config: ModelConfig) -> WeightTable:
    """Returns Falcon's table; models with two norms side by side have other names for them."""
    return _FALCON_TWO_NORMS if config.blocks[0].branches is Branches.PARALLEL else BLOOM


FAMILIES = {
    "bloom": Family("BloomForCausalLM", read_bloom, write_bloom, BLOOM),
    "mpt": Family("MptForCausalLM", read_mpt, write_mpt, MPT),
    "falcon": Family("FalconForCausalLM", read_falcon, write_falcon, falcon_weights),
}
