"""GPT-2's config, whose keys have names of their own."""

from typing import Any

from jaxinfra.config.kinds import MlpKind, NormKind
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.hf.keys import Keys
from jaxinfra.hf.shared import dense_block

_ACTIVATIONS = {
    "gelu_new": MlpKind.GELU_TANH,
    "gelu_pytorch_tanh": MlpKind.GELU_TANH,
    "gelu": MlpKind.GELU,
}
_ACTIVATION_NAMES = {MlpKind.GELU_TANH: "gelu_new", MlpKind.GELU: "gelu"}


def read_gpt2(keys: Keys) -> ModelConfig:
    """GPT-2: learned positions, LayerNorm, biases everywhere."""
    keys.expect("scale_attn_weights", (True,), "scores without 1/sqrt(head_dim)")
    keys.expect("scale_attn_by_inverse_layer_idx", (False,), "scores scaled by layer")
    width, heads = keys.integer("n_embd"), keys.integer("n_head")
    max_positions = keys.integer("n_positions")
    keys.expect("n_ctx", (max_positions,), "it must equal n_positions")
    norm = NormConfig(
        kind=NormKind.LAYER, bias=True, epsilon=keys.number("layer_norm_epsilon", 1e-5)
    )
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            rope=None,
            qkv_bias=True,
            out_bias=True,
        ),
        feed_forward=MlpConfig(
            hidden_dim=keys.integer("n_inner", 4 * width),
            kind=keys.choice("activation_function", _ACTIVATIONS, "gelu_new"),
            bias=True,
        ),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        model_dim=width,
        max_positions=max_positions,
        stacks=stacked(block, num_layers=keys.integer("n_layer")),
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        learned_positions=True,
        final_norm=norm,
        dropout_rate=keys.number("resid_pdrop", 0.1),
        init_std=keys.number("initializer_range", 0.02),
    )


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Inverse of ``read_gpt2``."""
    attention, mlp = dense_block(config)
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.model_dim,
        "n_layer": config.num_layers,
        "n_head": attention.num_q_heads,
        "n_inner": mlp.hidden_dim,
        "n_positions": config.max_positions,
        "activation_function": _ACTIVATION_NAMES.get(mlp.kind),
        "layer_norm_epsilon": config.blocks[0].norm.epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "resid_pdrop": config.dropout_rate,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": 0.0,
        "initializer_range": config.init_std,
    }
