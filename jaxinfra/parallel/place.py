"""``Placement`` maps logical dims onto mesh axes.

Shardings of parameters, activations and batches are defined here and nowhere else.
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
    SEQUENCE,
    STREAM,
    STREAM_SEQUENCE,
    Dims,
)
from jaxinfra.config.mesh import ShardingConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition, Parameters
from jaxinfra.model.execution import Place
from jaxinfra.parallel.mesh import Rules, StateRules, state_rules
from jaxinfra.parallel.zigzag import zigzag_indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A mesh and the rules that map logical dims onto it."""

    mesh: Mesh | AbstractMesh  # AbstractMesh: to lower programs without devices
    rules: StateRules = dataclasses.field(default_factory=lambda: state_rules(ShardingConfig()))

    def spec(self, dims: Dims, rules: Rules | None = None) -> PartitionSpec:
        """Returns the PartitionSpec of a tensor with these logical dims, without axes of size 1.

        Args:
            rules: mesh axes of each logical dim; by default ``StateRules.parameters``.
        """
        return _partition(dims, self.sharded_axes(dims, rules))

    def sharded_axes(self, dims: Dims, rules: Rules | None) -> list[tuple[str, ...]]:
        """Returns the mesh axes that shard each dim; axes of the experts' dim shard no other."""
        found = [self.axes(dim, rules) for dim in dims]
        if EXPERTS not in dims:
            return found
        experts = found[dims.index(EXPERTS)]
        return [
            axes if dim == EXPERTS else tuple(axis for axis in axes if axis not in experts)
            for dim, axes in zip(dims, found, strict=True)
        ]

    def axes(self, dim: str | None, rules: Rules | None = None) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that shard this dim.

        Inside a ``shard_map``, its manual axes are left out.
        """
        rules = self.rules.parameters if rules is None else rules
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(
            str(axis)
            for axis in rules.get(dim or "", ())
            if self.mesh.shape.get(axis, 1) > 1 and axis not in taken
        )

    def copies(self, dim: str | None, size: int, rules: Rules | None = None) -> int:
        """Returns how often each element of a dim is repeated, so that all its shards have one.

        The number is 1, except for key/value heads that are fewer than the devices.

        Args:
            size: number of elements of the dim.
        """
        shards = self._count(self.axes(dim, rules))
        return shards // size if dim == KV_HEADS and size < shards and not shards % size else 1

    def gathered_axes(self, dim: str) -> tuple[str, ...]:
        """Returns mesh axes over which this dim of a stored parameter is gathered before use."""
        used = self.axes(dim, self.rules.used)
        return tuple(axis for axis in self.axes(dim) if axis not in used)

    def shards(self, dim: str) -> int:
        """Returns the number of devices that shard a dim."""
        return self._count(self.axes(dim))

    @property
    def batch_shards(self) -> int:
        """Number of devices that the compiler shards the batch dim over."""
        return self._count(self.axes(BATCH))

    @property
    def sequence_shards(self) -> int:
        """Number of devices that the compiler shards a sequence over inside attention."""
        return self._count(self.axes(SEQUENCE))

    def sharding(self, dims: Dims, rules: Rules | None = None) -> NamedSharding:
        """Returns the NamedSharding of these dims, without an enclosing ``shard_map``'s axes."""
        return NamedSharding(self.current_mesh, self.spec(dims, rules))

    @property
    def current_mesh(self) -> Mesh | AbstractMesh:
        """Mesh to build shardings with: this mesh, or that of an enclosing ``shard_map``."""
        around = jax.sharding.get_abstract_mesh()
        return around if around.manual_axes else self.mesh

    def on_each_device(
        self, function: Callable, *, in_specs: Any, out_specs: Any, check_vma: bool = True
    ) -> Callable:
        """Wraps a function of one device's blocks in ``shard_map`` over all axes of the mesh.

        Axes of an enclosing ``shard_map`` are left out. Axes of size 1 are included: without them,
        XLA's CPU compiler aborts on sums of bf16, and the partitioner sees custom calls.
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
        """Sharding of an array that is replicated on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Sharding of arrays [B, T, ...]: rows over data axes, positions over the context axis."""
        return self.sharding((BATCH, SEQUENCE))

    def parameters(self, model: ModelDefinition) -> Parameters:
        """Returns all parameters' shardings; raises ConfigError if shards of a dim are unequal."""
        return self._place(model, self.rules.parameters)

    def gradients(self, model: ModelDefinition) -> Parameters:
        """Returns the shardings of the gradients while they are summed."""
        return self._place(model, self.rules.gradients)

    def updates(self, model: ModelDefinition) -> Parameters:
        """Returns the shardings of moments, gradients and parameters in the optimizer's update."""
        return self._place(model, self.rules.optimizer)

    def deferred_sum_axes(self, model: ModelDefinition, *, accumulation: int) -> tuple[str, ...]:
        """Returns the mesh axes over which gradients are summed once, after the last micro-batch.

        These are the batch's axes that shard no gradient. With one micro-batch there are none: the
        compiler sums each layer's gradient during the backward pass. ZeRO 1 is an exception, since
        the compiler would all-reduce where a reduce-scatter is enough.
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
        """Returns the shardings of the model's state, by the same rules as of parameters."""
        return self.of_dims(model.state_shapes, model.state_dims, self.rules.parameters)

    def of_dims(self, shapes: Parameters, dims: Parameters, rules: Rules) -> Parameters:
        """Returns the shardings of a tree of arrays from their logical dims."""

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
        """Returns the shardings of the optimizer's state.

        A moment is sharded as its parameter is in the update. A moment of another shape, such as
        sums of rows or a scale, is replicated, and so are counters.
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
        """Returns the object that shards activations on this mesh, for ``Execution.place``."""
        return ActivationPlacement(self)


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationPlacement(Place):
    """Sharding of activations inside a traced function; hashed by identity."""

    placement: Placement

    @property
    def batch_shards(self) -> int:
        """Number of devices that the rows of a batch are sharded over."""
        return self.placement.batch_shards

    def first_row(self, num_rows: int) -> jax.Array | int:
        """Returns the index of this device's first row in the whole batch, inside shard_map.

        Args:
            num_rows: number of rows per device.
        """
        apart = self._apart
        return num_rows * jax.lax.axis_index(apart) if apart else 0

    def over_batch(self, x: jax.Array) -> jax.Array:
        """Sums x over the devices that have different rows of the batch, inside shard_map."""
        return jax.lax.psum(x, self._apart) if self._apart else x

    @property
    def _apart(self) -> tuple[str, ...]:
        """Axes of the batch that a ``shard_map`` around this trace has taken."""
        taken = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in self.placement.rules.parameters[BATCH] if axis in taken)

    def shards(self, dim: str) -> int:
        """Returns the number of devices that shard a dim."""
        return self.placement.shards(dim)

    def copies(self, dim: str | None, size: int) -> int:
        """Returns how often each element of a dim is repeated, as ``Placement.copies``."""
        return self.placement.copies(dim, size)

    def token_positions(self, num_tokens: int) -> jax.Array:
        """Returns each token's position in the sequence, int32 [T], in the tokens' memory order.

        The order is zig-zag if the context axis shards sequences.
        """
        shards = self.placement.sequence_shards
        if shards == 1:
            return jnp.arange(num_tokens)
        return jnp.asarray(zigzag_indices(num_tokens, shards), jnp.int32)

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Constrains x to the sharding of its dims, and, where weights are gathered along the
        width, to a layout with a contiguous width.

        An all-gather returns a weight with the gathered dim outermost. Left to the compiler, the
        residual stream takes over this layout, and norms reduce over elements far apart.
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
