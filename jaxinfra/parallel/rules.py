"""Which mesh axes shard which logical dims."""

from collections.abc import Mapping

from jaxinfra.core import axes
from jaxinfra.core.axes import MeshAxis

type Rules = Mapping[str, tuple[str, ...]]
"""Logical dim to the mesh axes that shard it; a dim not named is whole on every device."""

FSDP_TENSOR: Rules = {
    # Activations. Fully sharded data parallel means the batch is spread over the fsdp axis too.
    axes.BATCH: (MeshAxis.REPLICA, MeshAxis.FSDP),
    # Parameters: fsdp shards the side of each matrix that tensor parallelism leaves whole, so that
    # both together never shard a dim twice. Column-parallel inward, row-parallel outward
    # (Shoeybi et al. 2019): one all-reduce per half block.
    axes.EMBED: (MeshAxis.FSDP,),
    axes.MLP: (MeshAxis.TENSOR,),
    axes.Q_HEADS: (MeshAxis.TENSOR,),
    axes.KV_HEADS: (MeshAxis.TENSOR,),
    axes.VOCAB: (MeshAxis.TENSOR,),
}
"""Data, fully sharded and tensor parallelism, in any proportion of the axes' sizes."""
