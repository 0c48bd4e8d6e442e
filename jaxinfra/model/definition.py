"""The decoder as a pure function of its parameters: what training, checkpoints and meshes handle.

Parameters are a nested dict of arrays; paths such as ``blocks/0/mlp/up/weight`` name them
everywhere (checkpoints, tables, weight maps).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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
    """One array of a model, in all layers that have it."""

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    dims: Dims
    active: float = 1.0  # share of it that a token is multiplied with
    matmul: bool = False  # whether activations are multiplied with it, not looked up or scaled
    trained: bool = True  # False: frozen, or changed by a rule
    is_parameter: bool = True  # False: state, which is changed by a rule
    contracted: int = 0  # of a projection that may be kept in few bits: dims of its inputs

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """Structure without values: initializes parameters, or binds them into a Decoder.

    Some parameters may be frozen: ``bind`` supplies them, and everything else here is about the
    others. So what trains, places or saves a model's parameters sees the trained ones only.

    Beside parameters a model may have state (``layers.passes.ModelState``): a tree of its own,
    without paths in common, which ``bind`` takes merged with the parameters.
    """

    config: ModelConfig
    execution: Execution
    graphdef: nnx.GraphDef[Decoder]
    template: nnx.State
    lora: LoraConfig | None = None
    frozen: Parameters = dataclasses.field(default_factory=dict)  # shapes, or arrays to bind

    def freeze(self, frozen: Parameters) -> "ModelDefinition":
        """Returns the model with these parameters frozen; ``bind`` of others needs their values."""
        return dataclasses.replace(self, frozen=frozen)

    @property
    def unquantized(self) -> "ModelDefinition":
        """Returns the model without matmuls in 8 bits, nor their state: for evaluation."""
        policy = unquantized(self.execution.policy)
        if policy == self.execution.policy:
            return self
        execution = dataclasses.replace(self.execution, policy=policy)
        return define_model(self.config, execution, lora=self.lora).freeze(self.frozen)

    def initialize(self, key: jax.Array, *, beside: Parameters | None = None) -> Parameters:
        """Draws parameters from a typed PRNG key.

        Args:
            beside: the frozen ones' values, by which the magnitudes of DoRA begin.
        """
        is_measured = self.lora is not None and self.lora.kind is AdapterKind.DORA
        assert beside or not (is_measured and self.frozen), "DoRA begins at the base's own norms"
        drawn = self._drawn(key, nnx.Param, beside if is_measured else None)
        return without(drawn, self.frozen)

    def initial_state(self) -> Parameters:
        """The state before the first step: what layers give it, which no key decides."""
        return self._drawn(jax.random.key(0), ModelState) if self.state_shapes else {}

    def _drawn(
        self, key: jax.Array, kind: type[nnx.Variable], beside: Parameters | None = None
    ) -> Parameters:
        rngs = nnx.Rngs(params=key)
        model = _build(self.config, self.execution, self.lora, rngs, beside=beside)
        return nnx.to_pure_dict(nnx.filter_state(nnx.split(model)[1], kind))

    def bind(self, tree: Parameters) -> Decoder:
        """A Decoder that holds these parameters and this state, and the frozen ones."""
        state = jax.tree.map(lambda leaf: leaf, self.template)
        nnx.replace_by_pure_dict(state, merged(self.frozen, tree))
        return nnx.merge(self.graphdef, state)

    def next_state(self, state: Parameters, sums: Any, emitted: Parameters) -> Parameters:
        """The state after a step, each array by its own rule.

        Args:
            sums: of ``Decoder.run``, complete over the batch.
            emitted: cotangents by the state, as ``Gradients.state``.
        """
        template = nnx.to_flat_state(nnx.filter_state(self.template, ModelState))
        after = {}
        for path, variable in template:
            rule = variable.get_metadata()["rule"]
            value, given = _at(state, path), _at(emitted, path)
            if path[0] == "blocks":
                after[path] = jax.vmap(rule)(value, sums[path[1]], given)
            else:
                after[path] = rule(value, Sums(), given)
        return nest(after)

    @property
    def shapes(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of every parameter."""
        return without(self._of(nnx.Param, lambda variable: variable.get_value()), self.frozen)

    @property
    def dims(self) -> Parameters:
        """Logical dims of every parameter, in the structure of ``shapes``."""
        return without(
            self._of(nnx.Param, lambda variable: DimsLeaf(variable.get_metadata()["axes"])),
            self.frozen,
        )

    def as_read(self, parameters: Parameters) -> Parameters:
        """Parameters in the dtypes that layers round them to before anything else, and hand their
        gradients on in; as they are where a layer reads more of them.
        """

        def dtype(variable: nnx.Variable) -> jnp.dtype:
            return variable.get_metadata().get("read_as") or variable.get_value().dtype

        dtypes = without(self._of(nnx.Param, dtype), self.frozen)
        return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), parameters, dtypes)

    @property
    def state_shapes(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of every array of the state."""
        return self._of(ModelState, lambda variable: variable.get_value())

    @property
    def state_dims(self) -> Parameters:
        """Logical dims of the state, in the structure of ``state_shapes``."""
        return self._of(ModelState, lambda variable: DimsLeaf(variable.get_metadata()["axes"]))

    @property
    def arrays(self) -> Parameters:
        """``jax.ShapeDtypeStruct`` of what the model's files hold: parameters and state."""
        return merged(self.shapes, self.state_shapes)

    def _of(self, kind: type[nnx.Variable], read: Callable[[nnx.Variable], Any]) -> Parameters:
        variables = nnx.to_flat_state(nnx.filter_state(self.template, kind))
        return nest({path: read(variable) for path, variable in variables})

    def table(self) -> tuple[ParameterInfo, ...]:
        """Every array of the model: parameters, frozen ones too, and state."""
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
        """Elements over all parameters, the frozen ones too."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.template))

    @property
    def num_frozen(self) -> int:
        """Elements over those that are frozen."""
        leaves = jax.tree.leaves(self.frozen, is_leaf=is_weight)
        return sum(math.prod(leaf.shape) for leaf in leaves)


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
    """Leaves of nested parameters by path, such as ``blocks/0/mlp/up/weight``.

    Args:
        is_leaf: ``is_weight`` for quantized weights as a whole, not their parts.
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    }


def is_weight(leaf: Any) -> bool:
    """Whether this is a quantized weight, in the place of an array."""
    return isinstance(leaf, QuantizedWeight)


def nest(leaves: Mapping[tuple[Any, ...], Any]) -> Parameters:
    """A nested dict from leaves by their keys."""
    result: Parameters = {}
    for (*parents, last), leaf in leaves.items():
        node = result
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return result


def _at(tree: Parameters, path: tuple[Any, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def merged(first: Parameters, second: Parameters) -> Parameters:
    """All parameters of two nested dicts that share none."""
    result = dict(first)
    for name, value in second.items():
        result[name] = merged(result[name], value) if name in result else value
    return result


def only(tree: Parameters, others: Parameters) -> Parameters:
    """Returns the part of a nested dict that ``others`` has too."""
    result = {}
    for name, value in tree.items():
        if name in others and isinstance(value, dict):
            if inner := only(value, others[name]):
                result[name] = inner
        elif name in others:
            result[name] = value
    return result


def without(parameters: Parameters, others: Parameters) -> Parameters:
    """The parameters that are not among ``others``."""
    result = {}
    for name, value in parameters.items():
        if name not in others:
            result[name] = value
        elif isinstance(value, dict) and (rest := without(value, others[name])):
            result[name] = rest
    return result
