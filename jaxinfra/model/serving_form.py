"""The decoder's form for serving: unrolled layers, and projections of one input packed as one.

Training scans over layers with stacked parameters, so that only one layer is compiled. In a decode
step, which is bound by memory, such a loop doubles the time. The host launches each iteration, and
each weight is copied out of its stack before a library multiplies with it. Here the step is one
unrolled program. Queries, keys and values are one matmul, with the gate of outputs and the numbers
of a gated delta layer's heads if all are as wide. So are gate and up. Parameters and caches stay
stacked: kernels read their slice in place, and the host passes 14 arrays per step of a 1B model
instead of 134.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra import axes
from jaxinfra.axes import Dims
from jaxinfra.config.kinds import Head
from jaxinfra.config.model import GroupedAttentionConfig, ModelConfig
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import (
    ModelDefinition,
    Parameters,
    by_path,
    define_model,
    is_weight,
    nest,
)
from jaxinfra.model.execution import Execution, Place
from jaxinfra.ops.quantized import (
    QuantizedWeight,
    are_alike,
    as_kernels_read,
    concatenated_columns,
    packed_as_kernels_read,
)

COMPILER_OPTIONS = {
    # A weight is cut out of its stack by the call that reads it. Triton's products would cut it
    # themselves, each layer's a kernel of its own that is tuned on a copy of the whole stack.
    "xla_gpu_enable_triton_gemm": False,
    # Products of one input would be one, of a concatenation that only Triton's do not write out.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # It counts pools that are updated in place once for each layer, and computed products twice for
    # want of memory that nobody needs.
    "xla_disable_hlo_passes": "rematerialization",
}
"""XLA options that programs of this form are compiled with; only GPUs read them."""

_PACKED = {
    "attention": (("query", "key", "value", "gate", "out_gate"), -2, axes.Q_HEADS),
    "mlp": (("gate", "up"), -1, axes.MLP),
}
"""Layers' projections that ``packed`` concatenates, of those that the layer has and does not keep
apart, and the weights' dim of concatenation: counted from the end as in biases, and its logical
name. Each device's columns of all of them are together.
"""
_NUMBERS = ("beta", "decay")
"""Projections onto a number per head, whose columns come behind those of attention's heads."""


def serving_form(definition: ModelDefinition, execution: Execution) -> ModelDefinition:
    """Returns the definition of the same model for serving, with layers unrolled in a decode step.

    Args:
        execution: an execution with a ``decode_form``; if that is ``packed``, projections of the
            same input are one weight.

    Raises:
        UnsupportedError: a model with adapters.
    """
    if definition.lora is not None:
        raise UnsupportedError(
            "the serving form of a model with adapters: its projections are packed; merge the "
            "adapters first (jaxinfra convert)"
        )
    assert execution.decode_form is not None, "execution_on(decode_form=...)"
    return define_model(definition.config, execution)


def serving_parameters(
    form: ModelDefinition, parameters: Parameters, *, consumes: bool = False
) -> Parameters:
    """Converts a model's parameters and state for the serving form's ``bind``: packs projections,
    and casts weights as ``with_read_weights`` does.

    On one device, quantized weights are also reordered for its kernel.

    Args:
        form: definition from ``serving_form``.
        parameters: parameters and state for ``bind`` of the original definition.
        consumes: whether to free each input array once it is converted. Peak memory is then the
            parameters plus the largest packed stack.
    """
    sources, dims = by_path(parameters, is_leaf=is_weight), by_path(form.dims)
    place = form.execution.place
    result: dict[tuple[str, ...], jax.Array | QuantizedWeight] = {}
    kept_apart = by_path(form.arrays)
    compute, is_read = form.execution.policy.compute, _read_in_compute_dtype(form)
    for path in kept_apart:
        *parents, name, last = path.split("/")
        if name == "packed":
            names, dim, sharded = _PACKED[parents[-1]]
            paths = ["/".join([*parents, each, last]) for each in names]
            parts = [sources[each] for each in paths if each in sources and each not in kept_apart]
            shards = place.shards(sharded)
            if form.execution.multiply.few_rows and isinstance(parts[0], QuantizedWeight):
                weight = packed_as_kernels_read(parts, axis=dim)
            else:
                weight = _packed(parts, dim=dim, shards=shards, place=place, dims=dims[path].dims)
            numbers = ["/".join([*parents, each, last]) for each in _NUMBERS]
            numbers = [each for each in numbers if each in sources and each not in kept_apart]
            if parents[-1] == "attention" and numbers:
                weight = _with_numbers(weight, [sources[each] for each in numbers])
                parts += [sources[each] for each in numbers]
        else:
            parts = [sources[path]]
            weight = parts[0]
        if path in is_read:
            weight = _read(weight, compute)
        if isinstance(weight, QuantizedWeight) and form.execution.multiply.few_rows:
            weight = as_kernels_read(weight)
        result[*parents, name, last] = weight
        if consumes:
            kept = {id(leaf) for leaf in jax.tree.leaves(weight)}
            for leaf in jax.tree.leaves(parts):
                if id(leaf) not in kept:
                    leaf.delete()
    return nest(result)


