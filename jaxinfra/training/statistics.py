"""Per-layer statistics of a step: on the devices, as a record, and by which program.

A run that asks for them has a second compiled step, which computes the same and the statistics
too. It runs at the steps that are asked for alone, so the others run the program of a run that
asks for none. (A branch in one program would keep what both branches need alive in every step.)
"""

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.axes import LAYERS
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import Parameters, by_path
from jaxinfra.model.passes import Sums
from jaxinfra.model.statistics import PREFIX
from jaxinfra.numerics.storage import exact

type StatisticsTable = dict[str, dict[str, Any]]
"""Numbers by array and name; of the arrays of a stack a list, one for each repetition."""


def parameter_statistics(
    dims: Parameters, *, gradients: Parameters, before: Parameters, after: Parameters
) -> StatisticsTable:
    """Of each parameter, by layer where it is stacked: root mean squares and largest absolute
    values of gradient and weight, the update's root mean square over the weight's, and how many of
    the gradient's elements are not finite.

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
    """Both tables as ``statistics.jsonl`` holds them; None where a number is not finite.

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
    """By one name each, for TensorBoard: statistics/blocks/0/stream/rms/3 is repetition 3's."""
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
    """The compiled steps of a run, and which one a step runs.

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
        """What a call for this step does first: "compile" or, once it has run, "step"."""
        return "step" if self.asks(step) in self._has_run else "compile"

    def __call__(self, step: int, state: Any, batch: Batch) -> Any:
        """Runs a step; the state is consumed."""
        self._has_run.add(self.asks(step))
        return (self._statistics if self.asks(step) else self.plain)(state, batch)
