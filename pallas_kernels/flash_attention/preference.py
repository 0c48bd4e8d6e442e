"""Which implementation "auto" tries first: the one measured to be fastest nearest to the case."""

import math
import pathlib

import jax

from pallas_kernels.common import tables

from .spec import AttentionMasks, AttentionSpec

TUNED = pathlib.Path(__file__).parent / "tuned"
QUESTION = "dispatch"
"""``tuned/dispatch-DEVICE.json``: a row's case is ``case_of``, its choice {"implementation": name},
its time that of forward and backward together."""

UNMEASURED = ("cudnn", "hopper", "xla")
"""The order where no table says better."""

_EXACT = ("dtype", "head_width", "value_width", "mask", "packed")
_NEAR = ("group", "q_length", "kv_length")


def case_of(
    spec: AttentionSpec, masks: AttentionMasks, q: jax.Array, k: jax.Array, v: jax.Array
) -> dict[str, tables.Value]:
    """The fields of a call on which the fastest implementation depends."""
    if spec.left is not None:
        mask = "window"
    else:
        mask = "full" if spec.right is None else "causal"
    return {
        "dtype": q.dtype.name,
        "head_width": q.shape[3],
        "value_width": v.shape[3],
        "mask": mask,
        "packed": masks.q_segment_ids is not None,
        "group": q.shape[2] // k.shape[2],
        "q_length": q.shape[1],
        "kv_length": k.shape[1],
    }


def preferences(
    spec: AttentionSpec, masks: AttentionMasks, q: jax.Array, k: jax.Array, v: jax.Array
) -> list[str]:
    """Implementations from fastest to slowest; all of ``UNMEASURED``, each once."""
    table = tables.find(TUNED, "flash_attention", QUESTION)
    measured = [] if table is None else rank(table, case_of(spec, masks, q, k, v))
    return measured + [name for name in UNMEASURED if name not in measured]


def rank(table: tables.Table, case: dict[str, tables.Value]) -> list[str]:
    """Implementations measured at the case nearest to this one, fastest first.

    Widths, dtype and mask must be the same; lengths and the heads' ratio count by their logarithms.
    Times of different cases do not compare, so that only one case is ranked.
    """
    rows = [row for row in table.rows if all(dict(row.case)[name] == case[name] for name in _EXACT)]
    if not rows:
        return []
    nearest = min((row.case for row in rows), key=lambda other: _distance(dict(other), case))
    times = {dict(row.choice)["implementation"]: row.ms for row in rows if row.case == nearest}
    return [str(name) for name in sorted(times, key=times.__getitem__) if name in UNMEASURED]


def _distance(a: dict[str, tables.Value], b: dict[str, tables.Value]) -> float:
    return sum(abs(_log2(a[name]) - _log2(b[name])) for name in _NEAR)


def _log2(value: tables.Value) -> float:
    assert isinstance(value, int), f"a count is an int, not {value!r}"
    return math.log2(max(1, value))