def with_read_weights(definition: ModelDefinition, parameters: Parameters) -> Parameters:
    """Casts weights to the compute dtype in which layers read them; results are equal.

    Weights that training stores in fp32 are then half as many bytes to hold and to read.

    Args:
        parameters: those of ``definition``; quantized ones are returned as they are.
    """
    compute, is_read = definition.execution.policy.compute, _read_in_compute_dtype(definition)

    def read(path: Any, leaf: jax.Array | QuantizedWeight) -> jax.Array | QuantizedWeight:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _read(leaf, compute) if name in is_read else leaf

    return jax.tree_util.tree_map_with_path(read, parameters, is_leaf=is_weight)


def _read_in_compute_dtype(definition: ModelDefinition) -> set[str]:
    """Paths of projections, experts and tables; a router and a reward model's head read more."""
    names = ("table", "gate", "up", "down") if definition.config.head is Head.LOGITS else ()
    rows = [row for row in definition.table() if row.is_parameter]
    return {row.path for row in rows if row.contracted or row.path.split("/")[-1] in names}


def _read(weight: jax.Array | QuantizedWeight, dtype: jnp.dtype) -> jax.Array | QuantizedWeight:
    if isinstance(weight, QuantizedWeight) or weight.dtype == dtype:
        return weight
    return weight.astype(dtype)


def can_pack(parameters: Parameters, config: ModelConfig, place: Place) -> bool:
    """Tells whether projections of one input can be packed; quantized ones need equal formats.

    Over several devices quantized weights cannot, nor heads that are copied for want of as many.
    """
    weights = by_path(parameters, is_leaf=is_weight)
    if place.shards(axes.Q_HEADS) > 1:
        mixers = [block.mixer for block in config.blocks]
        heads = [m.num_kv_heads for m in mixers if isinstance(m, GroupedAttentionConfig)]
        if any(place.copies(axes.KV_HEADS, each) > 1 for each in heads):
            return False
        if any(isinstance(weight, QuantizedWeight) for weight in weights.values()):
            return False
    for path, weight in weights.items():
        *parents, layer, name, last = ("", "", *path.split("/"))
        names, *_ = _PACKED.get(layer, ((),))
        if isinstance(weight, QuantizedWeight) and name in names:
            beside = ("/".join([*parents[2:], layer, each, last]) for each in names)
            if not are_alike([weights[each] for each in beside if each in weights]):
                return False
    return True


def are_arrays(parameters: Parameters) -> bool:
    """Tells whether no weight is quantized."""
    weights = jax.tree.leaves(parameters, is_leaf=is_weight)
    return not any(isinstance(weight, QuantizedWeight) for weight in weights)


@jax.jit
def _with_numbers(weight: jax.Array, parts: list[jax.Array]) -> jax.Array:
    """Adds weights [..., D, M] to one of heads [..., D, N, H], as as many heads as they fill."""
    both, width = jnp.concatenate(parts, axis=-1).astype(weight.dtype), weight.shape[-1]
    ends = [(0, 0)] * (both.ndim - 1) + [(0, -both.shape[-1] % width)]
    heads = jnp.pad(both, ends).reshape(*both.shape[:-1], -1, width)
    return jnp.concatenate([weight, heads], axis=-2)


@functools.partial(jax.jit, static_argnames=("dim", "shards", "place", "dims"))
def _packed(
    parts: list[jax.Array | QuantizedWeight], *, dim: int, shards: int, place: Place, dims: Dims
) -> jax.Array | QuantizedWeight:
    """Concatenates the shards of all parts, shard after shard, in this dim."""
    quantized = [each for each in parts if isinstance(each, QuantizedWeight)]
    if quantized:
        assert len(quantized) == len(parts), "can_pack"
        return concatenated_columns(quantized, axis=dim)
    arrays = [each for each in parts if isinstance(each, jax.Array)]
    if shards == 1:
        return jnp.concatenate(arrays, axis=dim)
    dim += arrays[0].ndim
    split = [x.reshape(*x.shape[:dim], shards, -1, *x.shape[dim + 1 :]) for x in arrays]
    both = jnp.concatenate(split, axis=dim + 1)
    return place(both.reshape(*both.shape[:dim], -1, *both.shape[dim + 2 :]), dims)
