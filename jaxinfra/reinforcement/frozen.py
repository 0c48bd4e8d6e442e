"""Models that do not change, under which completions are scored: the start model and a teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import DataError
from jaxinfra.model.definition import define_model, merged
from jaxinfra.serving.load import load
from jaxinfra.training.gradients import make_target_value_step
from jaxinfra.training.job import Job
from jaxinfra.training.start import first_state


@final
class FrozenModel:
    """Log probabilities of targets under a model that training does not change."""

    def __init__(self, step: Callable[..., Any], tree: Any):
        self._step, self._tree = step, tree

    @classmethod
    def reference(cls, job: Job) -> "FrozenModel | None":
        """Returns the start model of a job, or None if its loss has no KL divergence.

        With adapters it is the frozen base without them, so no weight is held twice. Without
        adapters it is a second copy of the start model's parameters.
        """
        assert job.config.rl is not None
        if job.config.rl.kl == 0.0:
            return None
        start = first_state(job)
        if job.config.lora is None:
            return cls(job.target_value_step, start.tree)
        base = define_model(job.config.model, job.model.execution)
        tree = merged(job.model.frozen, start.model_state)
        return cls(jax.jit(make_target_value_step(base)), tree)

    @classmethod
    def teacher(cls, job: Job, tokenizer: Tokenizer) -> "FrozenModel | None":
        """Loads the teacher of a job, onto the devices of training; None if it has none.

        Raises:
            DataError: the teacher has another tokenizer, or another number of ids.
        """
        assert job.config.rl is not None
        if job.config.rl.teacher is None:
            return None
        teacher = load(Path(job.config.rl.teacher), mesh=job.config.mesh)
        sizes = teacher.definition.config.vocab_size, job.config.model.vocab_size
        if teacher.tokenizer.fingerprint != tokenizer.fingerprint or sizes[0] != sizes[1]:
            raise DataError(
                f"rl.teacher={job.config.rl.teacher!r} of {sizes[0]} ids for a model of {sizes[1]}"
                ", or with another tokenizer: a token's probability is compared, so both need one "
                "vocabulary"
            )
        return cls(jax.jit(make_target_value_step(teacher.definition)), teacher.parameters)

    def __call__(self, batch: Batch[jax.Array]) -> np.ndarray:
        """Computes the log probability of each target in nats, float32 [B, T]."""
        return np.asarray(self._step(self._tree, batch))
