"""Configs of Llama, Mistral, Qwen 2 and 3, and Phi-3, both ways.

A reader takes the strict ``Keys`` of a config and returns the model, a writer returns the keys.
Shared code is in ``shared.py``, the table of architectures in ``config.py``.
"""

import dataclasses
from typing import Any

from jaxinfra.config.model import (
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.rope import LongRopeScaling
from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import (
    decoder_config,
    decoder_keys,
    dense_block,
    layer_windows,
    renamed,
    window_keys,
)
from jaxinfra.hf.weights import (
    LLAMA,
    PHI3,
    Family,
    PredictionTable,
    WeightTable,
    inward,
    joined_inputs,
    linear,
    norm,
    outside,
    outward,
)


def read_llama(keys: Keys) -> ModelConfig:
    """Reads Llama 2, 3, 3.1 and 3.2."""
    return decoder_config(
        keys,
        attention_bias=keys.flag("attention_bias", False),
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """Writes Llama; inverse of ``read_llama`` for the models that the reference reads too."""
    attention, mlp = dense_block(config)
    if config.model_dim % attention.num_q_heads:
        raise ConfigError(
            f"model_dim={config.model_dim} is not a multiple of num_q_heads="
            f"{attention.num_q_heads}, which the reference asks of Llama"
        )
    return decoder_keys(config) | {"attention_bias": attention.out_bias, "mlp_bias": mlp.bias}


_EXAONE_NAMES = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


def read_exaone(keys: Keys) -> ModelConfig:
    """Reads EXAONE 3 and 3.5: Llama with other names."""
    keys.require("num_key_value_heads")
    names = {ours: theirs for ours, theirs in _EXAONE_NAMES.items() if keys.has(theirs)}
    return read_llama(keys.named_as(**names))


def write_exaone(config: ModelConfig) -> dict[str, Any]:
    """Writes EXAONE 3; inverse of ``read_exaone``."""
    return renamed(write_llama(config), **_EXAONE_NAMES)


def read_mistral(keys: Keys) -> ModelConfig:
    """Reads Mistral: one window for all layers."""
    keys.require("num_key_value_heads", "sliding_window")
    return decoder_config(keys, windows=(keys.integer("sliding_window", None),))


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    """Writes Mistral; inverse of ``read_mistral``."""
    return decoder_keys(config) | {"sliding_window": config.blocks[0].mixer.window}


def read_qwen2(keys: Keys) -> ModelConfig:
    """Reads Qwen 2 and 2.5: biased query, key and value."""
    keys.require("num_key_value_heads")
    keys.expect("qkv_bias", (True, None), "queries, keys and values have biases here")
    longest = keys.integer("max_position_embeddings")
    if (chunks := keys.mapping("dual_chunk_attention_config")) is not None:
        # Qwen2.5-1M: up to a chunk's length this is plain attention, which transformers computes.
        sizes = Keys(chunks, what="dual_chunk_attention_config")
        longest = min(longest, sizes.integer("chunk_size") - sizes.integer("local_size"))
    return decoder_config(keys, windows=layer_windows(keys), qkv_bias=True, max_positions=longest)


def read_mimo(keys: Keys) -> ModelConfig:
    """Reads MiMo: Qwen 2 with multi-token prediction, whose module attends like the first layer."""
    keys.expect("attention_bias", (True, None), "queries, keys and values have biases here")
    model = read_qwen2(keys)
    if keys.integer("num_nextn_predict_layers", 0) <= 0:
        return model
    if model.layers[0] != model.layers[-1]:
        raise ConfigError(
            "num_nextn_predict_layers: the module attends like the first layer, and here modules "
            "attend like the last, whose window is another; set it to 0 to read the model alone"
        )
    return dataclasses.replace(model, mtp=True)


def write_mimo(config: ModelConfig) -> dict[str, Any]:
    """Writes MiMo; inverse of ``read_mimo``."""
    return write_qwen2(config) | {"num_nextn_predict_layers": int(config.mtp)}


MIMO = dataclasses.replace(
    LLAMA,
    ignored=rf"{LLAMA.ignored}|model\.mtp_layers\..*",
    prediction=PredictionTable(
        prefix="model.mtp_layers.0.",
        outside=(
            *norm("token_layernorm", "embedding_norm"),
            *norm("hidden_layernorm", "hidden_norm"),
            joined_inputs("input_proj.weight", "hidden_projection", "embedding_projection"),
            *norm("final_layernorm", "final_norm"),
        ),
    ),
)


def read_qwen3(keys: Keys) -> ModelConfig:
    """Reads Qwen 3: query and key normalized by head."""
    keys.require("num_key_value_heads", "head_dim")
    keys.expect("use_qk_norm", (True, None), "queries and keys are normalized here")
    norm = NormConfig(epsilon=keys.number("rms_norm_eps"))
    return decoder_config(
        keys,
        windows=layer_windows(keys),
        attention_bias=keys.flag("attention_bias", False),
        qk_norm=norm,
    )


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Writes Qwen 2; inverse of ``read_qwen2``."""
    return decoder_keys(config) | window_keys(config)


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Writes Qwen 3; inverse of ``read_qwen3``."""
    return write_qwen2(config) | {"attention_bias": dense_block(config)[0].out_bias}


def read_phi3(keys: Keys) -> ModelConfig:
    """Reads Phi-3, 3.5-mini and 4: fused projections, LongRoPE."""
    # Of Phi-4-mini's own code, which can mix kinds of attention and stretch positions.
    keys.expect("full_attn_mod", (1, None), "all layers attend alike here")
    keys.expect("interpolate_factor", (1, None), "positions are scaled by rope_scaling alone")
    return decoder_config(
        keys,
        windows=(keys.integer("sliding_window", None),),
        partial_rotary=True,
        original_max_positions=4096,
        model={"dropout_rate": keys.number("resid_pdrop", 0.0)},
    )


def write_phi3(config: ModelConfig) -> dict[str, Any]:
    """Writes Phi-3; inverse of ``read_phi3``."""
    rope = config.blocks[0].mixer.rope
    scaling = None if rope is None else rope.scaling
    original = scaling.original_max_positions if isinstance(scaling, LongRopeScaling) else 4096
    return decoder_keys(config) | {
        "sliding_window": config.blocks[0].mixer.window,
        "original_max_position_embeddings": original,
        "resid_pdrop": config.dropout_rate,
        "embd_pdrop": config.dropout_rate,
    }


EXAONE = WeightTable(
    layer_prefix="transformer.h.{}.",
    layer=(
        *norm("ln_1", "attention_norm"),
        *norm("ln_2", "mlp_norm"),
        *inward("attn.attention"),
        *outward("attn.attention.out_proj"),
        *linear("mlp.c_fc_0", "mlp/gate", "F D -> D F", "F -> F"),
        *linear("mlp.c_fc_1", "mlp/up", "F D -> D F", "F -> F"),
        *linear("mlp.c_proj", "mlp/down", "D F -> F D", "D -> D"),
    ),
    outside=outside("transformer.wte.weight", "transformer.ln_f"),
    root="transformer.",
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", read_llama, write_llama, LLAMA),
    "exaone": Family(
        "ExaoneForCausalLM", read_exaone, write_exaone, EXAONE, saved_as="LlamaForCausalLM"
    ),
    "mistral": Family("MistralForCausalLM", read_mistral, write_mistral, LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", read_qwen2, write_qwen2, LLAMA),
    "mimo": Family("MiMoForCausalLM", read_mimo, write_mimo, MIMO),
    "qwen3": Family("Qwen3ForCausalLM", read_qwen3, write_qwen3, LLAMA),
    "phi3": Family("Phi3ForCausalLM", read_phi3, write_phi3, PHI3),
}
