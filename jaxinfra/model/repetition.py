"""A repetition of a stack's pattern as a function, and which of its blocks multiply in 8 bits.

Dims: B batch, T position, D model width.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfra.axes import LAYERS
from jaxinfra.config.model import ModelConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.block import Block
from jaxinfra.model.cache import Cache, after_pass, in_layer, updated
from jaxinfra.model.execution import Execution
from jaxinfra.model.experts import Experts
from jaxinfra.model.passes import LayerOutput, Pass
from jaxinfra.model.projection import Projection
from jaxinfra.model.recomputation import repeats_in_body
from jaxinfra.model.rope import RopeTable
from jaxinfra.numerics.policy import Policy

type KVCache = tuple[Cache, ...]
"""One entry for each distinct block, of all its repetitions."""
type InEightBits = tuple[bool, ...]
"""Flags of a repetition: whether each block of the pattern computes in 8 bits by its sites'
recipes."""


def stacked_layers[M: nnx.Module](
    make: Callable[[nnx.Rngs], M], *, num_layers: int, rngs: nnx.Rngs
) -> M:
    """Builds ``num_layers`` modules from independent keys and stacks their parameters.

    The result is not callable as one layer: split it and scan over the leading dim.
    """

    def split(key: jax.Array) -> tuple[nnx.GraphDef[M], nnx.State]:
        return nnx.split(make(nnx.Rngs(params=key)))

    graphdef, stacked = jax.vmap(split)(jax.random.split(rngs.params(), num_layers))
    module = nnx.merge(graphdef, stacked)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and "axes" in node.get_metadata():
            node.set_metadata(axes=(LAYERS, *node.axes))
    return module


def in_eight_bits(config: ModelConfig, policy: Policy, places: slice) -> list[InEightBits]:
    """Returns, for each repetition of a stack, which of its blocks multiply in 8 bits.

    Args:
        places: indices of the pattern's blocks among the model's blocks.
    """
    count = config.num_layers
    found = {at: policy.in_eight_bits(i, count) for i, at in enumerate(config.layer_positions)}
    blocks = range(places.start, places.stop)
    return [
        tuple(found[block, repeat] for block in blocks)
        for repeat in range(config.repeats[places.start])
    ]


def check_recipes(config: ModelConfig, execution: Execution) -> None:
    """Raises ConfigError if layers of one loop body would need different matmul formats."""
    first, last = execution.policy.out_of_eight_bits
    named = f"first_layers_out={first}, last_layers_out={last}"
    unroll = execution.recomputation.unroll
    if first + last > config.num_layers:
        raise ConfigError(
            f"{named} of fp8 are more than the model's {config.num_layers} layers; name as many "
            "as stay out of 8 bits"
        )
    start = 0
    for stack in config.stacks:
        places = slice(start, start + len(stack.pattern))
        start = places.stop
        kinds = set(in_eight_bits(config, execution.policy, places))
        if len(kinds) > 1 and repeats_in_body(stack, unroll) < stack.repeats:
            layers = stack.repeats * len(stack.pattern)
            raise ConfigError(
                f"{named} of fp8 with training.unroll={unroll}: the {layers} layers of a "
                "stack are a loop, whose body is one program; set training.unroll to "
                f"{layers}, or give the layers that stay out of 8 bits a stack of their own"
            )


def out_of_eight_bits(block: Block) -> Block:
    """Returns a copy of a block whose projections and experts multiply in the policy's format.

    The copy keeps its records of 8-bit operands unused, since all layers of a stack must have
    equal arrays.
    """
    copy = nnx.merge(*nnx.split(block))
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Projection | Experts):
            module.recipe = module.recipe.unquantized
    return copy


def graphdefs_of(
    blocks: Sequence[Block], kind: InEightBits
) -> tuple[tuple[nnx.GraphDef[Block], ...], tuple[nnx.State, ...]]:
    """Splits blocks into their graph definitions and the parameters of all repetitions."""
    each = (
        block if is_quantized else out_of_eight_bits(block)
        for block, is_quantized in zip(blocks, kind, strict=True)
    )
    graphdefs, parameters = zip(*map(nnx.split, each), strict=True)
    return graphdefs, parameters


def repetition_of(
    graphdefs: tuple[nnx.GraphDef[Block], ...],
    given: Pass,
    *,
    ropes: Sequence[RopeTable | None],
    cache: KVCache | None,
) -> Callable[..., Any]:
    """Returns the scan step of one repetition of a block pattern, without recomputation.

    It maps ((x, cached arrays), (index, parameters, dropout keys)) to ((x, cached arrays), sums).
    In models whose layers have inputs of their own, these follow the keys.

    The cache is part of the carry, so that the loop updates one buffer in place. Scanned over, the
    whole cache would be read from one buffer and written to another.
    """

    def repetition(carry: tuple[jax.Array, list[dict[str, jax.Array]] | None], layer):
        x_BTD, stored = carry
        index, parameters, keys, *inputs = layer
        written, sums = [], []
        for i, (graphdef, rope) in enumerate(zip(graphdefs, ropes, strict=True)):
            seen = None
            if cache is not None and stored is not None:
                seen = in_layer(cache[i], stored[i], index)
            out = nnx.merge(graphdef, parameters[i])(
                x_BTD,
                dataclasses.replace(
                    given,
                    rope=rope,
                    cache=seen,
                    dropout_key=None if keys is None else keys[i],
                    input_BTP=inputs[0][i] if inputs else None,
                ),
            )
            x_BTD = out.x
            sums.append(out.sums)
            if out.cache is not None:
                written.append(out.cache.arrays)
        return (x_BTD, None if stored is None else written), tuple(sums)

    return repetition


def run_unrolled(
    x_BTD: jax.Array,
    blocks: Sequence[Block],
    kinds: Sequence[InEightBits],
    given: Pass,
    ropes: tuple[RopeTable | None, ...],
    cache: KVCache,
    inputs: tuple[Any, ...] = (),
) -> LayerOutput:
    """Computes a stack's repetitions unrolled, each with its slice of the parameters.

    Args:
        blocks, ropes, cache: the pattern's blocks, their RoPE tables and their cache.
        kinds: which blocks of each repetition multiply in 8 bits.
        inputs: layers' own inputs [repeats, pattern, B, T, P], in models that have such.
    """
    of_kind = {kind: graphdefs_of(blocks, kind) for kind in dict.fromkeys(kinds)}
    sums, after = [], []
    for index, kind in enumerate(kinds):
        graphdefs, stacks = of_kind[kind]
        mine = jax.tree.map(lambda x, i=index: jax.lax.index_in_dim(x, i, keepdims=False), stacks)
        x_BTD, cache, each = one_repetition(
            x_BTD,
            mine,
            given,
            ropes,
            cache,
            jnp.int32(index),
            tuple(each[index] for each in inputs),
            graphdefs=graphdefs,
        )
        sums.append(each)
        after.append(x_BTD)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *sums)
    cache = tuple(after_pass(each, each.arrays) for each in cache)
    return LayerOutput(x=x_BTD, cache=cache, sums=stacked, after=tuple(after))


@functools.partial(jax.jit, static_argnames=("graphdefs",))
def one_repetition(
    x_BTD: jax.Array,
    parameters: tuple[nnx.State, ...],
    given: Pass,
    ropes: tuple[RopeTable | None, ...],
    cache: KVCache,
    index: jax.Array,
    inputs: tuple[jax.Array, ...] = (),
    *,
    graphdefs: tuple[nnx.GraphDef[Block], ...],
) -> tuple[jax.Array, KVCache, tuple[Any, ...]]:
    """Computes one repetition of a block pattern; equal repetitions are traced only once.

    Returns x, the cache with the new tokens, and the sums of each block.

    Args:
        parameters: each block's parameters, without the dim of repetitions.
        index: number of the repetition in its stack, int32.
        inputs: layers' own inputs [pattern, B, T, P], in models that have such.
    """
    step = repetition_of(graphdefs, given, ropes=ropes, cache=cache)
    carry, layer = (x_BTD, [each.arrays for each in cache]), (index, parameters, None, *inputs)
    (x_BTD, stored), sums = step(carry, layer)
    written = zip(cache, stored, strict=True)
    return x_BTD, tuple(updated(each, arrays) for each, arrays in written), sums
