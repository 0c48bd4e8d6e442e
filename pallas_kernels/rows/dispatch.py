"""What the ops over rows share: which implementation computes a call, and shapes to measure at."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp

from pallas_kernels.common import device, tables
from pallas_kernels.common.chosen import announce
from pallas_kernels.common.errors import InputError, UnsupportedError

from .choice import config_for
from .formula import RowCall

NAMES = ("hopper", "xla", "reference")
QUESTION = "dispatch"
"""``tuned/dispatch-DEVICE.json``: a row's case is ``Case.fields``, its choice
{"implementation": "hopper" or "xla"}, its time that of one direction alone."""

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
"""Of the kernels' inputs and results."""

LEAST_GAIN = 1.03
"""How much faster than XLA a kernel must have been measured for "auto" to take it."""

_FARTHEST = {"columns": 1.0, "rows": 2.0}
"""Powers of two from the nearest measured shape within which its measurement is trusted."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One direction of a call, as rows."""

    op: str  # the folder of kernels
    form: str  # what of it: "rms_norm", "layer_norm+residual"
    direction: str  # "forward" or "gradient"
    rows: int
    call: RowCall

    def fields(self) -> dict[str, tables.Value]:
        """What the fastest implementation depends on."""
        return {
            "form": self.form,
            "direction": self.direction,
            "rows": self.rows,
            "columns": self.call.columns,
            "dtype": self.call.dtype.name,
        }


def choose(implementation: str, case: Case, *, tuned: pathlib.Path, num_devices: int) -> str:
    """Who computes one direction of a call: "hopper", "xla" or "reference".

    Raises:
        InputError: no such implementation.
        UnsupportedError: "hopper" is named and cannot.
    """
    if implementation not in ("auto", *NAMES):
        raise InputError(
            f"implementation={implementation!r} is unknown; choose auto, {', '.join(NAMES)}"
        )
    if implementation not in ("auto", "hopper"):
        return implementation
    reason = why_not_hopper(case, num_devices=num_devices)
    if implementation == "auto":
        name = "hopper" if reason is None and _was_faster(case, tuned) else "xla"
        told = f"{case.direction} of {case.rows}x{case.call.columns} {case.call.dtype}"
        announce(case.form, name, told, because=None if reason is None else f"not hopper: {reason}")
        return name
    if reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute the {case.direction} of this {case.form}: "
            f"{reason}. implementation='xla' can"
        )
    return "hopper"


def why_not_hopper(case: Case, *, num_devices: int = 1) -> str | None:
    """Why the kernel cannot compute a call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"{facts.kind} is not a Hopper GPU (compute capability 9.0)"
    if case.call.dtype not in DTYPES:
        return f"x is {case.call.dtype}; the kernels take bfloat16, float16 and float32"
    if num_devices > 1:
        return f"the call is spread over {num_devices} devices and the kernel runs on one"
    try:
        config_for(case.rows, case.call)
    except UnsupportedError as error:
        return str(error)
    return None


def _was_faster(case: Case, tuned: pathlib.Path) -> bool:
    """At the nearest measured shape whose rows pass through the GPU in the same way."""
    table = tables.find(tuned, case.op, QUESTION)
    if table is None:
        return False
    way = type(config_for(case.rows, case.call))
    fields = case.fields()
    times: dict[tuple[float, int, int], dict[str, float]] = {}
    for row in table.rows:
        other, name = dict(row.case), str(dict(row.choice)["implementation"])
        if any(other[exact] != fields[exact] for exact in ("form", "direction", "dtype")):
            continue
        apart = tables.octaves_apart(other, {"rows": case.rows, "columns": case.call.columns})
        if any(apart[dim] > _FARTHEST[dim] for dim in apart):
            continue
        rows, columns = tables.count(other["rows"]), tables.count(other["columns"])
        call = dataclasses.replace(case.call, columns=columns)
        there = dataclasses.replace(case, rows=rows, call=call)
        # Last, for it counts what fits for each of hundreds of rows.
        if why_not_hopper(there) is None and type(config_for(rows, call)) is way:
            times.setdefault((sum(apart.values()), rows, columns), {})[name] = row.ms
    if not times:
        return False
    nearest = times[min(times)]
    return {"hopper", "xla"} <= set(nearest) and (nearest["xla"] >= LEAST_GAIN * nearest["hopper"])


def check_input(op: str, x: jax.Array, axis: int = -1) -> None:
    """Refuses what is not rows of floats.

    Raises:
        InputError: a scalar, an integer array, or another axis than the last.
    """
    if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"x is {x.dtype}{list(x.shape)}; {op} takes floats of one dim or more")
    if axis not in (-1, x.ndim - 1):
        raise InputError(
            f"axis={axis} of shape {x.shape}; {op} is over the last dim alone: move it there"
        )


def as_rows(x: jax.Array) -> jax.Array:
    """[..., C] to [R, C]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowWorkload:
    """A shape that ops over rows are checked and measured at."""

    rows: int
    columns: int

    @property
    def name(self) -> str:
        """As in results: ``32768x4096``."""
        return f"{self.rows}x{self.columns}"


BARS = (
    RowWorkload(rows=32768, columns=4096),
    RowWorkload(rows=8192, columns=32768),
    RowWorkload(rows=4096, columns=131072),
)
"""The shapes on which the kernels are held against a copy."""

OTHERS = (
    RowWorkload(rows=16384, columns=8192),
    RowWorkload(rows=1048576, columns=128),
    RowWorkload(rows=131072, columns=1024),
    RowWorkload(rows=65536, columns=2048),
)
"""Narrow rows: heads (128) and the widths of small models."""
