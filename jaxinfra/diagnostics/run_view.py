"""Data for the views of a run: while it trains, afterwards, and compared to other runs."""

import collections
import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.diagnostics.delays import Explanation, explain_step
from jaxinfra.diagnostics.host_delays import phase_ms
from jaxinfra.diagnostics.memory.picture import OUT_OF_MEMORY_PICTURE
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import read_bytes, read_json, read_log
from jaxinfra.runtime.goodput import goodput, read_sessions, sum_causes
from jaxinfra.runtime.recorder import read_incidents, read_records
from jaxinfra.training.metrics import STATISTICS_FILE
from jaxinfra.training.summary import SourceRead, mixture_read


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """The contents of a run directory's files at one moment."""

    path: Path
    config: dict[str, Any]  # settings by their dotted path
    tokens_per_step: int
    num_steps: int
    records: list[dict[str, Any]]  # of steps, oldest first
    heldout: list[tuple[int, float]]  # step and loss
    heldout_sets: dict[str, float | None]  # the newest loss of each, where there are several
    mixture: tuple[SourceRead, ...]  # how much was read of each source, if there are several
    causes: dict[str, float]  # seconds of wall time
    goodput: float | None
    incidents: list[dict[str, Any]]
    ranks: dict[int, dict[str, float]]  # milliseconds per step by phase
    summary: dict[str, Any] | None
    explanation: Explanation | None
    layer_positions: tuple[tuple[int, int], ...]  # block and repetition of each layer
    layer_statistics: list[dict[str, Any]]  # of ``statistics.jsonl``, by step
    environments: list[dict[str, Any]]  # of each session
    spikes: list[dict[str, Any]]  # reports
    out_of_memory: bytes | None  # picture (PNG) of a first step that did not fit in memory

    @property
    def step_s(self) -> float | None:
        """The median time in seconds of the newest 50 steps."""
        times = [each["step_s"] for each in self.records[-50:] if each.get("step_s")]
        return statistics.median(times) if times else None

    def headline(self) -> dict[str, str]:
        """Returns names and values for the first line that ``jaxinfra watch`` shows."""
        last = self.records[-1] if self.records else {}
        step_s = self.step_s
        summary = self.summary or {}
        return {
            "step": f"{last.get('step', 0)}/{self.num_steps}",
            "loss": _number(last.get("loss"), ".4f"),
            **self._rewards(),
            "held-out": _number(self.heldout[-1][1] if self.heldout else None, ".4f"),
            "tokens/s": _number(self.tokens_per_step / step_s if step_s else None, ",.0f"),
            "ms per step": _number(1e3 * step_s if step_s else None, ".1f"),
            "MFU": _number(summary.get("mfu"), ".1%"),
            "peak": _number((summary.get("peak_bytes") or 0) / 2**30 or None, ".2f", " GiB"),
            "goodput": _number(self.goodput, ".1%"),
            "incidents": self._counted(),
            **{f"held-out {name}": _number(x, ".4f") for name, x in self.heldout_sets.items()},
        }

    def _rewards(self) -> dict[str, str]:
        """Newest figures of rollouts; none of a run without them."""
        last = next((each for each in reversed(self.records) if "rl/reward" in each), None)
        if last is None:
            return {}
        names = {"reward": ("rl/reward", ".3f"), "engine KL": ("rl/engine_kl", ".1e")}
        return {shown: _number(last.get(name), form) for shown, (name, form) in names.items()}

    def _counted(self) -> str:
        kinds = collections.Counter(each["kind"] for each in self.incidents)
        named = ", ".join(f"{kind} x {n}" if n > 1 else kind for kind, n in kinds.items())
        return f"{len(self.incidents)}: {named}" if named else "0"

    def incident_lines(self) -> list[str]:
        """Returns one line per kind of incident of the run; the newest kind comes last."""
        kinds: dict[str, list[dict[str, Any]]] = {}
        for each in self.incidents:
            kinds.setdefault(each["kind"], []).append(each)
        lines = []
        for kind, found in sorted(kinds.items(), key=lambda item: item[1][-1].get("time", 0.0)):
            last = found[-1]
            when = f"step {last['step']}"
            if len(found) > 1:
                when = f"{len(found)} times, steps {found[0]['step']} to {last['step']}, the last"
            lines.append(f"{kind}: {when}: {last['text']}")
        return lines


def read_view(directory: Path) -> RunView:
    """Reads the files of a run; raises ConfigError if the directory is not a run's."""
    run = RunDirectory(directory)
    config = run.read_config()
    lines, _ = read_log(run.metrics_file, holds=dict[str, Any])
    picture = directory / OUT_OF_MEMORY_PICTURE
    causes = sum_causes(read_sessions(run.goodput_file))
    evaluations = [line for line in lines if "heldout_loss" in line]
    return RunView(
        path=directory,
        config=_settings(config),
        tokens_per_step=config.training.batch_size * config.training.sequence_length,
        num_steps=config.training.steps,
        records=[line for line in lines if "loss" in line],
        heldout=[
            (line["step"], line["heldout_loss"])
            for line in evaluations
            if line["heldout_loss"] is not None
        ],
        heldout_sets={
            name.split("/")[1]: loss
            for name, loss in (evaluations or [{}])[-1].items()
            if name.startswith("heldout/") and name.endswith("/loss")
        },
        mixture=mixture_read(config, lines),
        causes={cause: seconds for cause, seconds in causes.items() if seconds > 0},
        goodput=goodput(causes),
        incidents=read_incidents(run.incidents_file),
        ranks={each.rank: phase_ms(each) for each in read_records(run.recorder)},
        summary=run.read_summary(),
        explanation=explain_step(directory),
        layer_positions=config.model.layer_positions,
        layer_statistics=_statistics(run),
        environments=read_log(run.environments_file, holds=dict[str, Any])[0],
        spikes=_spikes(run),
        out_of_memory=read_bytes(picture) if picture.is_file() else None,
    )


def _settings(config: RunConfig) -> dict[str, Any]:
    """Returns a run's settings by their dotted path, without the source that a mixture replaces."""
    values = dict(_flat(codec.to_dict(config)))
    for path in ("data.source", "data.heldout_source") if config.data.mixture else ():
        del values[path]
    return values


def differing_settings(views: Sequence[RunView]) -> dict[str, list[str]]:
    """Returns the settings that differ between runs, one value per run ("-" if unset)."""
    paths = dict.fromkeys(path for view in views for path in view.config)
    rows = {path: [str(view.config.get(path, "-")) for view in views] for path in paths}
    return {path: values for path, values in rows.items() if len(set(values)) > 1}


def _statistics(run: RunDirectory) -> list[dict[str, Any]]:
    lines, _ = read_log(run.path / STATISTICS_FILE, holds=_StatisticsLine)
    by_step = {line["step"]: line for line in lines}  # the later counts: a step done again
    return [by_step[step] for step in sorted(by_step)]


class _StatisticsLine(TypedDict):
    step: int
    activations: dict[str, Any]
    parameters: dict[str, Any]


def _spikes(run: RunDirectory) -> list[dict[str, Any]]:
    """The reports that can be read: a damaged one only told what happened."""
    found = []
    for file in sorted(run.path.glob("spikes/step-*.json")):
        with contextlib.suppress(ConfigError):
            found.append(read_json(file, holds=_SpikeReport))
    return found


class _SpikeReport(TypedDict):
    step: int
    text: str
    done: str
    samples: list[dict[str, Any]]


def _flat(values: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    for name, value in items:
        if isinstance(value, Mapping) or (isinstance(value, list) and value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit
