"""A run's traces: of all ranks and devices, each with what is known of the program."""

import dataclasses
from pathlib import Path

from jaxinfra.diagnostics.launch_names import read_launches, with_names
from jaxinfra.diagnostics.trace import events_by_device, traced_ranks
from jaxinfra.diagnostics.trace_axes import mesh_axes
from jaxinfra.diagnostics.waterfall import Waterfall, explain
from jaxinfra.errors import DataError
from jaxinfra.runtime.files import read_json
from jaxinfra.training.profile import STEP_FILE, TracedStep


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """A step of a run, as its devices traced it."""

    waterfall: Waterfall  # of the device that was asked for
    by_device: dict[str, Waterfall]  # of all, by name: rank 1, GPU 3, rank 1 GPU 3
    step: TracedStep | None  # None: nobody wrote it down


def read_traced_run(
    directory: Path, *, rank: int = 0, device: int = 0, steps: int | None = None
) -> TracedRun:
    """Reads all traces of a run, or of any directory with one in it.

    Args:
        rank: the process whose ``device`` is asked for.
        steps: how many each trace holds; found from it by default.

    Raises:
        DataError: no trace, or none of that device.
    """
    launches, axes = read_launches(directory), mesh_axes(directory)
    ranks = list(traced_ranks(directory)) or [rank]
    events = {each: events_by_device(directory, rank=each) for each in ranks}
    if device not in events.get(rank, {}):
        there = ", ".join(f"rank {r}: {sorted(found)}" for r, found in events.items())
        raise DataError(f"{directory} has no trace of GPU {device} of rank {rank}; it has {there}")
    found: dict[tuple[int, int], Waterfall] = {
        (which, number): explain(with_names(each, launches), steps=steps, axes=axes)
        for which, by_device in events.items()
        for number, each in by_device.items()
    }
    names = {key: _name(*key, ranks=len(ranks), events=events) for key in found}
    files = sorted(directory.rglob(STEP_FILE), key=lambda file: file.stat().st_mtime)
    return TracedRun(
        waterfall=found[rank, device],
        by_device={names[key]: each for key, each in found.items()},
        step=read_json(files[-1], holds=TracedStep) if files else None,
    )


def _name(rank: int, device: int, *, ranks: int, events: dict[int, dict]) -> str:
    parts = [f"rank {rank}"] if ranks > 1 else []
    if len(events[rank]) > 1 or not parts:
        parts.append(f"GPU {device}")
    return " ".join(parts)
