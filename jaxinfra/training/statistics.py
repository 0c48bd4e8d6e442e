"""Statistics of a step: of parameters and activations per layer, and of values that are lost when
operands of 8-bit matmuls are quantized.

A run with statistics has a second compiled step, which also returns them. Only the steps that need
statistics run it, so all other steps run the program of a run without statistics. (A branch in one
program would keep the buffers of both branches alive in every step.)

Dims: L layer of a stack, O operand (x, weight, cotangent), C column of a record.
"""

import collections
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.axes import LAYERS
from jaxinfra.model.definition import Parameters, by_path
from jaxinfra.model.passes import STATISTICS, Sums
from jaxinfra.model.projection import QUANTIZATION
from jaxinfra.numerics.storage import exact
from jaxinfra.ops.fp8_operands import NUM_LOST, OPERANDS

type StatisticsTable = dict[str, dict[str, Any]]
"""Statistics by array and name; an array of a stack has one number per repetition."""


def parameter_statistics(
    dims: Parameters, *, gradients: Parameters, before: Parameters, after: Parameters
) -> StatisticsTable:
    """Computes statistics of each parameter, per layer if the parameter has a layer dim.

    They are RMS and largest value of gradient and weight, the ratio of the update's RMS to the
    weight's, and the number of gradient elements that are not finite.

    Args:
        dims: names of each parameter's dims, which show whether one is the layer.
        before, after: the parameters before and after the update.
    """
    logical = by_path(dims)
    new, old, found = by_path(exact(after)), by_path(exact(before)), {}
    for path, gradient in by_path(gradients).items():
        dims_of = logical[path].dims
        first = 1 if dims_of and dims_of[0] == LAYERS else 0
        axes = tuple(range(first, gradient.ndim))

        def rms(x: jax.Array, axes: tuple[int, ...] = axes) -> jax.Array:
            return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes))

        weight_rms = rms(old[path])
        tiny = jnp.asarray(jnp.finfo(weight_rms.dtype).tiny, weight_rms.dtype)
        found[path] = {
            "gradient_rms": rms(gradient),
            "gradient_largest": jnp.max(jnp.abs(gradient), axis=axes),
            "gradient_nonfinite": jnp.sum(~jnp.isfinite(gradient), axis=axes),
            "weight_rms": weight_rms,
            "weight_largest": jnp.max(jnp.abs(old[path]), axis=axes),
            "update_ratio": rms(new[path] - old[path]) / jnp.maximum(weight_rms, tiny),
        }
    return found


def statistics_record(sums: tuple[Sums, ...], parameters: StatisticsTable) -> dict[str, Any]:
    """Formats layers' and parameters' statistics for ``statistics.jsonl``; None where a number is
    not finite.

    Args:
        sums: statistics that layers emit, one entry for each distinct block, with a leading dim of
            repetitions.
        parameters: result of ``parameter_statistics``, fetched to the host.
    """
    activations: StatisticsTable = {}
    for number, block in enumerate(sums):
        for name in block.added:
            site, _, kind = name.removeprefix(STATISTICS).rpartition("/")
            if name.startswith(STATISTICS) and kind == "elements":
                activations[f"blocks/{number}/{site}"] = _of_site(block, f"{STATISTICS}{site}/")
    shown = {
        path: {name: _plain(value) for name, value in values.items()}
        for path, values in parameters.items()
    }
    return {"activations": activations, "parameters": shown}


def _of_site(block: Sums, site: str) -> dict[str, Any]:
    elements = np.asarray(block.added[f"{site}elements"], np.float64)
    return {
        "rms": _plain(np.sqrt(block.added[f"{site}squares"] / elements)),
        "largest": _plain(block.largest[f"{site}largest"]),
        "zeros": _plain(block.added[f"{site}zeros"] / elements),
        "nonfinite": _plain(block.added[f"{site}nonfinite"] / elements),
    }


def _plain(value: Any) -> Any:
    """Numbers for JSON."""
    array = np.asarray(value, np.float64)
    if array.ndim:
        return [_plain(each) for each in array]
    return float(array) if np.isfinite(array) else None


