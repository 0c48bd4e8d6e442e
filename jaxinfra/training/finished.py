"""How a call of ``train`` ended, and whether a run has ended already."""

import dataclasses
from typing import Any

from jaxinfra.checkpoint import directory_layout, metadata, processes
from jaxinfra.checkpoint.manifest import verify
from jaxinfra.checkpoint.restoring import require_finite_parameters
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config.run import RunConfig
from jaxinfra.errors import JaxinfraError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a call of ``train`` ended.

    Examples:
        >>> config = jaxinfra.read_run_config("mine.toml")
        >>> outcome = jaxinfra.train(config, "runs/mine", resume=True)
        runs/mine is complete: all of its 4 steps are done; ...
        >>> outcome.was_complete, outcome.result["steps"]
        (True, 4)
    """

    summary: dict[str, Any] | None  # None where it was asked to stop before the end
    step: int  # the last that is done
    was_complete: bool = False  # before the call, which did nothing
    together: bool = False  # all processes of the job end here

    @property
    def result(self) -> dict[str, Any]:
        """The figures of summary.json; raises JaxinfraError where the run was asked to stop."""
        if self.summary is None:
            raise JaxinfraError(f"the run was asked to stop at step {self.step}: resume it first")
        return self.summary


def final_summary(config: RunConfig, run: RunDirectory) -> dict[str, Any] | None:
    """The outcome of a run that has no step left to do; None while there is one.

    Raises CheckpointError where its last checkpoint is of another model than its config.
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
