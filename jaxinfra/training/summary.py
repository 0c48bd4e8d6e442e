"""The outcome of a run, computed from its records: summary, pictures, and the tokens read of each
source.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint import directory_layout, metadata, processes
from jaxinfra.checkpoint.checkpointer import require_finite_parameters
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config.data import DataFormat
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.data.baseline import compressed_bits_per_byte
from jaxinfra.data.corpora import schedule_of
from jaxinfra.errors import JaxinfraError
from jaxinfra.runtime.files import read_log
from jaxinfra.runtime.goodput import goodput
from jaxinfra.runtime.picture_style import BLUE, GRAY, RED, new_picture, save_picture
from jaxinfra.training.job import Job
from jaxinfra.training.metrics import MetricsLog, finite
from jaxinfra.training.own_data import OwnTexts, Texts
from jaxinfra.training.progress import Clock, median_step_s, peak_bytes

LOADS = "layers/expert_tokens"
_COUNTS = {"layers/dropped": "dropped by capacity", "layers/overflowed": "without room"}


def draw_loads(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Plots, by step, the largest and smallest expert load relative to a layer's mean, and the
    dropped choices. Does nothing if the model has no experts.
    """
    rows = [record for record in records if f"{LOADS}/imbalance" in record]
    if not rows:
        return
    steps = [record["step"] for record in rows]
    figure, axes = new_picture(8, 4.5)
    axes.plot(
        steps,
        [record[f"{LOADS}/imbalance"] for record in rows],
        color=RED,
        label="most tokens of an expert / mean of its layer",
    )
    axes.plot(
        steps,
        [record[f"{LOADS}/least"] / max(record[f"{LOADS}/mean"], 1.0) for record in rows],
        color=BLUE,
        label="least tokens of an expert / mean",
    )
    axes.axhline(1.0, color=GRAY, linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("load")
    counts = {name: text for name, text in _COUNTS.items() if name in rows[-1]}
    if counts:
        right = axes.twinx()
        right.set_ylabel("choices")
        for name, text in counts.items():
            right.plot(steps, [record[name] for record in rows], linestyle=":", label=text)
        right.legend(loc="upper left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    save_picture(figure, file)


def draw_run(records: Sequence[dict[str, Any]], run: RunDirectory) -> None:
    """Plots the losses and the expert loads of a run into its directory."""
    draw_loss(records, run.picture_file)
    draw_loads(records, run.loads_picture_file)


def draw_loss(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Plots the training loss by step, its moving average, and the held-out losses. Of a run of
    reinforcement learning it plots the rewards instead.

    A step whose loss was not finite (None) is a gap.
    """
    figure, axes = new_picture(8, 4.5)
    name, label = learning_curve(records)
    steps, losses = _curve(records, name)
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, smoothed(losses), color=BLUE, label="training, smoothed")
    heldout_steps, heldout_losses = _curve(records, "heldout_loss")
    if heldout_steps:
        axes.plot(heldout_steps, heldout_losses, "o-", color=RED, label="held-out")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, file)


def learning_curve(records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Returns the name of the figure that shows whether a run learns, and its label with its unit:
    the loss in nats per token, per pair of answers or per answer, or the reward.
    """
    names = {name for record in records for name in record}
    if "rl/reward" in names:
        return "rl/reward", "reward per completion"
    if "preferences/good_reward" in names:
        return "loss", "loss, per answer"
    of_pairs = any(name.startswith("preferences/") for name in names)
    return "loss", "loss, per pair" if of_pairs else "loss, nats per token"


def _curve(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [record for record in records if name in record]
    values = [math.nan if record[name] is None else record[name] for record in found]
    return [record["step"] for record in found], values


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns a centred moving average, so that the curve does not lag behind the loss.

    The window is a fiftieth of the run, shorter at the ends; values that are not finite are left
    out.
    """
    half = len(values) // 100
    result = []
    for place in range(len(values)):
        reach = min(half, place, len(values) - 1 - place)
        near = [x for x in values[place - reach : place + reach + 1] if math.isfinite(x)]
        result.append(sum(near) / len(near) if near else math.nan)
    return result


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SourceRead:
    """Amount of text that a run has read from one source of its mixture; ``read_mixture`` returns
    one per source.

    Examples:
        >>> for each in jaxinfra.read_mixture("runs/mixed"):
        ...     print(each.name, each.sequences)
        cats 2
        dogs 6
    """

    name: str  # of the source
    wanted: float  # fraction of all sequences so far, as the weights ask
    read: float  # fraction of all sequences so far, as it was
    sequences: int  # rows of batches
    tokens: int  # with a separator for each document
    epochs: float  # passes over the whole source


def read_mixture(run: str | Path) -> tuple[SourceRead, ...]:
    """Returns the amount of text that a run has read from each source of its mixture so far; empty
    for a run without a mixture.

    Args:
        run: the run's directory.

    Raises:
        ConfigError: the directory does not hold a run.

    Examples:
        >>> [each.name for each in jaxinfra.read_mixture("runs/mixed")]
        ['cats', 'dogs']
    """
    directory = RunDirectory(Path(run))
    config = directory.read_config()
    records, _ = read_log(directory.metrics_file, holds=dict[str, Any])
    return mixture_read(config, records)


def mixture_read(config: RunConfig, records: Iterable[Mapping[str, Any]]) -> tuple[SourceRead, ...]:
    """Computes what ``read_mixture`` returns from a config and the records of ``metrics.jsonl``."""
    names = [each.name for each in config.data.mixture]
    of_steps = [each for each in records if all(f"mixture/{n}/epochs" in each for n in names)]
    if not names or not of_steps:
        return ()
    last = of_steps[-1]
    total = last["step"] * config.training.batch_size
    wanted = schedule_of(config.data, config.training).mean_shares(last["step"])
    return tuple(
        SourceRead(
            name=name,
            wanted=float(share),
            read=last[f"mixture/{name}/sequences"] / total,
            sequences=last[f"mixture/{name}/sequences"],
            tokens=last[f"mixture/{name}/tokens"],
            epochs=last[f"mixture/{name}/epochs"],
        )
        for name, share in zip(names, wanted, strict=True)
    )


def mixture_cells(rows: Sequence[SourceRead]) -> list[list[str]]:
    """Returns the cells of the table of a mixture's sources, header row first."""
    return [
        ["source", "wanted", "read", "sequences", "tokens", "epochs"],
        *(
            [
                each.name,
                f"{each.wanted:.2%}",
                f"{each.read:.2%}",
                f"{each.sequences:,}",
                f"{each.tokens:,}",
                f"{each.epochs:.3g}",
            ]
            for each in rows
        ),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a call of ``train``: the run's summary, or the step where it stopped.

    Examples:
        >>> config = jaxinfra.read_run_config("mine.toml")
        >>> outcome = jaxinfra.train(config, "runs/mine", resume=True)
        runs/mine is complete: all of its 4 steps are done; ...
        >>> outcome.was_complete, outcome.result["steps"]
        (True, 4)
    """

    summary: dict[str, Any] | None  # None where it was asked to stop before the end
    step: int  # last completed step
    was_complete: bool = False  # the run was already complete, and the call did nothing
    together: bool = False  # all processes of the job return at this step

    @property
    def result(self) -> dict[str, Any]:
        """The figures of the run's summary.json; raises JaxinfraError if the run was stopped before
        its end.
        """
        if self.summary is None:
            raise JaxinfraError(f"the run was asked to stop at step {self.step}: resume it first")
        return self.summary


def final_summary(config: RunConfig, run: RunDirectory) -> dict[str, Any] | None:
    """Returns the summary of a complete run; None if the run has steps left to do.

    Raises CheckpointError if the run's last checkpoint holds another model than its config.
    """
    summary, steps = run.read_summary(), config.training.steps
    if summary is None or max(directory_layout.steps(run.checkpoints), default=0) != steps:
        return None
    # Its last state is what the run was for: damaged, it is made again from the one before.
    damaged = processes.on_first(lambda: bool(verify(run.checkpoints, steps)))
    if damaged or summary.get("steps") != steps:
        return None
    newest = run.checkpoints / directory_layout.step_name(steps)
    saved = metadata.read(newest).identity
    metadata.require_same_identity(saved, identity(run, config), where=newest)
    processes.on_first(lambda: require_finite_parameters(newest))
    return summary


def summarize(
    job: Job,
    corpora: Texts,
    log: MetricsLog,
    clock: Clock,
    *,
    causes: dict[str, float],
    stall_s: float,
) -> dict[str, Any]:
    """Computes the values of ``summary.json``; a figure that is unknown or not finite is None.

    It includes held-out losses if there is held-out text, ``heldout_sets`` if there are several
    sets, ``mixture`` for a mixture of sources, and ``heldout_preferences/...`` for answer pairs.

    Args:
        causes: seconds of wall time by cause (``jaxinfra.runtime.goodput``).
        stall_s: seconds that training waited for saves after the last recorded step.
    """
    steps = job.config.training.steps
    last = log.find("loss")
    assert last is not None, "a run has at least one step"
    step_s = median_step_s(log.records)
    return finite(
        {
            "final_loss": last["loss"],
            **_heldout(corpora, log, step=steps, preferences=job.config.preferences),
            "tokens_per_s": clock.tokens_per_s(step_s),
            "mfu": clock.mfu(step_s),
            "steps": steps,
            "skipped": last["skipped"],
            "stall_s": stall_s + sum(record.get("stall_s", 0.0) for record in log.records),
            "wall_s": clock.elapsed_s,
            "peak_bytes": peak_bytes(),
            "goodput": goodput(causes),
            "wall_s_by_cause": causes,
            "num_parameters": job.model.num_parameters,
            **_mixture(job, log),
        }
    )


def _heldout(
    corpora: Texts, log: MetricsLog, *, step: int, preferences: PreferenceConfig | None
) -> dict[str, Any]:
    """Figures of the held-out sets, together and each; none if nothing is held out."""
    if not corpora.heldout:
        return {}
    heldout = log.find("heldout_loss", step=step)
    assert heldout is not None, "a run is evaluated at its end"
    loss = heldout["heldout_loss"]
    several: dict[str, Any] = {
        "heldout_loss": loss,
        "heldout_perplexity": None if loss is None else math.exp(min(loss, 700.0)),
    }
    if isinstance(corpora, OwnTexts):  # of ids, whose bytes nobody knows
        if len(corpora.heldout) > 1:
            losses = {name: heldout.get(f"heldout/{name}/loss") for name in corpora.heldout}
            several["heldout_sets"] = {name: {"loss": each} for name, each in losses.items()}
        return several
    several |= {
        name: value for name, value in heldout.items() if name.startswith("heldout_preferences/")
    }
    if preferences is not None and preferences.data_format is not DataFormat.PREFERENCES:
        return several  # scores and single answers say nothing of bytes
    baseline = compressed_bits_per_byte(corpora.ranking_documents())
    several |= {
        "heldout_bits_per_byte": heldout["heldout_bits_per_byte"],
        "heldout_bytes": sum(corpora.heldout[name].num_bytes for name in corpora.ranking),
        "gzip_bits_per_byte": baseline.gzip_each,
        "xz_bits_per_byte": baseline.xz_all,
    }
    if len(corpora.heldout) > 1:
        several["heldout_sets"] = {
            name: finite(
                {
                    "loss": heldout.get(f"heldout/{name}/loss"),
                    "bits_per_byte": heldout.get(f"heldout/{name}/bits_per_byte"),
                    "bytes": arrays.num_bytes,
                }
            )
            for name, arrays in corpora.heldout.items()
        }
    return several


def _mixture(job: Job, log: MetricsLog) -> dict[str, Any]:
    read = mixture_read(job.config, log.records)
    return {"mixture": [dataclasses.asdict(each) for each in read]} if read else {}
