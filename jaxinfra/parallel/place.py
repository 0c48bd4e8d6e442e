"""The one place where logical dims meet the mesh: parameters, activations and batches get their
shardings here and nowhere else.
"""

import dataclasses
import math
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfra.core.axes import BATCH, Dims
from jaxinfra.core.errors import ConfigError
from jaxinfra.models.definition import ModelDefinition, Parameters
from jaxinfra.parallel.rules import FSDP_TENSOR, Rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """A mesh and the rules that map logical dims onto it."""

    mesh: Mesh
    rules: Rules = dataclasses.field(default_factory=lambda: FSDP_TENSOR)

    def spec(self, dims: Dims) -> PartitionSpec:
        """The partition of a tensor with these dims; axes of size 1 are left out."""
        sharded = [self.axes(dim) for dim in dims]
        names = [name for axes in sharded for name in axes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"dims {dims} would be sharded twice over {twice}; "
                "a mesh axis may shard one dim of a tensor"
            )
        return PartitionSpec(*(axes or None for axes in sharded))

    def axes(self, dim: str | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that shard this dim."""
        return tuple(
            str(axis) for axis in self.rules.get(dim or "", ()) if self.mesh.shape[axis] > 1
        )

    def sharding(self, dims: Dims) -> NamedSharding:
        """``spec`` on this mesh."""
        return NamedSharding(self.mesh, self.spec(dims))

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Leading dim over the data axes."""
        return self.sharding((BATCH,))

    def parameters(self, model: ModelDefinition) -> Parameters:
        """Shardings of all parameters; raises ConfigError where a dim does not divide."""

        def place(path: Any, shape: jax.ShapeDtypeStruct, leaf: Any) -> NamedSharding:
            for size, dim in zip(shape.shape, leaf.dims, strict=True):
                names = self.axes(dim)
                shards = math.prod(self.mesh.shape[axis] for axis in names)
                if size % shards:
                    raise ConfigError(
                        f"parameter {path_name(path)}: dim {dim}={size} does not divide over "
                        f"{' x '.join(names)} = {shards} devices; choose sizes that do"
                    )
            return self.sharding(leaf.dims)

        return jax.tree_util.tree_map_with_path(place, model.shapes, model.dims)

    def optimizer(
        self, optimizer: optax.GradientTransformation, model: ModelDefinition
    ) -> optax.OptState:
        """Shardings of the optimizer's state: moments as their parameters, counters replicated."""
        return optax.tree_utils.tree_map_params(
            optimizer.init,
            lambda _, sharding: sharding,
            jax.eval_shape(optimizer.init, model.shapes),
            self.parameters(model),
            transform_non_params=lambda _: self.replicated,
        )

    def constraint(self) -> "ActivationPlacement":
        """What ``Execution.constrain`` should be on this mesh."""
        return ActivationPlacement(self)


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationPlacement:
    """Places activations inside a traced function; equal to itself only, as layers hash it."""

    placement: Placement

    @property
    def batch_shards(self) -> int:
        """Devices that the batch dim is spread over."""
        return math.prod(self.placement.mesh.shape[axis] for axis in self.placement.axes(BATCH))

    def __call__(self, x: jax.Array, dims: Dims) -> jax.Array:
        """x, constrained to the sharding that the rules give these dims."""
        return jax.lax.with_sharding_constraint(x, self.placement.sharding(dims))


def path_name(path: Any) -> str:
    """``blocks/0/mlp/up/weight`` from a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
