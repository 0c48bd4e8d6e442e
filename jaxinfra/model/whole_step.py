"""A decode step that computes all layers in one call of ``Kernels.decode_layers``.

Dims: B batch, T position, D model width.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jaxinfra.config.drafted import DraftedConfig
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.rope import RopePairs
from jaxinfra.model.block import Block
from jaxinfra.model.cache import JointCache, StateCache, after_pass, in_layer, with_pages
from jaxinfra.model.execution import Execution
from jaxinfra.model.grouped_attention import GroupedAttention
from jaxinfra.model.mlp import Mlp
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import LayerOutput, Pass, Sums
from jaxinfra.model.projection import Projection
from jaxinfra.model.repetition import KVCache
from jaxinfra.model.rope import RopeTable
from jaxinfra.ops.decode_layers import LayerWeights
from jaxinfra.ops.multiply import RmsNorm
from jaxinfra.ops.quantized import QuantizedWeight


def can_be_whole(config: ModelConfig) -> bool:
    """Tells whether the kernels that compute all layers in one call support this model."""
    block, *others = config.blocks
    mixer, fed, norm = block.mixer, block.feed_forward, block.norm
    if isinstance(config, DraftedConfig):  # its head reads the stream between layers
        return False
    if others or not isinstance(mixer, GroupedAttentionConfig) or not isinstance(fed, MlpConfig):
        return False
    if mixer.rope is None or mixer.rope.pairs is not RopePairs.HALVES:
        return False
    # Whatever else a block can have is left at its default.
    heads = {"num_q_heads": mixer.num_q_heads, "num_kv_heads": mixer.num_kv_heads}
    plain = BlockConfig(
        mixer=GroupedAttentionConfig(
            **heads, head_dim=mixer.head_dim, rope=mixer.rope, scale=mixer.scale
        ),
        feed_forward=MlpConfig(hidden_dim=fed.hidden_dim),
        norm=NormConfig(epsilon=norm.epsilon, scale_offset=norm.scale_offset),
    )
    return block == plain


def whole_step(
    x_BTD: jax.Array,
    config: ModelConfig,
    blocks: Sequence[Block],
    execution: Execution,
    given: Pass,
    ropes: Sequence[RopeTable | None],
    cache: KVCache | None,
) -> LayerOutput | None:
    """Computes all layers of a step of one token per row in one call; None if no kernels can."""
    is_served = execution.decode_form is not None and execution.decode_form.packed
    decode_layers = execution.kernels.decode_layers
    if decode_layers is None or not is_served or execution.statistics or cache is None:
        return None
    if not can_be_whole(config):
        return None
    (block,), (rope,), (before,) = blocks, ropes, cache
    weights = _weights(block)
    if before.is_empty or weights is None:
        return None
    assert not isinstance(before, StateCache | JointCache), "CacheSpec"
    assert rope is not None, "can_be_whole"
    attention = block.attention
    assert isinstance(attention, GroupedAttention), "can_be_whole"
    seen = in_layer(before, before.arrays, np.zeros((), np.int32))
    done = decode_layers(
        x_BTD,
        weights,
        seen.pages(),
        config=attention.config,
        positions_BT=given.positions_BT,
        rope=rope,
    )
    if done is None:
        return None
    x_BTD, arrays = done
    written = after_pass(before, with_pages(seen, arrays).arrays)
    return LayerOutput(x=x_BTD, cache=(written,), sums=(Sums(),))


def _weights(block: Block) -> LayerWeights | None:
    """The weights of all layers, [L, ...] each; None of a model with adapters."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, GroupedAttention), "can_be_whole"
    assert isinstance(mlp, Mlp), "can_be_whole"
    projections = attention.packed, attention.out, mlp.packed, mlp.down
    if any(layer is None or layer.adapter is not None for layer in projections):
        return None

    def matrices(layer: Projection | None, contracted: int = 1) -> jax.Array | QuantizedWeight:
        assert layer is not None, "packed"
        weight = layer.weight.get_value()
        if isinstance(weight, QuantizedWeight):
            return weight
        rows = int(np.prod(weight.shape[1 : 1 + contracted]))
        return weight.reshape(len(weight), rows, -1)

    def norms(layer: Norm | None) -> RmsNorm:
        assert layer is not None, "can_be_whole"
        assert layer.scale is not None, "can_be_whole"
        config = layer.config
        return RmsNorm(scale=layer.scale[...], epsilon=config.epsilon, offset=config.scale_offset)

    return LayerWeights(
        attention_norm=norms(block.attention_norm),
        qkv=matrices(attention.packed),
        out=matrices(attention.out, 2),
        mlp_norm=norms(block.mlp_norm),
        gate_up=matrices(mlp.packed),
        down=matrices(mlp.down),
    )
