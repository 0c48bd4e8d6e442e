"""Device meshes from their configs, and tables of which mesh axes shard which logical dims."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.config.mesh import EXPERT, MeshConfig, ShardingConfig
from jaxinfra.errors import ConfigError


def make_mesh(config: MeshConfig, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh of all axes, slowest link first; raises ConfigError unless it uses all devices.

    Args:
        devices: devices of the mesh, by default all; a mesh of size 1 uses the first.
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


type Rules = Mapping[str, tuple[str, ...]]
"""Logical dim to the mesh axes that shard it; a dim not named is whole on every device."""

FSDP_TENSOR: Rules = {
    # Activations. Fully sharded data parallel means the batch is spread over the fsdp axis too.
    axes.BATCH: (MeshAxis.REPLICA, MeshAxis.FSDP, EXPERT),
    axes.SEQUENCE: (MeshAxis.CONTEXT,),
    axes.STREAM_SEQUENCE: (MeshAxis.CONTEXT,),
    # Parameters: fsdp shards the side of each matrix that tensor parallelism leaves whole, so that
    # both together never shard a dim twice. Column-parallel inward, row-parallel outward
    # (Shoeybi et al. 2019): one all-reduce per half block.
    axes.EMBED: (MeshAxis.FSDP, EXPERT),
    axes.MLP: (MeshAxis.TENSOR,),
    axes.Q_HEADS: (MeshAxis.TENSOR,),
    axes.KV_HEADS: (MeshAxis.TENSOR,),
    axes.VOCAB: (MeshAxis.TENSOR,),
    # A tensor's experts come first: its other dims are sharded over what they leave.
    axes.EXPERTS: (EXPERT,),
    # Each pipeline stage holds its part of the stack.
    axes.LAYERS: (MeshAxis.PIPE,),
}
"""Pipeline, data, fully sharded and tensor parallelism, in any proportion of the axes' sizes."""


TENSOR_DIMS = frozenset(dim for dim, over in FSDP_TENSOR.items() if MeshAxis.TENSOR in over)
"""Logical dims that tensor parallelism shards."""

STAGES = MeshAxis.PIPE.value
"""The mesh axis whose devices are the stages of a pipeline."""

SERVING_AXES = (MeshAxis.REPLICA, MeshAxis.FSDP, MeshAxis.TENSOR)
"""Mesh axes that serving shards a model and its batch over."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateRules:
    """Sharding rules of a training step's arrays; ZeRO's stages differ only in these."""

    parameters: Rules  # of stored parameters, and of activations
    used: Rules  # of parameters in a layer's computation: other axes are all-gathered
    gradients: Rules
    optimizer: Rules


def state_rules(config: ShardingConfig, mesh: MeshConfig | None = None) -> StateRules:
    """Returns the sharding rules of a ZeRO stage (Rajbhandari et al. 2020).

    Args:
        mesh: the mesh whose ``expert_axes`` shard experts; by default the ``expert`` axis does.
    """
    sharded = dict(FSDP_TENSOR)
    if mesh is not None:
        sharded[axes.EXPERTS] = mesh.expert_axes
    if config.sequence_parallel:
        sharded[axes.STREAM_SEQUENCE] = (MeshAxis.CONTEXT, MeshAxis.TENSOR)
    whole = sharded | {axes.EMBED: ()}
    return StateRules(
        parameters=sharded if config.zero >= 3 else whole,
        used=whole,
        gradients=sharded if config.zero >= 2 else whole,
        optimizer=sharded,
    )


def serving_rules(mesh: MeshConfig) -> StateRules:
    """Returns the sharding rules for generation: axes that shard experts act like ``tensor``.

    A decode step has few tokens and reads all weights. So tokens are replicated over the devices
    that shard experts, and no exchange is needed. Each device computes its own experts, and one sum
    serves both experts and tensor parallelism. Attention, KV cache, dense layers and vocabulary are
    sharded over these devices too. Only the remaining data axes shard the batch.
    """
    among = mesh.expert_axes
    rules = {
        dim: (*among, *sharded)
        if MeshAxis.TENSOR in sharded
        else tuple(axis for axis in sharded if axis not in among)
        for dim, sharded in FSDP_TENSOR.items()
    }
    rules[axes.EXPERTS] = among
    used = rules | {axes.EMBED: ()}
    return StateRules(parameters=rules, used=used, gradients=rules, optimizer=rules)
