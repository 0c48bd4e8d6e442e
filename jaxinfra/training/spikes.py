"""The report of a loss spike: ``spikes/step-N.json`` and a line in the terminal."""

import json
from typing import final

from jaxinfra.checkpoint import processes
from jaxinfra.checkpoint.run_directory import RunDirectory, write_atomically
from jaxinfra.data.corpora import Corpora
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.runtime.incidents import EXCLUDED, read_incidents
from jaxinfra.training.examine import examine_step
from jaxinfra.training.job import Job
from jaxinfra.training.state import State
from jaxinfra.training.watch import Watch

SPIKE = "loss spike"


@final
class SpikeReports:
    """Explains each batch that was left out because of its loss, once.

    It is explained as the run, gone back, comes to the batch again and passes over it: the state
    from before the step is at hand then, so nothing is kept for this, and nothing is replayed.
    """

    def __init__(
        self,
        *,
        job: Job,
        run: RunDirectory,
        batches: TrainIterator,
        corpora: Corpora,
        watch: Watch,
    ):
        self._job, self._run, self._watch = job, run, watch
        self._batches, self._tokenizer = batches, corpora.tokenizer

    def explain(self, state: State, *, step: int) -> None:
        """Writes the report where there is none yet; a collective.

        Args:
            state: before the step.
            step: the one that is passed over.
        """
        found = processes.on_first(lambda: self._judged(step))
        if found is None:
            return
        self._watch.phase("rollback", step)
        examined = examine_step(
            self._job,
            state,
            self._batches,
            self._tokenizer,
            step=step,
            usual_step=self._usual(step),
        )
        done = "the run went back to before it, and its batch is left out from now on"
        report = {**examined.as_json(), "seen": found, "done": done}
        file = self._run.spike_file(step)

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, json.dumps(report, indent=1, allow_nan=False) + "\n")

        processes.on_first(write)
        self._watch.incident(
            SPIKE, step=step, text=f"{examined.describe()}; {done}", report=str(file)
        )

    def _judged(self, step: int) -> str | None:
        """What was seen, where a step's loss was judged and is not explained."""
        if self._run.spike_file(step).exists():
            return None
        lines = read_incidents(self._run.incidents_file)
        return next(
            (each["text"] for each in lines if (each["kind"], each["step"]) == (EXCLUDED, step)),
            None,
        )

    def _usual(self, step: int) -> int:
        """The nearest step before that is trained on; the first one has the next."""
        before = (number for number in range(step - 1, 0, -1) if number not in self._watch.excluded)
        return next(before, step + 1)
