"""Held-out loss over every token of a text, once."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Array, Float

from jaxinfra.data.batch import Batch
from jaxinfra.data.heldout import heldout_batches
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.models.definition import Parameters
from jaxinfra.training.job import Job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Loss of a text."""

    loss: float  # nats per token
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss), a token."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Total bits over the text's bytes: comparable across tokenizers and with compressors."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes


class Interrupted(Exception):
    """The evaluation was asked to stop before its end."""


def evaluate_heldout(
    job: Job, tree: Parameters, arrays: TokenArrays, *, stop: Callable[[], bool] | None = None
) -> Evaluation:
    """``evaluate`` by the job's own step, on this process's part of its micro-batches."""
    training = job.config.training
    part, parts = job.process_share()
    batches = heldout_batches(
        arrays,
        sequence_length=training.sequence_length,
        batch_size=training.batch_size // training.accumulation,
        process_index=part,
        process_count=parts,
    )
    return evaluate(job.evaluation_step, tree, batches, arrays, put=job.put, stop=stop)


def evaluate(
    step: Callable[[Parameters, Batch], tuple[Float[Array, ""], Float[Array, ""]]],
    tree: Parameters,
    batches: Iterable[Batch],
    arrays: TokenArrays,
    *,
    put: Callable[[Batch], Batch],
    stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Sums nll over batches that together count each token of ``arrays`` once.

    Args:
        step: a jitted ``make_evaluation_step``.
        tree: parameters and state of the model.
        put: moves a batch to the devices.
        stop: asked between batches; raises Interrupted where it says so.
    """
    total, count = 0.0, 0.0
    pending: list[tuple[Float[Array, ""], Float[Array, ""]]] = []

    def drain(keep: int) -> None:
        nonlocal total, count
        while len(pending) > keep:
            nll, weight = pending.pop(0)
            total += float(np.asarray(nll, np.float64))
            count += float(weight)

    for batch in batches:
        if stop is not None and stop():
            raise Interrupted
        pending.append(step(tree, put(batch)))
        drain(keep=2)  # the host prepares the next batch while the device works
    drain(keep=0)
    assert round(count) == arrays.num_counted, f"counted {count} of {arrays.num_counted} tokens"
    return Evaluation(loss=total / count, num_tokens=round(count), num_bytes=arrays.num_bytes)