def flat_statistics(record: dict[str, Any]) -> dict[str, float]:
    """Names each statistic for TensorBoard, such as statistics/blocks/0/stream/rms/3 for repetition
    3.
    """
    found: dict[str, float] = {}
    for table in (record["activations"], record["parameters"]):
        for path, values in table.items():
            for name, value in values.items():
                each = value if isinstance(value, list) else [value]
                for number, one in enumerate(each):
                    suffix = f"/{number}" if isinstance(value, list) else ""
                    if one is not None:
                        found[f"{STATISTICS}{path}/{name}{suffix}"] = one
    return found


LARGEST, VANISHED, LOST = "largest", "vanished", "lost"
REMEMBERED = 64  # steps that a new value is compared with
LEAST_REMEMBERED = 8
GROWTH = 16.0
"""Times the median of the steps before: a tensor whose largest element grows so fast is diverging.
(Four binades; gradients move by one or two from batch to batch.)"""
MOST_LOST = 1e-3
"""Share of elements that saturated or were not finite."""
MOST_VANISHED = 0.25
"""Share of elements that became 0, beside ``GROWTH`` times what it was."""


def emitted_by_site(state: Parameters) -> dict[str, jax.Array]:
    """Collects the statistics that the backward pass of each 8-bit matmul emitted. Keys are paths
    of matmuls, values fp32 [L, O, 3]: largest value, vanished and lost, as in
    ``fp8_operands.seen``.
    """
    suffix = f"/{QUANTIZATION}"
    return {
        path.removesuffix(suffix): jax.numpy.concatenate(
            [record_LOC[..., :1], record_LOC[..., -NUM_LOST:]], axis=-1
        )
        for path, record_LOC in by_path(state).items()
        if path.endswith(suffix)
    }


def fp8_record(emitted: Mapping[str, Any]) -> dict[str, float]:
    """Formats the statistics of 8-bit matmuls for ``metrics.jsonl``: ``fp8/SITE/OPERAND/largest``,
    ``.../vanished`` and ``.../lost``, each the maximum over layers.
    """
    return {
        f"fp8/{site}/{operand}/{what}": float(values.max())
        for site, operand, what, values in _each(emitted)
    }


def _each(emitted: Mapping[str, Any]) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Site, operand, what, and that of each layer."""
    for site, values in emitted.items():
        values_LOC = np.asarray(values).reshape(-1, len(OPERANDS), 1 + NUM_LOST)
        for o, operand in enumerate(OPERANDS):
            for c, what in enumerate((LARGEST, VANISHED, LOST)):
                yield site, operand, what, values_LOC[:, o, c]


@final
class Fp8Watch:
    """Finds 8-bit matmuls whose operands begin to lose more values than in earlier steps."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, str], collections.deque[np.ndarray]] = {}
        self._warned: set[tuple[str, str, str]] = set()

    def add(self, emitted: Mapping[str, Any]) -> list[str]:
        """Adds a step's statistics; returns a sentence for each operand that has begun to diverge.

        A diverging operand is reported once, until its values are back to normal.
        """
        found = []
        for site, operand, what, values_L in _each(emitted):
            key = (site, operand, what)
            before = self._before.setdefault(key, collections.deque(maxlen=REMEMBERED))
            text = _judged(what, values_L, before)
            if text is None:
                self._warned.discard(key)
                before.append(values_L)
            elif key not in self._warned:
                self._warned.add(key)
                found.append(f"{site}, {operand}: {text}")
        return found


def _judged(what: str, values_L: np.ndarray, before: Any) -> str | None:
    """Fault of a step's values; None if there is none."""
    layer = int(np.argmax(values_L))
    value = float(values_L[layer])
    if what == LOST:
        if value <= MOST_LOST:
            return None
        return f"{value:.2%} of layer {layer}'s elements saturate or are not finite in 8 bits"
    if len(before) < LEAST_REMEMBERED:
        return None
    medians_L = [statistics.median(column) for column in np.stack(before).T]
    grown_L = values_L > GROWTH * np.asarray(medians_L)
    if what == VANISHED:
        grown_L &= values_L > MOST_VANISHED
    if not grown_L.any():
        return None
    layer = int(np.argmax(np.where(grown_L, values_L, -np.inf)))
    value, usual = float(values_L[layer]), medians_L[layer]
    if what == VANISHED:
        return f"{value:.1%} of layer {layer}'s elements become 0 in 8 bits; it was {usual:.2%}"
    return f"layer {layer}'s largest element is {value:.3g}; the median before was {usual:.3g}"
