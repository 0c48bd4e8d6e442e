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
            f"{jax.device_count()}; give both smaller meshes"
        )
    return serving_placement(config.model, mesh, devices=devices)


def _has_own_devices(config: RunConfig) -> bool:
    return config.rl is not None and config.rl.engine_devices is EngineDevices.OWN


@final
class Handover:
    """Gives an engine on ``placement`` the arrays of a trainer.

    An array that is already sharded as the engine needs it is passed on as it is. The others are
    resharded by one jitted program, or sent to the engine's own devices. Frozen arrays are sent
    once.
    """

    def __init__(self, config: RunConfig, placement: Placement, definition: ModelDefinition):
        self._has_own, frozen = _has_own_devices(config), {}
        if config.lora is not None:
            base = define_model(config.model, definition.execution)
            shapes = base_shapes(base, config.lora.base)
            definition = definition.freeze(shapes)
            frozen = base_shardings(placement, base, shapes)
        trained = merged(placement.parameters(definition), placement.model_state(definition))
        self._frozen_places, self._trained_places = frozen, trained
        self._frozen: Parameters | None = None  # on the engine's own devices

    def frozen(self, tree: Parameters) -> Parameters:
        """Returns a trainer's frozen parameters as the engine needs them."""
        if not self._has_own:
            return _moved(tree, self._frozen_places)
        if self._frozen is None:
            self._frozen = jax.device_put(tree, self._frozen_places)
        return self._frozen

    def trained(self, tree: Parameters, *, copied: bool = False) -> Parameters:
        """Returns a trainer's parameters and state as the engine needs them.

        Args:
            copied: make a copy, which the trainer's next step does not free.
        """
        if self._has_own:
            return jax.device_put(tree, self._trained_places)
        moved = _moved(tree, self._trained_places)
        return jax.tree.map(jnp.copy, moved) if copied else moved


def _moved(tree: Parameters, places: Parameters) -> Parameters:
    """The tree with the shardings ``places``; arrays that have them are not copied."""
    leaves, structure = jax.tree.flatten(tree)
    wanted = jax.tree.leaves(places)
    others = [
        number
        for number, (leaf, place) in enumerate(zip(leaves, wanted, strict=True))
        if not leaf.sharding.is_equivalent_to(place, leaf.ndim)
    ]
    if others:
        targets = tuple(wanted[number] for number in others)
        moved = _reshard([leaves[number] for number in others], targets=targets)
        for number, leaf in zip(others, moved, strict=True):
            leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.jit, static_argnames="targets")
def _reshard(arrays: list[jax.Array], *, targets: tuple[NamedSharding, ...]) -> list[jax.Array]:
    return list(map(jax.lax.with_sharding_constraint, arrays, targets))
