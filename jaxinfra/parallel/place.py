"""Placement maps logical dims onto the mesh: parameters, activations and batches get their
shardings here and nowhere else.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfra.axes import (
    BATCH,
    EMBED,
    EXPERTS,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    SEQUENCE,
    STREAM,
    STREAM_SEQUENCE,
    Dims,
)
from jaxinfra.config.mesh import ShardingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters
from jaxinfra.parallel.mesh import Rules, StateRules, state_rules
from jaxinfra.parallel.zigzag import zigzag_indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A mesh and the rules that map logical dims onto it."""

    mesh: Mesh | AbstractMesh  # abstract: for shapes alone
    rules: StateRules = dataclasses.field(default_factory=lambda: state_rules(ShardingConfig()))

    def spec(self, dims: Dims, rules: Rules | None = None) -> PartitionSpec:
        """The partition of a tensor with these dims; axes of size 1 are left out.

        Args:
            rules: those of parameters and activations by default.
        """
        return _partition(dims, self.sharded_axes(dims, rules))

    def sharded_axes(self, dims: Dims, rules: Rules | None) -> list[tuple[str, ...]]:
        """The mesh axes of each dim; experts' come first, other dims have what they leave."""
        found = [self.axes(dim, rules) for dim in dims]
        if EXPERTS not in dims:
            return found
        experts = found[dims.index(EXPERTS)]
        return [
            axes if dim == EXPERTS else tuple(axis for axis in axes if axis not in experts)
            for dim, axes in zip(dims, found, strict=True)
        ]

    def axes(self, dim: str | None, rules: Rules | None = None) -> tuple[str, ...]:
        """The mesh axes of more than one device that shard this dim.

        Not those that a ``shard_map`` around this trace has taken: there, they shard nothing more.
        """
        rules = self.rules.parameters if rules is None else rules
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(
            str(axis)
            for axis in rules.get(dim or "", ())
            if self.mesh.shape.get(axis, 1) > 1 and axis not in taken
        )

    def copies(self, dim: str | None, size: int, rules: Rules | None = None) -> int:
        """Counts the copies of each of ``size`` elements of a dim so that every device that shards
        it has one: key/value heads may be repeated.
        """
        shards = self._count(self.axes(dim, rules))
        return shards // size if dim == KV_HEADS and size < shards and not shards % size else 1

    def gathered_axes(self, dim: str) -> tuple[str, ...]:
        """Mesh axes that shard this dim of a parameter where it is kept, not where it is used."""
        used = self.axes(dim, self.rules.used)
        return tuple(axis for axis in self.axes(dim) if axis not in used)

    @property
    def batch_shards(self) -> int:
        """Devices that the compiler spreads the batch dim over."""
        return self._count(self.axes(BATCH))

    @property
    def head_shards(self) -> int:
        """Devices that attention's heads are spread over, as the matmuls of every layer are."""
        return self._count(self.axes(Q_HEADS))

    @property
    def sequence_shards(self) -> int:
        """Devices that the compiler spreads a sequence over, where layers mix its positions."""
        return self._count(self.axes(SEQUENCE))

    def sharding(self, dims: Dims, rules: Rules | None = None) -> NamedSharding:
        """``spec`` on this mesh, or on what a ``shard_map`` around this trace has left of it."""
        return NamedSharding(self.current_mesh, self.spec(dims, rules))

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """This mesh; within a ``shard_map`` over some of its axes, as that sees it."""
        around = jax.sharding.get_abstract_mesh()
        return around if around.manual_axes else self.mesh

    def on_each_device(
        self, function: Callable, *, in_specs: Any, out_specs: Any, check_vma: bool = True
    ) -> Callable:
        """``function`` of a device's blocks: ``shard_map`` over all axes but those that one around
        this trace has taken.

        Axes of one device too: with one left out, XLA's CPU compiler aborts on sums of bf16, and a
        custom call is the partitioner's affair.
        """
        taken = jax.sharding.get_abstract_mesh().manual_axes
        free = {axis for axis in self.mesh.axis_names if axis not in taken}
        if all(self.mesh.shape[axis] == 1 for axis in free):
            return function
        return jax.shard_map(
            function,
            mesh=self.current_mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=free,
            check_vma=check_vma,
        )

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Sharding of arrays by token: rows over the data axes, positions over the context axis."""
        return self.sharding((BATCH, SEQUENCE))

    def parameters(self, model: ModelDefinition) -> Parameters:
        """Shardings of all parameters; raises ConfigError where a dim does not divide."""
        return self._place(model, self.rules.parameters)

    def gradients(self, model: ModelDefinition) -> Parameters:
        """Shardings of the gradients while they are summed."""
        return self._place(model, self.rules.gradients)

    def updates(self, model: ModelDefinition) -> Parameters:
        """Shardings of what the optimizer works on: a share of moments, gradients, parameters."""
        return self._place(model, self.rules.optimizer)

    def summed_last(self, model: ModelDefinition, *, accumulation: int) -> tuple[str, ...]:
        """Mesh axes over which gradients are summed once, after the last micro-batch: those of the
        batch that shard no parameter's gradient.

        With one micro-batch the compiler sums each layer's gradient while the backward pass goes
        on, unless a share of the sum is all that is wanted (ZeRO 1): it would sum the whole.
        """
        sharded = self._axes_of(model, self.rules.gradients)
        over = tuple(axis for axis in self.axes(BATCH) if axis not in sharded)
        share = self._axes_of(model, self.rules.optimizer) & set(over)
        return over if accumulation > 1 or share else ()

    def _axes_of(self, model: ModelDefinition, rules: Rules) -> set[str]:
        """Mesh axes that shard some parameter."""
        dims = {dim for leaf in jax.tree.leaves(model.dims) for dim in leaf.dims}
        return {axis for dim in dims for axis in self.axes(dim, rules)}

    def _count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in names)

    def _place(self, model: ModelDefinition, rules: Rules) -> Parameters:
        return self.of_dims(model.shapes, model.dims, rules)

    def model_state(self, model: ModelDefinition) -> Parameters:
        """Shardings of what rules change: as parameters of such dims."""
        return self.of_dims(model.state_shapes, model.state_dims, self.rules.parameters)

    def of_dims(self, shapes: Parameters, dims: Parameters, rules: Rules) -> Parameters:
        """Shardings of a tree of arrays with logical dims."""

        def place(path: Any, shape: jax.ShapeDtypeStruct, leaf: Any) -> NamedSharding:
            sharded = [
                () if self.copies(dim, size, rules) > 1 else names
                for dim, size, names in zip(
                    leaf.dims, shape.shape, self.sharded_axes(leaf.dims, rules), strict=True
                )
            ]
            if LAYERS in leaf.dims:
                layers = leaf.dims.index(LAYERS)
                if shape.shape[layers] % self._count(sharded[layers]):
                    # A stack that does not divide over the stages lies there split by width.
                    if EMBED in leaf.dims:
                        sharded[leaf.dims.index(EMBED)] += sharded[layers]
                    sharded[layers] = ()
            for size, dim, names in zip(shape.shape, leaf.dims, sharded, strict=True):
                shards = self._count(names)
                if size % shards:
                    raise ConfigError(
                        f"parameter {path_name(path)}: dim {dim}={size} does not divide over "
                        f"{' x '.join(names)} = {shards} devices; choose sizes that do"
                    )
            return NamedSharding(self.current_mesh, _partition(leaf.dims, sharded))

        return jax.tree_util.tree_map_with_path(place, shapes, dims)

    def optimizer(
        self, optimizer: optax.GradientTransformation, model: ModelDefinition
    ) -> optax.OptState:
        """Returns shardings of the optimizer's state: a moment is sharded as its parameter. A
        moment of another shape, such as sums of rows or a scale, is replicated, and so are
        counters.
        """

        def placed(moment: Any, sharding: NamedSharding, parameter: Any) -> Any:
            if _is_absent(moment):
                return moment
            return sharding if moment.shape == parameter.shape else self.replicated

        return optax.tree_utils.tree_map_params(
            optimizer.init,
            placed,
            jax.eval_shape(optimizer.init, model.shapes),
            self.updates(model),
            model.shapes,
            transform_non_params=lambda _: self.replicated,
            is_leaf=_is_absent,
        )

    def constraint(self) -> "ActivationPlacement":
        """Returns ``Execution.place`` of this mesh."""
        return ActivationPlacement(self)


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationPlacement:
    """Places activations inside a traced function; equal to itself only, as layers hash it."""

    placement: Placement

    @property
    def batch_shards(self) -> int:
        """Devices that rows of a batch are spread over."""
        return self.placement.batch_shards

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Where these rows begin in the whole batch: not at 0 where devices run apart."""
        apart = self._apart
        return num_rows * jax.lax.axis_index(apart) if apart else 0

    def over_batch(self, x: jax.Array) -> jax.Array:
        """x, summed over devices that run apart, each on its own rows of the batch."""
        return jax.lax.psum(x, self._apart) if self._apart else x

    @property
    def _apart(self) -> tuple[str, ...]:
        """Axes of the batch that a ``shard_map`` around this trace has taken."""
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in self.placement.rules.parameters[BATCH] if axis in taken)

    def copies(self, dim: str | None, size: int) -> int:
        """Counts copies as ``Placement.copies`` does."""
        return self.placement.copies(dim, size)

    def places(self, num_tokens: int) -> jax.Array:
        """Places of tokens, in zig-zag order where the context axis shards sequences."""
        shards = self.placement.sequence_shards
        if shards == 1:
            return jnp.arange(num_tokens)
        return jnp.asarray(zigzag_indices(num_tokens, shards), jnp.int32)

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """x, constrained to the sharding that the rules give these dims, and where weights are
        gathered along the width to a layout that has it contiguous.

        A weight arrives from an all-gather with the gathered dim outermost. Left to the compiler,
        the residual stream takes that over from the weights into it, and norms then reduce over
        elements a whole batch apart.
        """
        if dims == (BATCH, SEQUENCE, STREAM) and self._scatters_stream:
            # Named as it is first: the gather would move into the norm before it, to fp32.
            scattered = self.placement.sharding((BATCH, STREAM_SEQUENCE, STREAM))
            x = jax.lax.with_sharding_constraint(x, scattered)
        x = jax.lax.with_sharding_constraint(x, self.placement.sharding(dims))
        is_stream = x.ndim == 3 and dims[-1] == STREAM
        # Where the stream is scattered by sequence, a sum and its scatter would no longer meet.
        if is_stream and self.placement.gathered_axes(EMBED) and not self._scatters_stream:
            return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2)))
        return x

    @property
    def _scatters_stream(self) -> bool:
        return self.placement.axes(STREAM_SEQUENCE) != self.placement.axes(SEQUENCE)


def _is_absent(moment: Any) -> bool:
    """Whether an optimizer of several kinds has no such moment of a parameter."""
    return isinstance(moment, optax.MaskedNode)


def _partition(dims: Dims, sharded: list[tuple[str, ...]]) -> PartitionSpec:
    names = [name for axes in sharded for name in axes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"dims {dims} would be sharded twice over {twice}; "
            "a mesh axis may shard one dim of a tensor"
        )
    return PartitionSpec(*(axes or None for axes in sharded))


def path_name(path: Any) -> str:
    """Formats a tree path as ``blocks/0/mlp/up/weight``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
