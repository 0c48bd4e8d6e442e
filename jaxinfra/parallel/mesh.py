"""Device meshes from their configs."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.errors import ConfigError


def make_mesh(config: MeshConfig, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all axes in link order; raises ConfigError unless it uses every device.

    Args:
        devices: those to use; all by default. A one-device mesh takes the first.
    """
    available = list(jax.devices() if devices is None else devices)
    sizes = config.device_axes
    wanted = math.prod(sizes.values())
    if wanted == 1:
        available = available[:1]
    if wanted != len(available):
        product = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise ConfigError(
            f"mesh {product or '1'} needs {wanted} devices, {len(available)} are here; "
            "the product of the axes must equal the number of devices"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=available,
    )
