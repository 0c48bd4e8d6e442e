"""The decoder as a pure function of its parameters: what training, checkpoints and meshes handle.

Parameters are a nested dict of arrays; paths such as ``blocks/0/mlp/up/weight`` name them
everywhere (checkpoints, tables, weight maps).
"""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.core.axes import Dims
from jaxinfra.layers.execution import Execution
from jaxinfra.models.adapters import add_adapters
from jaxinfra.models.decoder import Decoder

type Parameters = dict[Any, Any]
"""Nested dict with arrays at the leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """Structure without values: initializes parameters, or binds them into a Decoder.

    Some parameters may be frozen: ``bind`` supplies them, and everything else here is about the
    others. So what trains, places or saves a model's parameters sees the trained ones only.
    """

    config: ModelConfig
    execution: Execution
    graphdef: nnx.GraphDef[Decoder]
    template: nnx.State
    lora: LoraConfig | None = None
    frozen: Parameters = dataclasses.field(default_factory=dict)  # shapes, or arrays to bind

    def freeze(self, frozen: Parameters) -> "ModelDefinition":
        """The same model with these parameters frozen; their values are needed to bind others."""
        return dataclasses.replace(self, frozen=frozen)

    def initialize(self, key: jax.Array) -> Parameters:
        """Draws parameters from a typed PRNG key."""
        model = _build(self.config, self.execution, self.lora, nnx.Rngs(params=key))
        return _without(nnx.to_pure_dict(nnx.split(model)[1]), self.frozen)

    def bind(self, parameters: Parameters) -> Decoder:
        """A Decoder that holds these parameters, and the frozen ones."""
        state = jax.tree.map(lambda leaf: leaf, self.template)
        nnx.replace_by_pure_dict(state, merged(self.frozen, parameters))
        return nnx.merge(self.graphdef, state)

    @property
    def shapes(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of every parameter."""
        return _without(nnx.to_pure_dict(self.template), self.frozen)

    @property
    def dims(self) -> Parameters:
        """Logical dims of every parameter, in the structure of ``shapes``."""
        named = jax.tree.map(
            lambda param: DimsLeaf(param.axes),
            self.template,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        return _without(nnx.to_pure_dict(named), self.frozen)

    @property
    def num_parameters(self) -> int:
        """Elements over all parameters, the frozen ones too."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.template))

    @property
    def num_frozen(self) -> int:
        """Elements over those that are frozen."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.frozen))


@dataclasses.dataclass(frozen=True)
class DimsLeaf:
    """Logical dims of one parameter, wrapped so that a tree of them has no tuples to descend."""

    dims: Dims


def define_model(
    config: ModelConfig, execution: Execution, *, lora: LoraConfig | None = None
) -> ModelDefinition:
    """Traces the constructor abstractly: no parameter is allocated.

    Args:
        lora: adapters to put beside projections; nothing is frozen yet.
    """
    model = nnx.eval_shape(lambda: _build(config, execution, lora, nnx.Rngs(params=0)))
    graphdef, template = nnx.split(model)
    return ModelDefinition(
        config=config, execution=execution, graphdef=graphdef, template=template, lora=lora
    )


def _build(
    config: ModelConfig, execution: Execution, lora: LoraConfig | None, rngs: nnx.Rngs
) -> Decoder:
    model = Decoder(config, execution=execution, rngs=rngs)
    if lora is not None:
        add_adapters(model, lora, rngs=rngs)
    return model


def merged(first: Parameters, second: Parameters) -> Parameters:
    """All parameters of two nested dicts that share none."""
    result = dict(first)
    for name, value in second.items():
        result[name] = merged(result[name], value) if name in result else value
    return result


def _without(parameters: Parameters, others: Parameters) -> Parameters:
    """The parameters that are not among ``others``."""
    result = {}
    for name, value in parameters.items():
        if name not in others:
            result[name] = value
        elif isinstance(value, dict) and (rest := _without(value, others[name])):
            result[name] = rest
    return result
