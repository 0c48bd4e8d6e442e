"""A decode step's layers as one call of ``Execution.decode_layers``, instead of one after another.

Dims: B batch, T position, D model width.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jaxinfra.config.kinds import MlpKind, NormKind, NormPlacement
from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, MlpConfig, ModelConfig
from jaxinfra.config.rope import RopePairs
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.layers.block import Block
from jaxinfra.layers.cache import after_pass, in_layer, with_pages
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.grouped_attention import GroupedAttention
from jaxinfra.layers.mlp import Mlp
from jaxinfra.layers.norm import Norm
from jaxinfra.layers.passes import LayerOutput, Pass, Sums
from jaxinfra.layers.projection import Projection
from jaxinfra.layers.rope import RopeTable
from jaxinfra.models.repetition import KVCache
from jaxinfra.ops.decode_layers import LayerWeights
from jaxinfra.ops.deferred import RmsNorm
from jaxinfra.ops.quantized import QuantizedWeight


def check_whole(config: ModelConfig) -> None:
    """Raises UnsupportedError for a model whose layers the kernel cannot compute."""
    wrong = unlike_whole(config)
    if any(repeats > 1 for repeats in config.repeats):
        wrong = "stacked layers: it is of the serving form"
    if wrong is not None:
        raise UnsupportedError(
            f"whole layers with {wrong}; the kernel takes layers that are alike: grouped attention "
            "to all earlier tokens, rotary in halves, SwiGLU, RMS norms before both, no biases; "
            "leave whole_layers=False"
        )


def unlike_whole(config: ModelConfig) -> str | None:
    """What a model's layers have that the kernel cannot compute, stacked or not; None: nothing."""
    first = config.blocks[0]
    if any(block != first for block in config.blocks):
        return "layers that differ"
    return _wrong_with(first)


def _wrong_with(config: BlockConfig) -> str | None:
    mixer, fed, norm = config.mixer, config.feed_forward, config.norm
    if not isinstance(mixer, GroupedAttentionConfig) or not isinstance(fed, MlpConfig):
        return f"{type(mixer).__name__} and {type(fed).__name__}"
    if mixer.rope is None or mixer.rope.pairs is not RopePairs.HALVES:
        return f"rope={mixer.rope}"
    if mixer.window or mixer.logit_soft_cap or mixer.sinks or mixer.function:
        return "attention with a window, a soft cap, sinks or a function of its own"
    if mixer.qk_norm or mixer.qkv_bias or mixer.out_bias:
        return "attention with norms of heads, or biases"
    if fed.kind is not MlpKind.SWIGLU or fed.bias:
        return f"{fed}"
    if norm.kind is not NormKind.RMS or norm.bias or norm.function:
        return f"{norm}"
    if config.norm_placement is not NormPlacement.PRE:
        return f"norm_placement={config.norm_placement}"
    return None


def whole_step(
    x_BTD: jax.Array,
    blocks: Sequence[Block],
    execution: Execution,
    given: Pass,
    ropes: Sequence[RopeTable | None],
    cache: KVCache | None,
) -> LayerOutput | None:
    """All layers of a step of one token; None where they are computed one after another."""
    if execution.decode_layers is None or execution.statistics or cache is None:
        return None
    if any(each.is_empty for each in cache):
        return None
    rope = ropes[0]
    assert rope is not None, "check_whole"
    seen = [in_layer(each, each.arrays, np.zeros((), np.int32)) for each in cache]
    attention = blocks[0].attention
    assert isinstance(attention, GroupedAttention), "check_whole"
    done = execution.decode_layers(
        x_BTD,
        [_weights(block) for block in blocks],
        [each.places() for each in seen],
        positions_BT=given.positions_BT,
        rope=rope,
        scale=attention.config.scale,
    )
    if done is None:
        return None
    x_BTD, arrays = done
    written = tuple(
        after_pass(before, with_pages(mine, new).arrays)
        for before, mine, new in zip(cache, seen, arrays, strict=True)
    )
    return LayerOutput(x=x_BTD, cache=written, sums=tuple(Sums() for _ in blocks))


def _weights(block: Block) -> LayerWeights:
    """One layer's: a block is a stack of one."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, GroupedAttention), "check_whole"
    assert isinstance(mlp, Mlp), "check_whole"

    def matrix(layer: Projection | None, contracted: int = 1) -> jax.Array | QuantizedWeight:
        assert layer is not None, "packed"
        weight = jax.tree.map(lambda leaf: leaf[0], layer.weight.get_value())
        if layer.adapter is not None:
            raise UnsupportedError(
                "whole layers with adapters: merge them first, or leave whole_layers=False"
            )
        if isinstance(weight, QuantizedWeight):
            return weight
        return weight.reshape(int(np.prod(weight.shape[:contracted])), -1)

    def norm(layer: Norm) -> RmsNorm:
        config = layer.config
        return RmsNorm(
            scale=layer.scale[...][0], epsilon=config.epsilon, offset=config.scale_offset
        )

    return LayerWeights(
        attention_norm=norm(block.attention_norm),
        qkv=matrix(attention.packed),
        out=matrix(attention.out, 2),
        mlp_norm=norm(block.mlp_norm),
        gate_up=matrix(mlp.packed),
        down=matrix(mlp.down),
    )
