"""What 8-bit operands lose, by matmul: as metrics, and as a warning that names the matmul.

Dims: L layer of a stack, O operand (x, weight, cotangent), C column of a history.
"""

import collections
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import numpy as np

from jaxinfra.model.definition import Parameters, by_path
from jaxinfra.model.projection import QUANTIZATION
from jaxinfra.ops.fp8_operands import NUM_LOST, OPERANDS

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
    """What the backward pass emitted of each 8-bit matmul, by its path: fp32 [L, O, 3], the columns
    as ``fp8_operands.seen``.
    """
    suffix = f"/{QUANTIZATION}"
    return {
        path.removesuffix(suffix): jax.numpy.concatenate(
            [history_LOC[..., :1], history_LOC[..., -NUM_LOST:]], axis=-1
        )
        for path, history_LOC in by_path(state).items()
        if path.endswith(suffix)
    }


def fp8_record(emitted: Mapping[str, Any]) -> dict[str, float]:
    """For ``metrics.jsonl``: ``fp8/SITE/OPERAND/{largest, vanished, lost}``, of the layer where it
    is most.
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
    """Compares what each 8-bit matmul loses with the steps before; says where it grows."""

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
