"""The decoder's form for serving: unrolled layers, and projections of one input packed as one.

Training scans over layers whose parameters are stacked, so that one layer is compiled. In a decode
step, which should only read memory, a loop costs as much again: the host launches each iteration,
and a weight is cut out of its stack before a library can multiply with it. Here
the step is one unrolled program, and queries, keys and values are one product, as gate and up are.
Parameters stay stacks, as caches do: XLA gives a kernel the part of an array that it asks for, and
the host hands over 14 arrays at every step of a 1B, not 134.
"""

import functools

import jax
import jax.numpy as jnp

from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import (
    ModelDefinition,
    Parameters,
    by_path,
    define_model,
    is_weight,
    nest,
)
from jaxinfra.model.execution import Execution
from jaxinfra.ops.quantized import QuantizedWeight, are_alike, as_kernels_read, concatenated_columns

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

_PACKED = {"attention": (("query", "key", "value"), -2), "mlp": (("gate", "up"), -1)}
"""Layers' projections that ``packed`` concatenates, and the weights' dim of concatenation, counted
from the end as in biases."""


def serving_form(definition: ModelDefinition, execution: Execution) -> ModelDefinition:
    """Returns the same model in the form that serves: unrolled layers where they have a cache.

    Args:
        execution: one with a ``decode_form``; with ``packed``, projections of one input are one
            weight.

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
    """Converts a model's parameters and state for the serving form's ``bind``: packs projections.

    Where one device serves, quantized weights are in the order in which its kernel reads them.

    Args:
        parameters: as the ``bind`` of the model that ``form`` is of takes them.
        consumes: free arrays once others have been made of them: never more is held than the
            parameters and the largest packed stack twice.
    """
    sources = by_path(parameters, is_leaf=is_weight)
    result: dict[tuple[str, ...], jax.Array | QuantizedWeight] = {}
    for path in by_path(form.arrays):
        *parents, name, last = path.split("/")
        names, dim = [name], 0
        if name == "packed":
            names, dim = _PACKED[parents[-1]]
        parts = [sources["/".join([*parents, each, last])] for each in names]
        weight = parts[0] if len(parts) == 1 else _packed(parts, dim=dim)
        if isinstance(weight, QuantizedWeight) and form.execution.multiply.few_rows:
            weight = as_kernels_read(weight)
        result[*parents, name, last] = weight
        if consumes:
            kept = {id(leaf) for leaf in jax.tree.leaves(weight)}
            for leaf in jax.tree.leaves(parts):
                if id(leaf) not in kept:
                    leaf.delete()
    return nest(result)


def can_pack(parameters: Parameters) -> bool:
    """Tells whether projections of one input can be packed; quantized ones must agree."""
    weights = by_path(parameters, is_leaf=is_weight)
    for path, weight in weights.items():
        *parents, layer, name, last = ("", "", *path.split("/"))
        names, _ = _PACKED.get(layer, ((), 0))
        if isinstance(weight, QuantizedWeight) and name in names:
            beside = ("/".join([*parents[2:], layer, each, last]) for each in names)
            if not are_alike([weights[each] for each in beside if each in weights]):
                return False
    return True


@functools.partial(jax.jit, static_argnames=("dim",))
def _packed(parts: list[jax.Array | QuantizedWeight], *, dim: int) -> jax.Array | QuantizedWeight:
    """One after another in this dim."""
    quantized = [each for each in parts if isinstance(each, QuantizedWeight)]
    if quantized:
        assert len(quantized) == len(parts), "can_pack"
        return concatenated_columns(quantized, axis=dim)
    return jnp.concatenate([each for each in parts if isinstance(each, jax.Array)], axis=dim)
