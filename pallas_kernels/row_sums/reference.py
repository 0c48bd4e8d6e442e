"""The formula of ``sum_rows``. Dims: D device, R row, N column."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.row_inputs import RmsNorm


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsCall:
    """One device's arguments of a call."""

    partial: jax.Array  # [R, N]
    residual: jax.Array  # [R, N], the same on all devices
    norm: RmsNorm | None
    axis: str

    @property
    def devices(self) -> int:
        """Number of devices that add."""
        return jax.lax.axis_size(self.axis)


def sum_rows_reference(call: RowsCall) -> tuple[jax.Array, jax.Array]:
    """Computes x and its norm in fp32; devices' rows are added in the order of the axis."""
    parts_DRN = jax.lax.all_gather(call.partial, call.axis).astype(jnp.float32)
    total_RN = parts_DRN[0]
    for part_RN in parts_DRN[1:]:
        total_RN = total_RN + part_RN
    x_RN = (call.residual.astype(jnp.float32) + total_RN).astype(call.partial.dtype)
    return x_RN, x_RN if call.norm is None else call.norm(x_RN)
