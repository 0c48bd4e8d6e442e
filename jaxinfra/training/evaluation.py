"""Held-out loss over every token of a text, once."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Array, Float

from jaxinfra.data.batch import Batch
from jaxinfra.data.corpora import Corpora
from jaxinfra.data.heldout import heldout_batches
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.model.definition import Parameters
from jaxinfra.training.job import Job
from jaxinfra.training.pairs import sum_pairs
from jaxinfra.training.step import pair_record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Loss of a text."""

    loss: float  # nats per token, or of pairs their loss, per pair
    num_tokens: int  # of pairs those of the chosen answers, as bytes are
    num_bytes: int
    nll: float | None = None  # nats per token of the chosen answers, of pairs
    pairs: dict[str, float] = dataclasses.field(default_factory=dict)  # as ``pair_record``

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self._nats, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Total bits over the text's bytes: comparable across tokenizers and with compressors."""
        return self._nats * self.num_tokens / math.log(2) / self.num_bytes

    @property
    def _nats(self) -> float:
        return self.loss if self.nll is None else self.nll


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SetEvaluations:
    """Losses of all texts that a run is evaluated on."""

    sets: dict[str, Evaluation]  # by name
    judged: Evaluation  # of the set, or of all sets together, that the run is judged by

    def record(self) -> dict[str, float]:
        """Values for ``metrics.jsonl``; of several sets also each one's, ``heldout/NAME/...``."""
        record = {
            "heldout_loss": self.judged.loss,
            "heldout_bits_per_byte": self.judged.bits_per_byte,
        }
        record |= {f"heldout_{name}": value for name, value in self.judged.pairs.items()}
        if len(self.sets) > 1:
            for name, each in self.sets.items():
                record[f"heldout/{name}/loss"] = each.loss
                record[f"heldout/{name}/bits_per_byte"] = each.bits_per_byte
                record |= {f"heldout/{name}/{what}": value for what, value in each.pairs.items()}
        return record

    def describe(self) -> str:
        """One line."""
        judged = self.judged
        text = (
            f"held-out loss {judged.loss:.4f}, perplexity {judged.perplexity:.2f}, "
            f"{judged.bits_per_byte:.4f} bits per byte"
        )
        if judged.pairs:
            text = (
                f"held-out pairs: loss {judged.loss:.4f}, {judged.pairs[_ACCURACY]:.1%} in order; "
                f"chosen answers {judged.bits_per_byte:.4f} bits per byte"
            )
        if len(self.sets) == 1:
            return text
        each = (
            f"{name} {found.loss:.4f} ({found.bits_per_byte:.4f} bits per byte)"
            for name, found in self.sets.items()
        )
        return f"{text}; {', '.join(each)}"


_ACCURACY = "preferences/accuracy"


class Interrupted(Exception):
    """The evaluation was asked to stop before its end."""


def evaluate_sets(
    job: Job, tree: Parameters, corpora: Corpora, *, stop: Callable[[], bool] | None = None
) -> SetEvaluations:
    """``evaluate_heldout`` of every set; raises Interrupted before any is told, or tells all."""
    sets = {
        name: evaluate_heldout(job, tree, arrays, stop=stop)
        for name, arrays in corpora.heldout.items()
    }
    return SetEvaluations(sets=sets, judged=pooled([sets[name] for name in corpora.judged]))


def pooled(parts: Sequence[Evaluation]) -> Evaluation:
    """The loss of several texts as of one."""
    if len(parts) == 1:
        return parts[0]
    num_tokens = sum(each.num_tokens for each in parts)
    return Evaluation(
        loss=math.fsum(each.loss * each.num_tokens for each in parts) / num_tokens,
        num_tokens=num_tokens,
        num_bytes=sum(each.num_bytes for each in parts),
    )


def evaluate_heldout(
    job: Job, tree: Parameters, arrays: TokenArrays, *, stop: Callable[[], bool] | None = None
) -> Evaluation:
    """``evaluate`` by the job's own step, on this process's part of its micro-batches; of a run of
    pairs, the loss of pairs.
    """
    if job.config.preferences is not None:
        return _evaluate_pairs(job, tree, arrays, stop=stop)
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


def _evaluate_pairs(
    job: Job, tree: Parameters, arrays: TokenArrays, *, stop: Callable[[], bool] | None
) -> Evaluation:
    def ask() -> None:
        if stop is not None and stop():
            raise Interrupted

    total = sum_pairs(job, tree, arrays, before=ask)
    record = pair_record(total.figures)
    return Evaluation(
        loss=total.loss / total.figures["pairs"],
        num_tokens=round(total.figures["chosen_tokens"]),
        num_bytes=int(arrays.document_bytes[0::2].sum()),
        nll=record["preferences/chosen_nll"],
        pairs=record,
    )


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
