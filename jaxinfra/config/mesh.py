"""How many devices each mesh axis has."""

import dataclasses
import math

from jaxinfra.config.limits import require_within
from jaxinfra.core.axes import MESH_AXES
from jaxinfra.core.errors import ConfigError, nearest

EXPERT = "expert"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes, slowest link first. One device by default."""

    pipe: int = 1
    replica: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    # Devices that share a layer's experts: a part of replica x fsdp x context, no axis of its own.
    expert: int = 1

    def __post_init__(self) -> None:
        for axis, size in (*self.sizes().items(), (EXPERT, self.expert)):
            if size < 1:
                raise ConfigError(f"mesh axis {axis}={size} must be at least 1")
        require_within(devices=self.num_devices)

    def sizes(self) -> dict[str, int]:
        """Axis name to size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def num_devices(self) -> int:
        """Product of all axes."""
        return math.prod(self.sizes().values())

    @property
    def num_data_shards(self) -> int:
        """Shards of the batch dim: replica x fsdp."""
        return self.replica * self.fsdp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig:
    """What is sharded over the mesh axes, where there is a choice."""

    # Over the fsdp axis (Rajbhandari et al. 2020): 1 shards the optimizer's state, 2 the gradients
    # too, 3 the parameters too (fully sharded data parallel).
    zero: int = 3
    # Over the tensor axis, between its projections: the residual stream by sequence, with norms,
    # dropout and residual sums (Korthikanti et al. 2022).
    sequence_parallel: bool = False
    # At stage 3, a layer's weights gathered for the forward pass stay, in the compute dtype, until
    # its backward pass, which then does not gather them again.
    keep_gathered: bool = False

    def __post_init__(self) -> None:
        if self.zero not in (1, 2, 3):
            raise ConfigError(
                f"zero={self.zero} is no stage; 1 shards the optimizer's state over fsdp, 2 the "
                "gradients too, 3 the parameters too; for none of them use the replica axis"
            )


def parse_mesh(text: str) -> MeshConfig:
    """Parses ``"fsdp=4,tensor=2"``; axes not named have size 1."""
    return MeshConfig(**parse_axes(text))


def parse_axes(text: str) -> dict[str, int]:
    """Sizes of the axes that ``"fsdp=4,tensor=2"`` names."""
    sizes: dict[str, int] = {}
    known = (*MESH_AXES, EXPERT)
    for part in filter(None, text.split(",")):
        axis, separator, size = part.strip().partition("=")
        if axis not in known:
            raise ConfigError(f"unknown mesh axis {axis!r}{nearest(axis, known)}")
        if axis in sizes:
            raise ConfigError(f"mesh axis {axis!r} is given twice in {text!r}")
        if not separator or not size.isdecimal():
            raise ConfigError(f"mesh axis {part!r} needs a whole size, as in fsdp=4,tensor=2")
        sizes[axis] = int(size)
    return sizes
