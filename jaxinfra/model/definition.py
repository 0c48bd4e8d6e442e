"""The decoder as a pure function of its parameters, for training, checkpoints and meshes.

Parameters are a nested dict of arrays; paths such as ``blocks/0/mlp/up/weight`` name them
everywhere (checkpoints, tables, weight maps).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxinfra.axes import Dims
from jaxinfra.config.finetune import AdapterKind, LoraConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.model.adapters import add_adapters
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import ModelState, Sums
from jaxinfra.numerics.policy import unquantized
from jaxinfra.ops.quantized import QuantizedWeight

type Parameters = dict[Any, Any]
"""Nested dict with arrays at the leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterInfo:
    """Description of one parameter array, which stacks the values of all layers that have it."""

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    dims: Dims
    active: float = 1.0  # fraction that one token uses; below 1 for routed experts
    matmul: bool = False  # whether it is the weight of a matmul, not a lookup table or a scale
    trained: bool = True  # False: frozen, or state
    is_parameter: bool = True  # False: state, which a rule changes instead of the optimizer
    contracted: int = 0  # number of input dims of a projection that may be quantized; else 0

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """A model's structure without values: initializes parameters, or binds them into a Decoder.

    Some parameters may be frozen. ``bind`` adds their values; other methods return the trained
    parameters only, unless they say otherwise. So the optimizer and checkpoints never see frozen
    parameters.

    A model may also have state (``model.passes.ModelState``). State is a separate tree with other
    paths than the parameters'; ``bind`` takes both trees merged.
    """

    config: ModelConfig
    execution: Execution
    graphdef: nnx.GraphDef[Decoder]
    template: nnx.State
    lora: LoraConfig | None = None
    frozen: Parameters = dataclasses.field(default_factory=dict)  # shapes, or arrays to bind

    def freeze(self, frozen: Parameters) -> "ModelDefinition":
        """Returns the model with these parameters frozen, so that ``bind`` takes the others."""
        return dataclasses.replace(self, frozen=frozen)

    @property
    def drops_out(self) -> bool:
        """Tells whether training needs a key of dropout, for the model's layers or its adapters."""
        adapters = 0.0 if self.lora is None else self.lora.dropout
        return self.config.dropout_rate > 0.0 or adapters > 0.0

    @property
    def unquantized(self) -> "ModelDefinition":
        """Returns the model without 8-bit matmuls and without their state, for evaluation."""
        policy = unquantized(self.execution.policy)
        if policy == self.execution.policy:
            return self
        execution = dataclasses.replace(self.execution, policy=policy)
        return define_model(self.config, execution, lora=self.lora).freeze(self.frozen)

    def initialize(self, key: jax.Array, *, beside: Parameters | None = None) -> Parameters:
        """Samples initial parameters from a typed PRNG key.

        Args:
            beside: values of the frozen parameters, from which DoRA computes initial magnitudes.
        """
        is_measured = self.lora is not None and self.lora.kind is AdapterKind.DORA
        assert beside or not (is_measured and self.frozen), "DoRA begins at the base's own norms"
        drawn = self._drawn(key, nnx.Param, beside if is_measured else None)
        return without(drawn, self.frozen)

    def initial_state(self) -> Parameters:
        """Returns the model's state before the first step; it does not depend on a PRNG key."""
        return self._drawn(jax.random.key(0), ModelState) if self.state_shapes else {}

    def _drawn(
        self, key: jax.Array, kind: type[nnx.Variable], beside: Parameters | None = None
    ) -> Parameters:
        rngs = nnx.Rngs(params=key)
        model = _build(self.config, self.execution, self.lora, rngs, beside=beside)
        return nnx.to_pure_dict(nnx.filter_state(nnx.split(model)[1], kind))

    def bind(self, tree: Parameters) -> Decoder:
        """Makes a Decoder from a tree of parameters and state; frozen parameters are added."""
        state = jax.tree.map(lambda leaf: leaf, self.template)
        nnx.replace_by_pure_dict(state, merged(self.frozen, tree))
        return nnx.merge(self.graphdef, state)

    def next_state(self, state: Parameters, sums: Any, emitted: Parameters) -> Parameters:
        """Returns the model's state after a step; each array is updated by its own rule.

        Args:
            sums: ``sums`` of ``Decoder.run``, combined over the whole batch; after them those of
                multi-token prediction, if it took part.
            emitted: cotangents of the state from the backward pass: ``Gradients.state``.
        """
        template = nnx.to_flat_state(nnx.filter_state(self.template, ModelState))
        after, values, emissions = {}, flatten_dict(state), flatten_dict(emitted)
        for path, variable in template:
            rule = variable.get_metadata()["rule"]
            value, given = values[path], emissions[path]
            if path[0] == "blocks":
                after[path] = jax.vmap(rule)(value, sums[path[1]], given)
            elif path[:2] == ("mtp", "block"):
                is_run = len(sums) > len(self.config.blocks)
                after[path] = jax.vmap(rule)(value, sums[-1], given) if is_run else value
            else:
                after[path] = rule(value, Sums(), given)
        return nest(after)

    @property
    def shapes(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of every trained parameter."""
        return without(self._of(nnx.Param, lambda variable: variable.get_value()), self.frozen)

    @property
    def dims(self) -> Parameters:
        """Logical dims of every trained parameter, in the structure of ``shapes``."""
        return without(
            self._of(nnx.Param, lambda variable: DimsLeaf(variable.get_metadata()["axes"])),
            self.frozen,
        )

    def as_read(self, parameters: Parameters) -> Parameters:
        """Casts parameters to the dtypes in which layers read them; gradients have these too."""

        def dtype(variable: nnx.Variable) -> jnp.dtype:
            return variable.get_metadata().get("read_as") or variable.get_value().dtype

        dtypes = without(self._of(nnx.Param, dtype), self.frozen)
        return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), parameters, dtypes)

    @property
    def state_shapes(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of every array of the model's state."""
        return self._of(ModelState, lambda variable: variable.get_value())

    @property
    def state_dims(self) -> Parameters:
        """Logical dims of the model's state, in the structure of ``state_shapes``."""
        return self._of(ModelState, lambda variable: DimsLeaf(variable.get_metadata()["axes"]))

    @property
    def arrays(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of parameters and state: all arrays in the model's files."""
        return merged(self.shapes, self.state_shapes)

    def _of(self, kind: type[nnx.Variable], read: Callable[[nnx.Variable], Any]) -> Parameters:
        variables = nnx.to_flat_state(nnx.filter_state(self.template, kind))
        return nest({path: read(variable) for path, variable in variables})

    def table(self) -> tuple[ParameterInfo, ...]:
        """Describes every array of the model: trained parameters, frozen parameters and state."""
        rows = []
        frozen = set(by_path(self.frozen, is_leaf=is_weight))
        for parts, variable in nnx.to_flat_state(self.template):
            path, leaf, metadata = (
                "/".join(map(str, parts)),
                variable.get_value(),
                variable.get_metadata(),
            )
            rows.append(
                ParameterInfo(
                    path=path,
                    shape=leaf.shape,
                    dtype=leaf.dtype,
                    dims=metadata["axes"],
                    active=metadata.get("active", 1.0),
                    matmul=metadata.get("matmul", False),
                    trained=isinstance(variable, nnx.Param) and path not in frozen,
                    is_parameter=isinstance(variable, nnx.Param),
                    contracted=metadata.get("contracted", 0),
                )
            )
        return tuple(rows)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, frozen ones included."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.template))

    @property
    def num_frozen(self) -> int:
        """Number of elements of the frozen parameters."""
        leaves = jax.tree.leaves(self.frozen, is_leaf=is_weight)
        return sum(math.prod(leaf.shape) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class DimsLeaf:
    """Logical dims of one parameter as a leaf, since JAX would descend into a plain tuple."""

    dims: Dims


def define_model(
    config: ModelConfig, execution: Execution, *, lora: LoraConfig | None = None
) -> ModelDefinition:
    """Defines the model of a config by tracing its constructor; no parameter is allocated.

    Args:
        lora: adapters to add to projections; the result has no frozen parameters yet.
    """
    graphdef, template = jax.eval_shape(
        lambda: nnx.split(_build(config, execution, lora, nnx.Rngs(params=0)))
    )
    return ModelDefinition(
        config=config, execution=execution, graphdef=graphdef, template=template, lora=lora
    )


def _build(
    config: ModelConfig,
    execution: Execution,
    lora: LoraConfig | None,
    rngs: nnx.Rngs,
    *,
    beside: Parameters | None = None,
) -> Decoder:
    model = Decoder(config, execution=execution, rngs=rngs)
    if beside:
        state = nnx.state(model)
        nnx.replace_by_pure_dict(state, beside)
        nnx.update(model, state)
    if lora is not None:
        add_adapters(model, lora, rngs=rngs)
    return model


def by_path(tree: Parameters, *, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Flattens nested parameters to a dict by path, such as ``blocks/0/mlp/up/weight``.

    Args:
        is_leaf: ``is_weight`` to keep a quantized weight as one leaf, instead of its arrays.
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    }


def is_weight(leaf: Any) -> bool:
    """Tells whether a leaf is a quantized weight, which consists of several arrays."""
    return isinstance(leaf, QuantizedWeight)


nest = unflatten_dict
"""Builds a nested dict from a flat dict whose keys are paths: tuples of names."""


def merged(first: Parameters, second: Parameters) -> Parameters:
    """Merges two nested dicts of parameters that have no parameter in common."""
    return nest(flatten_dict(first) | flatten_dict(second))


def only(tree: Parameters, others: Parameters) -> Parameters:
    """Returns the parameters of ``tree`` whose paths are also in ``others``."""
    paths = flatten_dict(others).keys()
    return nest({path: leaf for path, leaf in flatten_dict(tree).items() if path in paths})


def without(parameters: Parameters, others: Parameters) -> Parameters:
    """Returns the parameters whose paths are not in ``others``."""
    paths = flatten_dict(others).keys()
    return nest(
        {path: leaf for path, leaf in flatten_dict(parameters).items() if path not in paths}
    )
