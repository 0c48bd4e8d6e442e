"""The way of weights from a trainer to the engine that samples with them."""

import functools
from typing import final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinfra.config.rl import EngineDevices
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged
from jaxinfra.model.quantized_base import base_shapes
from jaxinfra.model.serving_form import with_read_weights
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import base_shardings
from jaxinfra.serving.load import serving_placement


def engine_placement(config: RunConfig) -> Placement:
    """Returns the mesh that completions are sampled on, and its sharding rules.

    Raises:
        ConfigError: there are too few devices, or the mesh has an axis that generation does not
            use.
        UnsupportedError: the job has several processes.
    """
    assert config.rl is not None
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"rl in {jax.process_count()} processes: the engine plans its steps in one; start one "
            "process, which may have all devices of a host"
        )
    mesh, is_own = config.rl.mesh_of_engine(config.mesh), _has_own_devices(config)
    devices = jax.devices()[config.mesh.num_devices if is_own else 0 :]
    if len(devices) < mesh.num_devices:
        raise ConfigError(
            f"rl.engine_devices={config.rl.engine_devices}: the engine's mesh needs "
            f"{mesh.num_devices} devices, and training leaves {len(devices)} of "
            f"{len(jax.devices())}; give both smaller meshes"
        )
    return serving_placement(config.model, mesh, devices=devices)


def _has_own_devices(config: RunConfig) -> bool:
    return config.rl is not None and config.rl.engine_devices is EngineDevices.OWN


@final
class Handover:
    """Gives an engine on ``placement`` the arrays of a trainer.

    An array that the engine reads as it is, with the same sharding, is not copied. One jitted
    program casts projections to the compute dtype and reshards. An engine's own devices are sent
    what they need, and frozen parameters once.
    """

    def __init__(self, config: RunConfig, placement: Placement, definition: ModelDefinition):
        self._has_own, self._frozen_wanted = _has_own_devices(config), {}
        if config.lora is not None:
            base = define_model(config.model, definition.execution)
            shapes = base_shapes(base, config.lora.base)
            definition = definition.freeze(shapes)
            self._frozen_wanted = _placed(shapes, base_shardings(placement, base, shapes))
        self._read = jax.jit(functools.partial(with_read_weights, definition))
        places = merged(placement.parameters(definition), placement.model_state(definition))
        self._wanted = _placed(jax.eval_shape(self._read, definition.arrays), places)
        self._frozen: Parameters | None = None  # on the engine's own devices

    def frozen(self, tree: Parameters) -> Parameters:
        """Returns a trainer's frozen parameters as the engine needs them."""
        if not self._has_own:
            return _converted(tree, self._frozen_wanted)
        if self._frozen is None:
            self._frozen = _sent(tree, self._frozen_wanted)
        return self._frozen

    def trained(self, tree: Parameters, *, copied: bool = False) -> Parameters:
        """Returns a trainer's parameters and state as the engine needs them.

        Args:
            copied: make a copy, which the trainer's next step does not free.
        """
        if self._has_own:
            return _sent(self._read(tree), self._wanted)
        converted = _converted(tree, self._wanted)
        return jax.tree.map(jnp.copy, converted) if copied else converted


def _placed(shapes: Parameters, places: Parameters) -> Parameters:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        places,
    )


def _sent(tree: Parameters, wanted: Parameters) -> Parameters:
    return jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, wanted))


def _converted(tree: Parameters, wanted: Parameters) -> Parameters:
    """The tree with dtypes and shardings of ``wanted``; arrays that have them are not copied."""
    leaves, structure = jax.tree.flatten(tree)
    pairs = list(zip(leaves, jax.tree.leaves(wanted), strict=True))
    others = [
        number
        for number, (leaf, want) in enumerate(pairs)
        if leaf.dtype != want.dtype or not leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    ]
    targets = tuple((pairs[number][1].dtype, pairs[number][1].sharding) for number in others)
    made = _convert([leaves[number] for number in others], targets=targets) if others else []
    for number, leaf in zip(others, made, strict=True):
        leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnames="targets")
def _convert(
    arrays: list[jax.Array], *, targets: tuple[tuple[jnp.dtype, NamedSharding], ...]
) -> list[jax.Array]:
    return [
        jax.lax.with_sharding_constraint(leaf.astype(dtype), place)
        for leaf, (dtype, place) in zip(arrays, targets, strict=True)
    ]
