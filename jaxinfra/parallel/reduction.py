"""Gradients of data shards, which are summed over devices once, after the last micro-batch.

The compiler would sum gradients over devices in every micro-batch. A ``shard_map`` over some mesh
axes avoids this: its devices first accumulate local gradients. The compiler handles other axes.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfra.model.definition import ModelDefinition, Parameters
from jaxinfra.model.gradients import Gradients
from jaxinfra.model.passes import over_devices
from jaxinfra.parallel.place import Placement


def sum_gradients_once(
    function: Callable[..., Gradients],
    *,
    placement: Placement,
    model: ModelDefinition,
    axes: tuple[str, ...],
) -> Callable[..., Gradients]:
    """Wraps a gradient function so that gradients are summed over ``axes`` once, at its end.

    Devices along ``axes`` each compute their own rows of the batch. The results are sharded as
    ``Placement.updates``. A gradient of D bytes is reduce-scattered over the axes that shard its
    update (D (N-1)/N bytes per device, N devices) and all-reduced over others (2 D (N-1)/N).
    """
    shares = placement.updates(model)

    def add(gradients: Parameters) -> Parameters:
        return jax.tree.map(lambda g, share: _sum(g, share, axes), gradients, shares)

    def apart(*args: Any) -> Gradients:
        part = function(*args)
        # Left to the compiler, the other axes' shards would be gathered for this sum.
        placed = jax.tree.map(lambda sharding: sharding.spec, placement.gradients(model))
        with jax.named_scope("gradient_sum"):
            total = placement.on_each_device(
                add, in_specs=(placed,), out_specs=placed, check_vma=False
            )
            return Gradients(
                loss=jax.lax.psum(part.loss, axes),
                gradients=total(part.gradients),
                sums=over_devices(part.sums, axes),
                state=jax.lax.pmax(part.state, axes),
                figures=jax.lax.psum(part.figures, axes),
            )

    def wrapped(parameters: Parameters, state: Parameters, batch: Any, *rest: Any) -> Gradients:
        whole: Any = PartitionSpec()  # specs in the place of arrays
        return jax.shard_map(
            apart,
            mesh=placement.current_mesh,
            in_specs=(whole, whole, PartitionSpec(axes), *(whole for _ in rest)),
            out_specs=Gradients(
                loss=whole,
                gradients=jax.tree.map(lambda share: _kept(share.spec, axes), shares),
                sums=whole,
                state=whole,
                figures=whole,
            ),
            axis_names=set(axes),
            # Which values differ between devices is not tracked: nothing here differentiates
            # through the sums, and a tracked model would mark each of its own constants.
            check_vma=False,
        )(parameters, state, batch, *rest)

    return wrapped


def _sum(gradient: jax.Array, share: NamedSharding, axes: tuple[str, ...]) -> jax.Array:
    """Scattered first: what is left to all-reduce is then a share only."""
    rest = list(axes)
    for dim, entry in enumerate(_kept(share.spec, axes)):
        for axis in _names(entry):
            gradient = jax.lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
            rest.remove(axis)
    return jax.lax.psum(gradient, tuple(rest)) if rest else gradient


def _kept(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """A spec without the axes that are not among these."""
    kept = [tuple(axis for axis in _names(entry) if axis in axes) for entry in spec]
    return PartitionSpec(*(names or None for names in kept))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
