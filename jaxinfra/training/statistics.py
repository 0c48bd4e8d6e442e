"""Statistics of a step: of parameters and activations by layer, and of what 8-bit operands lose by
matmul.

A run that asks for statistics has a second compiled step, which computes the same and the
statistics too. It runs at the steps that are asked for alone, so the others run the program of a
run that asks for none. (A branch in one program would keep what both branches need alive in every
step.)

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
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import Parameters, by_path
from jaxinfra.model.passes import Sums
from jaxinfra.model.projection import QUANTIZATION
from jaxinfra.model.statistics import PREFIX
from jaxinfra.numerics.storage import exact
from jaxinfra.ops.fp8_operands import NUM_LOST, OPERANDS

type StatisticsTable = dict[str, dict[str, Any]]
"""Numbers by array and name; of the arrays of a stack a list, one for each repetition."""


def parameter_statistics(
    dims: Parameters, *, gradients: Parameters, before: Parameters, after: Parameters
) -> StatisticsTable:
    """Computes statistics of each parameter, by layer where it is stacked: root mean squares and
    largest values of gradient and weight, the update's relative size, and elements of the gradient
    that are not finite.

    Args:
        dims: of the parameters, which say what is stacked.
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
    """Formats both tables for ``statistics.jsonl``; None where a number is not finite.

    Args:
        sums: what layers emit, one entry for each distinct block, repetitions in front.
        parameters: of ``parameter_statistics``, fetched.
    """
    activations: StatisticsTable = {}
    for number, block in enumerate(sums):
        for name in block.added:
            site, _, kind = name.removeprefix(PREFIX).rpartition("/")
            if name.startswith(PREFIX) and kind == "elements":
                activations[f"blocks/{number}/{site}"] = _of_site(block, f"{PREFIX}{site}/")
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
    """Names each number for TensorBoard: statistics/blocks/0/stream/rms/3 is repetition 3's."""
    found: dict[str, float] = {}
    for table in (record["activations"], record["parameters"]):
        for path, values in table.items():
            for name, value in values.items():
                each = value if isinstance(value, list) else [value]
                for number, one in enumerate(each):
                    suffix = f"/{number}" if isinstance(value, list) else ""
                    if one is not None:
                        found[f"{PREFIX}{path}/{name}{suffix}"] = one
    return found


@final
class StepPrograms:
    """The compiled steps of a run, and the choice which one a step runs.

    ``plain`` may be replaced, before it has run.

    Args:
        plain: the training step.
        statistics: the step that says more; None: there is none.
        every: steps between two of those.
    """

    def __init__(self, plain: Any, statistics: Any, *, every: int | None):
        self.plain = plain
        self._statistics = statistics
        self._every = every
        self._has_run: set[bool] = set()

    def asks(self, step: int) -> bool:
        """Whether statistics are asked for at a step."""
        return self._every is not None and step % self._every == 0

    def phase(self, step: int) -> str:
        """Returns what a call for this step does first: "compile" or, once it has run, "step"."""
        return "step" if self.asks(step) in self._has_run else "compile"

    def __call__(self, step: int, state: Any, batch: Batch) -> Any:
        """Runs a step; the state is consumed."""
        self._has_run.add(self.asks(step))
        return (self._statistics if self.asks(step) else self.plain)(state, batch)


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
    """Collects what the backward pass emitted for each 8-bit matmul, by its path: fp32 [L, O, 3],
    the columns as ``fp8_operands.seen``.
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
    """Formats for ``metrics.jsonl``: ``fp8/SITE/OPERAND/{largest, vanished, lost}``, of the layer
    with the most.
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
    """The watch compares each 8-bit matmul's loss of values with the steps before, and says where
    it grows.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, str], collections.deque[np.ndarray]] = {}
        self._warned: set[tuple[str, str, str]] = set()

    def add(self, emitted: Mapping[str, Any]) -> list[str]:
        """Takes a step's values; returns a sentence for each operand that has begun to diverge.

        Each is named once, until it is as it was again.
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
    """What is wrong with the values of a step; None if nothing is."""
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
