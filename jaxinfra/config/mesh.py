"""Number of devices on each mesh axis, and the arrays that each axis shards."""

import dataclasses
import functools
import math

from jaxinfra.axes import MESH_AXES, MeshAxis
from jaxinfra.config.limits import require_within
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.runtime.files import whole_number

EXPERT = "expert"
NODES = "expert nodes"
"""Name of the traffic between nodes in a two-level exchange, listed beside the axes; no mesh axis.
"""


@record
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
    fsdp: int = 1  # shards of parameters and of the batch
    context: int = 1  # shards of each sequence
    tensor: int = 1  # shards of each matmul
    # Shards of a layer's experts, over devices of the data axes: a divisor of fsdp, if needed times
    # all of context, of replica, or of both.
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
        """Number of devices on the fsdp axis that hold the same experts, and shard their weights
        along a width.
        """
        inner, _ = self._shared_by_experts()
        return self.fsdp // inner

    @property
    def device_axes(self) -> dict[str, int]:
        """Sizes of the device mesh's axes by name. If experts are sharded over a part of the fsdp
        axis, that part is an axis of its own.
        """
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
    def sequence_shards(self) -> int:
        """Number of shards of each sequence."""
        return self.context

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self.pipe

    @property
    def shards_state(self) -> bool:
        """Whether the optimizer's state is sharded; only then do ZeRO stages differ."""
        return self.fsdp > 1

    @property
    def option(self) -> str:
        """The text of ``--mesh`` for this mesh; empty for one device."""
        axes = {**self.sizes(), EXPERT: self.expert}
        return ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)

    def with_more_shards(self, factor: int) -> "MeshConfig":
        """Returns the mesh with ``factor`` times as many devices, which shard the training state
        further.
        """
        return dataclasses.replace(self, fsdp=factor * self.fsdp)


@functools.lru_cache(maxsize=1 << 14)  # a search asks for each mesh again and again
def shared_by_experts(
    expert: int, fsdp: int, context: int, replica: int
) -> tuple[int, tuple[str, ...]] | None:
    """Splits expert shards over the data axes. Returns the size of the used part of fsdp and the
    names of axes that are used whole; None if the axes cannot hold that many shards.
    """
    sizes = {MeshAxis.CONTEXT.value: context, MeshAxis.REPLICA.value: replica}
    near, far = sizes
    for whole in ((), (near,), (far,), (far, near)):
        rest, left = divmod(expert, math.prod(sizes[axis] for axis in whole))
        if not left and rest >= 1 and fsdp % rest == 0:
            return rest, whole
    return None


@record
class ShardingConfig:
    """Choices of what is sharded over the mesh axes.

    Raises:
        ConfigError: ``zero`` is not 1, 2 or 3.

    Examples:
        >>> jaxinfra.ShardingConfig(zero=1).zero  # the optimizer's state only
        1
    """

    # Over the fsdp axis (Rajbhandari et al. 2020): 1 shards the optimizer's state, 2 the gradients
    # too, 3 the parameters too (fully sharded data parallel).
    zero: int = 3
    # Shard the residual stream along the sequence over the tensor axis, and with it norms, dropout
    # and residual sums between the sharded projections (Korthikanti et al. 2022).
    sequence_parallel: bool = False
    # At stage 3: keep a layer's weights, all-gathered for its forward pass, until its backward pass
    # instead of gathering them twice. They are kept in the compute dtype; results are equal. None:
    # keep them if the step then fits in device memory.
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
        ConfigError: an axis is unknown or given twice, or a size is not a whole number.

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
