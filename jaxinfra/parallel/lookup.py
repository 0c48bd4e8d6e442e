"""Lookup of rows in an embedding table that is sharded over a mesh.

Dims: B batch, T position, D model width, V rows; lower case of one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.model.execution import take_rows
from jaxinfra.numerics.policy import Policy
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedLookup:
    """Vocabulary-parallel lookup (Shoeybi et al. 2019, section 3), also of tables split by width.

    If rows are sharded, a device reads the ids that it has and zeros for others. The sum over
    devices is exact, since one term is not zero. It is a reduce-scatter if the residual stream is
    sharded by sequence, else an all-reduce. If the width is sharded, a device reads its part of the
    width for the tokens of all these devices, and an all-to-all returns whole rows. So token rows
    in the compute dtype are communicated, never the table.
    """

    placement: Placement

    def __call__(
        self,
        table_VD: Float[Array, "V D"],
        ids_BT: Int[Array, "B T"],
        *,
        rows_dim: str,
        policy: Policy,
    ) -> Float[Array, "B T D"]:
        """Reads rows by index, [B, T, D] in the compute dtype, sharded as the residual stream."""
        place = self.placement
        by_row = place.axes(rows_dim)
        out_spec = place.spec((axes.BATCH, axes.STREAM_SEQUENCE, axes.STREAM))
        # Where no sum is taken, each device reads the positions it keeps.
        ids_dim = axes.SEQUENCE if by_row else axes.STREAM_SEQUENCE
        stream, sequence = place.axes(axes.STREAM_SEQUENCE), place.axes(axes.SEQUENCE)
        local = functools.partial(
            _local,
            num_rows=table_VD.shape[0],
            policy=policy,
            by_row=by_row,
            by_width=place.gathered_axes(axes.EMBED),
            scattered=bool(by_row) and stream != sequence,
        )
        return place.on_each_device(
            local,
            in_specs=(place.spec((rows_dim, axes.EMBED)), place.spec((axes.BATCH, ids_dim))),
            out_specs=PartitionSpec(*out_spec),
        )(table_VD, ids_BT)


def _local(
    table_vd: jax.Array,
    ids_bt: jax.Array,
    *,
    num_rows: int,
    policy: Policy,
    by_row: tuple[str, ...],
    by_width: tuple[str, ...],
    scattered: bool,
) -> jax.Array:
    own_ids_bt = ids_bt
    if by_width:
        ids_bt = jax.lax.all_gather(ids_bt, by_width, axis=0, tiled=True)
    if not by_row:
        rows_btd = take_rows(table_vd, ids_bt, policy=policy)
    else:
        local_ids_bt = ids_bt - jax.lax.axis_index(by_row) * table_vd.shape[0]
        is_here_bt = (local_ids_bt >= 0) & (local_ids_bt < table_vd.shape[0])
        rows_btd = take_rows(table_vd, jnp.where(is_here_bt, local_ids_bt, 0), policy=policy)
        rows_btd = jnp.where(is_here_bt[..., None], rows_btd, jnp.zeros_like(rows_btd))
        if scattered:
            rows_btd = jax.lax.psum_scatter(rows_btd, by_row, scatter_dimension=1, tiled=True)
        else:
            rows_btd = jax.lax.psum(rows_btd, by_row)
    if by_width:
        rows_btd = jax.lax.all_to_all(rows_btd, by_width, split_axis=0, concat_axis=2, tiled=True)
    if by_row:
        is_id_bt = (own_ids_bt >= 0) & (own_ids_bt < num_rows)
        if scattered:
            size = rows_btd.shape[1]
            start = jax.lax.axis_index(by_row) * size
            is_id_bt = jax.lax.dynamic_slice_in_dim(is_id_bt, start, size, axis=1)
        rows_btd = jnp.where(is_id_bt[..., None], rows_btd, jnp.nan)
    return rows_btd
