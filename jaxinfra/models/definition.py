"""The decoder as a pure function of its parameters: what training, checkpoints and meshes handle.

Parameters are a nested dict of arrays; paths such as ``blocks/0/mlp/up/weight`` name them
everywhere (checkpoints, tables, weight maps).
"""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from jaxinfra.config.model import ModelConfig
from jaxinfra.core.axes import Dims
from jaxinfra.layers.execution import Execution
from jaxinfra.models.decoder import Decoder

type Parameters = dict[Any, Any]
"""Nested dict with arrays at the leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """Structure without values: initializes parameters, or binds them into a Decoder."""

    config: ModelConfig
    execution: Execution
    graphdef: nnx.GraphDef[Decoder]
    template: nnx.State

    def initialize(self, key: jax.Array) -> Parameters:
        """Draws parameters from a typed PRNG key."""
        model = Decoder(self.config, execution=self.execution, rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.split(model)[1])

    def bind(self, parameters: Parameters) -> Decoder:
        """A Decoder that holds these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self.template)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(self.graphdef, state)

    @property
    def shapes(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of every parameter."""
        return nnx.to_pure_dict(self.template)

    @property
    def dims(self) -> Parameters:
        """Logical dims of every parameter, in the structure of ``shapes``."""
        named = jax.tree.map(
            lambda param: DimsLeaf(param.axes),
            self.template,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        return nnx.to_pure_dict(named)

    @property
    def num_parameters(self) -> int:
        """Elements over all parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes))


@dataclasses.dataclass(frozen=True)
class DimsLeaf:
    """Logical dims of one parameter, wrapped so that a tree of them has no tuples to descend."""

    dims: Dims


def define_model(config: ModelConfig, execution: Execution) -> ModelDefinition:
    """Traces the constructor abstractly: no parameter is allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, execution=execution, rngs=nnx.Rngs(params=0)))
    graphdef, template = nnx.split(model)
    return ModelDefinition(config=config, execution=execution, graphdef=graphdef, template=template)
