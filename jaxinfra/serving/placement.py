"""Where a model that generates lies."""

import jax

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.validate import check_divides
from jaxinfra.errors import ConfigError
from jaxinfra.parallel.mesh import SERVING_AXES, make_mesh, serving_rules
from jaxinfra.parallel.place import Placement


def serving_placement(config: ModelConfig, mesh: MeshConfig | None) -> Placement:
    """The first devices here, or those of the whole job where more are asked for, as this mesh:
    rows over replica and fsdp, weights over fsdp and tensor, heads and their cache over tensor.
    Devices that ``expert`` takes of fsdp or replica have no rows of their own: they share experts,
    and all else as those of tensor do.

    Args:
        mesh: one device by default.

    Raises:
        ConfigError: an axis that generation does not use, or one that the model does not divide
            over.
    """
    mesh = mesh or MeshConfig()
    for axis, size in mesh.sizes().items():
        if size > 1 and axis not in SERVING_AXES:
            raise ConfigError(
                f"mesh {axis}={size}: generation spreads a model over {', '.join(SERVING_AXES)} "
                "only; give these the devices"
            )
    check_divides(config, mesh)
    devices = jax.local_devices()
    if mesh.num_devices > len(devices):
        devices = jax.devices()
    return Placement(
        mesh=make_mesh(mesh, devices=devices[: mesh.num_devices]),
        rules=serving_rules(mesh),
    )
