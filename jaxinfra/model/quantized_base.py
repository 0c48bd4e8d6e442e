"""Quantized frozen projections, with trained adapters (Dettmers et al. 2023, QLoRA)."""

import dataclasses
import math
from typing import Any

import jax

from jaxinfra.config.finetune import BaseWeights
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters, nest
from jaxinfra.ops.quantized import (
    QuantizedWeight,
    WeightCode,
    WeightFormat,
    double_quantized,
    round_weight,
)

_BLOCK = 64  # inputs that share a scale, as in the paper
_FORMATS = {
    BaseWeights.NF4: WeightFormat(code=WeightCode.NF4, group_rows=_BLOCK),
    BaseWeights.NF4_DOUBLE: WeightFormat(code=WeightCode.NF4, group_rows=_BLOCK),
    BaseWeights.INT4: WeightFormat(code=WeightCode.INT4, group_rows=_BLOCK),
    BaseWeights.INT8: WeightFormat(code=WeightCode.INT8),
}


def quantized_weight(weight: jax.Array, base: BaseWeights, *, num_inputs: int) -> QuantizedWeight:
    """Quantizes a projection's weight [layers, *inputs, *outputs] to the format ``base``."""
    rounded = rounded_weight(weight, base, num_inputs=num_inputs)
    if not rounds_scales(base):
        return rounded
    return dataclasses.replace(rounded, scales=double_quantized(rounded.scales))


def rounded_weight(weight: jax.Array, base: BaseWeights, *, num_inputs: int) -> QuantizedWeight:
    """Quantizes a projection's weight to the format ``base``, but leaves scales in fp32."""
    return round_weight(weight, _FORMATS[base], num_inputs=num_inputs, num_leading=1)


def rounds_scales(base: BaseWeights) -> bool:
    """Tells whether the format ``base`` stores scales in 8 bits."""
    return base is BaseWeights.NF4_DOUBLE


def base_shapes(definition: ModelDefinition, base: BaseWeights) -> Parameters:
    """Returns shapes of a model's parameters, with projections in the format ``base``.

    Embeddings, norms, biases, routers and routed experts stay as they are.

    Raises:
        ConfigError: a projection's number of inputs is no multiple of the block size.
    """
    if base is BaseWeights.COMPUTE:
        return definition.shapes
    leaves: dict[tuple[Any, ...], Any] = {}
    for row in definition.table():
        if not row.is_parameter:
            continue
        leaf: Any = jax.ShapeDtypeStruct(row.shape, row.dtype)
        if row.contracted:
            leaf = _rounded_shape(row.path, leaf, base, row.contracted)
        leaves[tuple(int(k) if k.isdigit() else k for k in row.path.split("/"))] = leaf
    return nest(leaves)


def _rounded_shape(
    path: str, leaf: jax.ShapeDtypeStruct, base: BaseWeights, num_inputs: int
) -> QuantizedWeight:
    num_rows = math.prod(leaf.shape[1 : 1 + num_inputs])
    if _FORMATS[base].group_rows and num_rows % _FORMATS[base].group_rows:
        raise ConfigError(
            f"parameter {path} has {num_rows} inputs, which do not divide into blocks of "
            f"{_FORMATS[base].group_rows}, as lora base={base} has them; take base=int8"
        )
    return jax.eval_shape(
        lambda weight: quantized_weight(weight, base, num_inputs=num_inputs), leaf
    )
