"""``Execution.attend`` on a mesh whose devices hold whole sequences.

Dims: B batch, T position, N query heads, K key/value heads, H head width.
"""

import dataclasses

import jax

from jaxinfra.config.model import AttentionConfig
from jaxinfra.core import axes
from jaxinfra.layers.execution import Attend
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedAttention:
    """Each device attends with its own rows and heads; nothing is communicated.

    Kernels are custom calls, which the compiler cannot split, and Mosaic's cannot be lowered by
    ``custom_partitioning`` either (JAX 0.11.2: "Cannot lower jaxpr with effects"). Where rows and
    heads lie is known here.
    """

    placement: Placement
    attend: Attend

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        *,
        config: AttentionConfig,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        """As ``attend``, placed as q."""
        place = self.placement
        q_spec = place.spec((axes.BATCH, None, axes.Q_HEADS, None))
        kv_spec = place.spec((axes.BATCH, None, axes.KV_HEADS, None))
        ids_spec = None if segment_ids_BT is None else place.spec((axes.BATCH, None))

        def local(q, k, v, ids) -> jax.Array:
            return self.attend(q, k, v, config=config, segment_ids_BT=ids)

        mesh = place.current_mesh
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(q_spec, kv_spec, kv_spec, ids_spec),
            out_specs=q_spec,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)


def attention_on(placement: Placement, attend: Attend) -> Attend:
    """``attend``, or on a mesh of several devices its sharded form."""
    if placement.mesh.size == 1:
        return attend
    return ShardedAttention(placement=placement, attend=attend)
