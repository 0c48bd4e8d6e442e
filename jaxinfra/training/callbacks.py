"""Hooks around a run's steps, and loggers that are such hooks.

``jaxinfra.train(..., callbacks=[...])`` calls them on the job's first process. They see plain
numbers after the step, so they change nothing of what it computes; what they raise ends the run.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from tensorboardX import SummaryWriter

from jaxinfra.config import codec
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import ConfigError

type Record = Mapping[str, Any]
"""Values by name, ``step`` among them: one line of metrics.jsonl."""


class Callback:
    """A hook protocol whose methods do nothing: override those that you need.

    Examples:
        >>> class Watch(jaxinfra.Callback):
        ...     def on_step(self, record):
        ...         if record["gradient_norm"] > 100:
        ...             print("large gradient at step", record["step"])
        >>> Watch().on_step({"step": 3, "gradient_norm": 250.0})  # as train calls it
        large gradient at step 3
    """

    def on_begin(self, run: Path, config: RunConfig) -> None:
        """The run is set up; its next step comes.

        Args:
            run: its directory.
        """

    def on_step(self, record: Record) -> None:
        """A step is done; ``record`` has its loss, learning rate, times and what layers emit."""

    def on_evaluation(self, record: Record) -> None:
        """The held-out loss is known: ``heldout_loss`` and ``heldout_bits_per_byte``."""

    def on_save(self, step: int) -> None:
        """A checkpoint of this step is being written."""

    def on_end(self, summary: Record | None) -> None:
        """The run ends; ``summary`` is that of ``summary.json``, None where it was stopped."""


class MetricsLogger(Callback):
    """A callback that writes every record, of steps and of evaluations, in one way.

    Examples:
        >>> class Printer(jaxinfra.MetricsLogger):
        ...     def write(self, values, *, step):
        ...         print(step, dict(values))
        >>> Printer().on_step({"step": 3, "loss": 2.5})
        3 {'loss': 2.5}
    """

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Writes the numbers of a record, which are all floats or ints."""
        raise NotImplementedError

    def on_step(self, record: Record) -> None:
        """Writes a step's numbers."""
        numbers = {
            name: value
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        }
        self.write(numbers, step=record["step"])

    def on_evaluation(self, record: Record) -> None:
        """Writes the numbers of an evaluation."""
        MetricsLogger.on_step(self, record)


@final
class JsonLinesLogger(MetricsLogger):
    """One JSON object per line, appended to a file.

    Examples:
        >>> logger = jaxinfra.JsonLinesLogger("log.jsonl")
        >>> logger.on_step({"step": 3, "loss": 2.5})
        >>> pathlib.Path("log.jsonl").read_text().strip()
        '{"step": 3, "loss": 2.5}'
    """

    def __init__(self, file: str | Path):
        self._file = Path(file)

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Appends a line."""
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


@final
class TensorBoardLogger(MetricsLogger):
    """Scalars in a TensorBoard directory.

    Examples:
        >>> logger = jaxinfra.TensorBoardLogger("events")
        >>> logger.on_step({"step": 3, "loss": 2.5})
        >>> logger.on_end(None)
    """

    def __init__(self, directory: str | Path):
        self._writer = SummaryWriter(str(directory))

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Adds a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, summary: Record | None) -> None:
        """Closes the files."""
        self._writer.close()


@final
class WandbLogger(MetricsLogger):
    """Weights & Biases; ``pip install wandb`` first.

    Args:
        options: of ``wandb.init``, such as ``project="ablations"``.

    Raises:
        ConfigError: wandb is not installed.

    Examples:
        >>> callbacks = [jaxinfra.WandbLogger(project="ablations")]  # for jaxinfra.train
    """

    def __init__(self, **options: Any):
        self._wandb, self._options = _optional("wandb"), options
        self._run: Any = None

    def on_begin(self, run: Path, config: RunConfig) -> None:
        """Begins a run there, with this config."""
        named = {"name": run.name, **self._options}
        self._run = self._wandb.init(config=codec.to_dict(config), **named)

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Logs the values of a step."""
        self._run.log(dict(values), step=step)

    def on_end(self, summary: Record | None) -> None:
        """Ends the run there, with the summary."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=0)


@final
class MlflowLogger(MetricsLogger):
    """MLflow; ``pip install mlflow`` first.

    Args:
        options: of ``mlflow.start_run``, such as ``experiment_id="3"``.

    Raises:
        ConfigError: mlflow is not installed.

    Examples:
        >>> callbacks = [jaxinfra.MlflowLogger(experiment_id="3")]  # for jaxinfra.train
    """

    def __init__(self, **options: Any):
        self._mlflow, self._options = _optional("mlflow"), options

    def on_begin(self, run: Path, config: RunConfig) -> None:
        """Begins a run there, with this config."""
        self._mlflow.start_run(**{"run_name": run.name, **self._options})
        self._mlflow.log_dict(codec.to_dict(config), "config.json")

    def write(self, values: Mapping[str, float], *, step: int) -> None:
        """Logs the values of a step."""
        self._mlflow.log_metrics(dict(values), step=step)

    def on_end(self, summary: Record | None) -> None:
        """Ends the run there."""
        self._mlflow.end_run("KILLED" if summary is None else "FINISHED")


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed: pip install {name}") from error
