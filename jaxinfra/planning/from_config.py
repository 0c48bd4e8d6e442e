"""Shapes of the models this code base runs, from their configs."""

import itertools

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormPlacement,
)
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.planning.shapes import Dense, Heads, LayerShape, ModelShape


def shape_of(config: ModelConfig, *, name: str = "model") -> ModelShape:
    """The weights of ``Decoder(config)``: the same elements, tensor by tensor (tested)."""
    layers = tuple(
        _layer(block, repeats) for block, repeats in zip(config.blocks, config.repeats, strict=True)
    )
    # Blocks that differ only in what planning does not see are one kind.
    merged = [
        LayerShape(
            attention=first.attention,
            feed_forward=first.feed_forward,
            count=first.count + sum(layer.count for layer in rest),
            norms=first.norms,
            norm_bias=first.norm_bias,
        )
        for first, *rest in (list(group) for _, group in itertools.groupby(layers))
    ]
    return ModelShape(
        name=name,
        vocab_size=config.vocab_size,
        model_dim=config.model_dim,
        layers=tuple(merged),
        tie_embeddings=config.tie_embeddings,
        max_positions=config.max_positions,
        learned_positions=config.learned_positions,
        final_norm_bias=config.final_norm.bias,
    )


def _layer(block: BlockConfig, count: int) -> LayerShape:
    attention, mlp = block.mixer, block.feed_forward
    if not isinstance(attention, GroupedAttentionConfig) or not isinstance(mlp, MlpConfig):
        raise UnsupportedError("a preset of other layers than grouped attention and a dense mlp")
    return LayerShape(
        attention=Heads(
            num_q_heads=attention.num_q_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            qkv_bias=attention.qkv_bias,
            out_bias=attention.out_bias,
            qk_norm=attention.qk_norm is not None,
            window=attention.window,
        ),
        feed_forward=Dense(hidden_dim=mlp.hidden_dim, gated=mlp.kind.gated, bias=mlp.bias),
        count=count,
        norms=4 if block.norm_placement is NormPlacement.SANDWICH else 2,
        norm_bias=block.norm.bias,
    )
