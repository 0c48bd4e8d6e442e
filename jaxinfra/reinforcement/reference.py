"""The frozen model that the KL divergence of reinforcement learning is measured to."""

from collections.abc import Callable
from typing import Any, final

import jax
import numpy as np

from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import define_model, merged
from jaxinfra.training.gradients import make_target_value_step
from jaxinfra.training.job import Job
from jaxinfra.training.start import first_state


@final
class Reference:
    """Log probabilities of targets under the model that a run starts from.

    With adapters it is the frozen base without them, so no weight is held twice. Without adapters
    it is a second copy of the start model's parameters.
    """

    def __init__(self, step: Callable[..., Any], tree: Any):
        self._step, self._tree = step, tree

    @classmethod
    def of(cls, job: Job) -> "Reference | None":
        """Returns the reference of a job, or None if its loss has no KL divergence."""
        assert job.config.rl is not None
        if job.config.rl.kl == 0.0:
            return None
        start = first_state(job)
        if job.config.lora is None:
            return cls(job.target_value_step, start.tree)
        base = define_model(job.config.model, job.model.execution)
        tree = merged(job.model.frozen, start.model_state)
        return cls(jax.jit(make_target_value_step(base)), tree)

    def __call__(self, batch: Batch[jax.Array]) -> np.ndarray:
        """Computes the log probability of each target in nats, float32 [B, T]."""
        return np.asarray(self._step(self._tree, batch))
