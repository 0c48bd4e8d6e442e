"""Whether the kernels can compute a call, and whether they were measured to be faster.

A case of the table ``tuned/dispatch-DEVICE.json`` has ``op``, ``devices`` of the axis, and, of one
device's product, ``rows``, ``depth`` (of all factors) and ``columns``; a choice has
``implementation``.
"""

import dataclasses
import pathlib
from typing import Any

import jax
from jax import lax

from pallas_kernels.common import device, tables
from pallas_kernels.common.chosen import announce

TUNED = pathlib.Path(__file__).parent / "tuned"
MULTIPLE = 256
"""Multiple of positions on a device, and of the rows' width that is gathered."""
COLUMN_MULTIPLE = 64
LEAST_COLUMNS = 256
LEAST_GAIN = 1.02
"""Least measured speedup over XLA's collective and product."""
MOST_DEVICES = 2
"""Devices of the largest mesh on which the kernels were run."""
_WITHIN = {"rows": 1.0, "depth": 1.0, "columns": 1.0}
"""Largest ``|log2(ratio)|`` of a size to a measured one at which the measurement counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """The sizes of one call, on one device."""

    dtypes: frozenset[str]
    axis: str
    devices: int
    positions: int  # on a device
    rows: int  # of one device's product
    depths: tuple[int, ...]
    columns: tuple[int, ...]
    sent_width: int  # columns of what is sent

    def unsupported(self) -> str | None:
        """Returns why the kernels cannot compute this call; None if they can."""
        if reason := device.why_not_one_hopper():
            return reason
        if self.dtypes not in ({"bfloat16"}, {"float16"}):
            return (
                f"operands are {', '.join(sorted(self.dtypes))}; they are all bfloat16 or float16"
            )
        if self.devices == 1:
            return f"{self.axis}=1: there is no peer"
        if jax.process_count() > 1:
            return "devices of several processes, which cannot write to one another's memory"
        if (devices := jax.sharding.get_abstract_mesh().size) > MOST_DEVICES:
            return f"a mesh of {devices} devices; the kernels were run on {MOST_DEVICES}"
        if self.positions % MULTIPLE:
            return f"{self.positions} positions on a device are no multiple of {MULTIPLE}"
        if self.sent_width % MULTIPLE:
            return f"a width of {self.sent_width} is no multiple of {MULTIPLE}"
        for width in (*self.depths, *self.columns):
            if width % COLUMN_MULTIPLE or width < LEAST_COLUMNS:
                known = f"multiples of {COLUMN_MULTIPLE} from {LEAST_COLUMNS} on"
                return f"a width of {width}: widths are {known}"
        return None


def gathering(x: jax.Array, weights: Any, *, axis: str, transposed: bool) -> CollectiveCall:
    """Returns the sizes of ``all_gather(x) @ weight``; the kernel has the widest weight."""
    devices, (batch, positions, depth) = lax.axis_size(axis), x.shape
    return CollectiveCall(
        dtypes=frozenset({x.dtype.name}), axis=axis, devices=devices, positions=positions,
        rows=batch * positions * devices, depths=(depth,), sent_width=depth,
        columns=tuple(w.shape[0 if transposed else 1] for w in weights),
    )  # fmt: skip


def scattering(factors: Any, *, axis: str, transposed: bool) -> CollectiveCall:
    """Returns the sizes of ``reduce_scatter(sum(x @ weight))``."""
    x, weight = factors[0]
    devices, columns = lax.axis_size(axis), weight.shape[0 if transposed else 1]
    return CollectiveCall(
        dtypes=frozenset(x.dtype.name for x, _ in factors), axis=axis, devices=devices,
        positions=x.shape[1] // devices, rows=x.shape[0] * x.shape[1],
        depths=tuple(x.shape[2] for x, _ in factors), columns=(columns,), sent_width=columns,
    )  # fmt: skip


def fastest(op: str, call: CollectiveCall) -> str:
    """Returns the implementation for "auto": the kernels where measured to be faster than XLA."""
    reason = call.unsupported()
    chosen = "hopper" if reason is None and _is_faster(op, call) else "xla"
    case = f"{call.rows} x {sum(call.depths)} x {sum(call.columns)}, {call.axis}={call.devices}"
    announce(op, chosen, case, because=reason)
    return chosen


def _is_faster(op: str, call: CollectiveCall) -> bool:
    rows = tables.find(TUNED, "dispatch")
    sizes = {"rows": call.rows, "depth": sum(call.depths), "columns": max(call.columns)}
    same: dict[str, tables.Value] = {"op": op, "devices": call.devices}
    for _, case in tables.by_nearness(rows, same, sizes, _WITHIN)[:1]:
        ms = {str(dict(row.choice)["implementation"]): row.ms for row in case}
        return ms["hopper"] * LEAST_GAIN < ms["xla"]
    return False


def is_measured(devices: int, *, of: int) -> bool:
    """Whether "auto" may choose the kernels.

    Args:
        devices: number of devices of the axis.
        of: number of devices of the mesh.
    """
    if of > MOST_DEVICES or jax.process_count() > 1 or device.why_not_one_hopper() is not None:
        return False
    return any(dict(row.case)["devices"] == devices for row in tables.find(TUNED, "dispatch"))
