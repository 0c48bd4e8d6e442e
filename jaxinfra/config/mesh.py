"""Number of devices on each mesh axis, and what the axes shard."""

import dataclasses
import functools
import math

from jaxinfra.axes import MESH_AXES, MeshAxis
from jaxinfra.config.limits import require_within
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.files import whole_number

EXPERT = "expert"
NODES = "expert nodes"
"""Name of the traffic between nodes in a two-level exchange, listed beside the axes; no mesh axis.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes, slowest link first. One device by default.

    Raises:
        ConfigError: a size below 1, or an ``expert`` axis that the data axes do not contain.

    Examples:
        >>> mesh = jaxinfra.MeshConfig(fsdp=4, tensor=2)
        >>> mesh.num_devices
        8
    """

    pipe: int = 1  # stages of a pipeline
    replica: int = 1  # copies of the whole state
    fsdp: int = 1  # devices that share parameters and the batch
    context: int = 1  # devices that share a sequence
    tensor: int = 1  # devices that share each matmul
    # Devices that share a layer's experts, taken from the data axes: a part of fsdp, times the
    # whole of context, of replica, or of both where that is not enough.
    expert: int = 1

    def __post_init__(self) -> None:
        for axis, size in (*self.sizes().items(), (EXPERT, self.expert)):
            if size < 1:
                raise ConfigError(f"mesh axis {axis}={size} must be at least 1")
        require_within(devices=self.num_devices)
        self._shared_by_experts()

    def sizes(self) -> dict[str, int]:
        """Size of each axis by name, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def fsdp_beside_experts(self) -> int:
        """Number of devices on the fsdp axis that hold the same experts and shard their widths."""
        inner, _ = self._shared_by_experts()
        return self.fsdp // inner

    @property
    def device_axes(self) -> dict[str, int]:
        """Axes of the device mesh; a part of fsdp that experts take is an axis of its own."""
        inner, _ = self._shared_by_experts()
        axes: dict[str, int] = {}
        for axis, size in self.sizes().items():
            split = axis == MeshAxis.FSDP and inner > 1
            axes |= {axis: size // inner, EXPERT: inner} if split else {axis: size}
        return axes

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes among ``device_axes`` that shard experts, slowest link first."""
        inner, whole = self._shared_by_experts()
        taken = {*whole, *((EXPERT,) if inner > 1 else ())}
        return tuple(axis for axis in self.device_axes if axis in taken)

    def _shared_by_experts(self) -> tuple[int, tuple[str, ...]]:
        """The part of fsdp, and the other axes that experts take as they are."""
        found = shared_by_experts(self.expert, self.fsdp, self.context, self.replica)
        if found is not None:
            return found
        raise ConfigError(
            f"expert={self.expert} does not fit fsdp={self.fsdp}, context={self.context}, replica="
            f"{self.replica}: experts take a divisor of fsdp, times the whole of context, of "
            "replica, or of both"
        )

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of all axes."""
        return math.prod(self.sizes().values())

    @property
    def num_data_shards(self) -> int:
        """Number of shards of the batch dim: replica x fsdp."""
        return self.replica * self.fsdp

    @property
    def data_axes(self) -> str:
        """Text of the mesh axes that shard the batch, with their sizes, for messages."""
        return f"replica={self.replica} x fsdp={self.fsdp}"

    @property
    def sequence_axes(self) -> str:
        """Text of the mesh axis that shards sequences, with its size, for messages."""
        return f"context={self.context}"

    @property
    def sequence_shards(self) -> int:
        """Number of devices that share a sequence."""
        return self.context

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self.pipe

    @property
    def shards_state(self) -> bool:
        """Whether several devices share the optimizer's state, so that ZeRO's stages differ."""
        return self.fsdp > 1

    @property
    def splits_matmuls(self) -> bool:
        """Tells whether several devices share each matmul."""
        return self.tensor > 1

    @property
    def option(self) -> str:
        """The text of ``--mesh`` for this mesh; empty for one device."""
        axes = {**self.sizes(), EXPERT: self.expert}
        return ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)

    def with_more_shards(self, factor: int) -> "MeshConfig":
        """Returns the mesh with more devices, which share the state of a training run."""
        return dataclasses.replace(self, fsdp=factor * self.fsdp)

    def with_finer_matmuls(self, factor: int) -> "MeshConfig":
        """Returns the mesh with more devices, which share a served model's weights and cache."""
        return dataclasses.replace(self, tensor=factor * self.tensor)


@functools.lru_cache(maxsize=1 << 14)  # a search asks for each mesh again and again
def shared_by_experts(
    expert: int, fsdp: int, context: int, replica: int
) -> tuple[int, tuple[str, ...]] | None:
    """Splits expert shards over the data axes: a part of fsdp, and axes taken whole; else None."""
    sizes = {MeshAxis.CONTEXT.value: context, MeshAxis.REPLICA.value: replica}
    near, far = sizes
    for whole in ((), (near,), (far,), (far, near)):
        rest, left = divmod(expert, math.prod(sizes[axis] for axis in whole))
        if not left and rest >= 1 and fsdp % rest == 0:
            return rest, whole
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfig:
    """Choices of what is sharded over the mesh axes.

    Raises:
        ConfigError: a ``zero`` that is none of the stages 1, 2 and 3.

    Examples:
        >>> jaxinfra.ShardingConfig(zero=1).zero  # the optimizer's state only
        1
    """

    # Over the fsdp axis (Rajbhandari et al. 2020): 1 shards the optimizer's state, 2 the gradients
    # too, 3 the parameters too (fully sharded data parallel).
    zero: int = 3
    # Over the tensor axis, between its projections: the residual stream by sequence, with norms,
    # dropout and residual sums (Korthikanti et al. 2022).
    sequence_parallel: bool = False
    # At stage 3, a layer's weights gathered for the forward pass stay, in the compute dtype, until
    # its backward pass, which then does not gather them again. None: where the step then fits
    # the devices' memory. What is computed is the same.
    keep_gathered: bool | None = None

    def __post_init__(self) -> None:
        if self.zero not in (1, 2, 3):
            raise ConfigError(
                f"zero={self.zero} is no stage; 1 shards the optimizer's state over fsdp, 2 the "
                "gradients too, 3 the parameters too; for none of them use the replica axis"
            )


def parse_mesh(text: str) -> MeshConfig:
    """Parses the mesh of a command line's ``text``; axes that it does not name have size 1.

    Raises:
        ConfigError: an axis that is not known or given twice, or a size that is no whole number.

    Examples:
        >>> jaxinfra.parse_mesh("fsdp=4,tensor=2") == jaxinfra.MeshConfig(fsdp=4, tensor=2)
        True
    """
    return MeshConfig(**parse_axes(text))


def parse_axes(text: str) -> dict[str, int]:
    """Parses the sizes of the axes that ``"fsdp=4,tensor=2"`` names."""
    sizes: dict[str, int] = {}
    known = (*MESH_AXES, EXPERT)
    for part in filter(None, text.split(",")):
        axis, _, size = part.strip().partition("=")
        if axis not in known:
            raise ConfigError(f"unknown mesh axis {axis!r}{nearest(axis, known)}")
        if axis in sizes:
            raise ConfigError(f"mesh axis {axis!r} is given twice in {text!r}")
        number = whole_number(size)
        if number is None:
            raise ConfigError(f"mesh axis {part!r} needs a whole size, as in fsdp=4,tensor=2")
        if not number:
            raise ConfigError(f"mesh axis {part} must be at least 1")
        sizes[axis] = number
    return sizes
