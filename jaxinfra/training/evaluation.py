"""Held-out losses of a run while it trains, of a saved run, and of a model trained elsewhere."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.run_directory import RunDirectory, identity
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig, DataFormat
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.mixture import OWN
from jaxinfra.config.preferences import PreferenceLoss
from jaxinfra.data.baseline import CompressionBaseline, compressed_bits_per_byte
from jaxinfra.data.batch import Batch
from jaxinfra.data.corpus import open_corpus
from jaxinfra.data.heldout import HeldoutBatches
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.model.definition import Parameters
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.runtime.compile_cache import keep_compiled_programs
from jaxinfra.training.gradients import make_evaluation_step
from jaxinfra.training.job import Job, make_job
from jaxinfra.training.own_data import OwnTexts, Texts
from jaxinfra.training.preferences import pair_record, pair_sums
from jaxinfra.training.run_data import open_data, pair_rows
from jaxinfra.training.start import first_state, with_frozen


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The loss of a model on one text, with the counts for its mean and for bits per byte."""

    loss: float  # nats per token; for pairs or single answers, their mean preference loss
    # For pairs, tokens of the chosen answers only; so is num_bytes. Of scores and single answers 0.
    num_tokens: int
    num_bytes: int  # 0 where they are not known: then bits per byte are NaN
    nll: float | None = None  # for pairs only: nats per token of the chosen answers
    pairs: dict[str, float] = dataclasses.field(default_factory=dict)  # as ``pair_record``

    @property
    def perplexity(self) -> float:
        """Perplexity of the text: exp(nats per token)."""
        return math.exp(min(self._nats, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Total loss in bits over the text's UTF-8 bytes: comparable across tokenizers and with
        compressors.
        """
        if not self.num_bytes:
            return math.nan
        return self._nats * self.num_tokens / math.log(2) / self.num_bytes

    @property
    def described_bits(self) -> str:
        """The bits per byte in words, after a comma; nothing where they are not known."""
        return f", {self.bits_per_byte:.4f} bits per byte" if self.num_bytes else ""

    @property
    def _nats(self) -> float:
        return self.loss if self.nll is None else self.nll


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SetEvaluations:
    """Losses of all the texts that a run is evaluated on."""

    sets: dict[str, Evaluation]  # by name
    ranking: Evaluation  # by which checkpoints are ranked: of data.best_by, else of all sets pooled

    def record(self) -> dict[str, float]:
        """Returns the losses for ``metrics.jsonl``; with several sets, each set also has its own
        values as ``heldout/NAME/...``.
        """
        record = {
            "heldout_loss": self.ranking.loss,
            "heldout_bits_per_byte": self.ranking.bits_per_byte,
        }
        record |= {f"heldout_{name}": value for name, value in self.ranking.pairs.items()}
        if len(self.sets) > 1:
            for name, each in self.sets.items():
                record[f"heldout/{name}/loss"] = each.loss
                record[f"heldout/{name}/bits_per_byte"] = each.bits_per_byte
                record |= {f"heldout/{name}/{what}": value for what, value in each.pairs.items()}
        return record

    def describe(self) -> str:
        """Formats the losses of all sets in one line."""
        of = self.ranking
        text = f"held-out loss {of.loss:.4f}, perplexity {of.perplexity:.2f}{of.described_bits}"
        if of.pairs:
            told = f"; of chosen answers {of.described_bits[2:]}" if of.num_bytes else ""
            text = f"held-out answers: loss {of.loss:.4f}, {of.pairs[_ACCURACY]:.1%} right{told}"
        if len(self.sets) == 1:
            return text
        each = (
            f"{name} {found.loss:.4f}{found.described_bits}" for name, found in self.sets.items()
        )
        return f"{text}; {'; '.join(each)}"


_ACCURACY = "preferences/accuracy"


class Interrupted(Exception):
    """Raised inside an evaluation when ``stop`` returns True before all batches are done."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """Functions that an evaluation calls between its batches, to be stopped and to say how far."""

    stop: Callable[[], bool] = lambda: False  # whether to end: then it raises Interrupted
    # Told the set's name, the number of batches that are done, and of how many, if known.
    told: Callable[[str, int, int | None], None] = lambda *_: None

    def batches[B](self, batches: Iterable[B], name: str) -> Iterator[B]:
        """Passes batches on; asks before each and after the last, and tells how many are done."""
        total = len(batches) if isinstance(batches, Sized) else None
        self._ask()
        for number, batch in enumerate(batches):
            self.told(name, number, total)
            yield batch
            self._ask()

    def _ask(self) -> None:
        if self.stop():
            raise Interrupted


def evaluate_sets(
    job: Job, tree: Parameters, texts: Texts, *, between: Between = Between()
) -> SetEvaluations:
    """Computes the held-out loss of every evaluation set. If ``between.stop`` returns True before
    the last set is done, raises Interrupted.
    """
    if isinstance(texts, OwnTexts):
        share = job.process_share()
        sets = {
            name: evaluate(
                job.evaluation_step,
                tree,
                between.batches(texts.batches(name, job.config, share), name),
                None,
                put=job.put,
            )
            for name in texts.heldout
        }
    else:
        sets = {
            name: evaluate_heldout(job, tree, arrays, between=between, name=name)
            for name, arrays in texts.heldout.items()
        }
    return SetEvaluations(
        sets=sets, ranking=pooled_evaluation([sets[name] for name in texts.ranking])
    )


def pooled_evaluation(parts: Sequence[Evaluation]) -> Evaluation:
    """Combines the losses of several texts into the loss of all, as if they were one text."""
    if len(parts) == 1:
        return parts[0]
    num_tokens = sum(each.num_tokens for each in parts)
    return Evaluation(
        loss=math.fsum(each.loss * each.num_tokens for each in parts) / num_tokens,
        num_tokens=num_tokens,
        num_bytes=sum(each.num_bytes for each in parts),
    )


def evaluate_heldout(
    job: Job,
    tree: Parameters,
    arrays: TokenArrays,
    *,
    between: Between = Between(),
    name: str = OWN,
) -> Evaluation:
    """Computes the loss of a text by the job's evaluation step, or, in a run on pairs of answers,
    the loss of its pairs.
    """
    if job.config.preferences is not None:
        return _evaluate_pairs(job, tree, arrays, between=between, name=name)
    training = job.config.training
    part, parts = job.process_share()
    batches = HeldoutBatches(
        arrays,
        sequence_length=training.sequence_length,
        batch_size=training.batch_size // training.accumulation,
        process_index=part,
        process_count=parts,
    )
    asked = between.batches(batches, name)
    return evaluate(job.evaluation_step, tree, asked, arrays, put=job.put)


def _evaluate_pairs(
    job: Job, tree: Parameters, arrays: TokenArrays, *, between: Between, name: str
) -> Evaluation:
    """Sums the loss over all pairs of a text, each counted once; a collective."""
    preferences = job.config.preferences
    assert preferences is not None, "a run of pairs"
    of_rows = jax.jit(functools.partial(pair_sums, config=preferences))
    loss, figures = 0.0, collections.defaultdict[str, float](float)
    for batch, each_BT, _ in between.batches(pair_rows(job, tree, arrays), name):
        found = jax.device_get(of_rows(each_BT, batch))
        loss += float(found.loss)
        for what, value in found.figures.items():
            figures[what] += float(value)
    record = pair_record(figures)
    nll = record.get("preferences/chosen_nll")
    return Evaluation(
        loss=loss / figures["answers" if preferences.loss == PreferenceLoss.KTO else "pairs"],
        num_tokens=round(figures.get("chosen_tokens", 0)),
        num_bytes=0 if nll is None else int(arrays.document_bytes[0::2].sum()),
        nll=nll,
        pairs=record,
    )


def evaluate(
    step: Callable[[Parameters, Batch], tuple[Float[Array, ""], Float[Array, ""]]],
    tree: Parameters,
    batches: Iterable[Batch],
    arrays: TokenArrays | None,
    *,
    put: Callable[[Batch], Batch],
) -> Evaluation:
    """Sums the nll in nats over batches that together count each token of ``arrays`` once.

    Args:
        arrays: the text; None: the batches come from a script.
        step: a jitted ``make_evaluation_step``.
        tree: parameters and state of the model.
        put: moves a batch to the devices.
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
        pending.append(step(tree, put(batch)))
        drain(keep=2)  # the host prepares the next batch while the device works
    drain(keep=0)
    if arrays is None:
        if not count:
            raise DataError("a validation set has no target that counts; give it batches")
        return Evaluation(loss=total / count, num_tokens=round(count), num_bytes=0)
    assert round(count) == arrays.num_counted, f"counted {count} of {arrays.num_counted} tokens"
    return Evaluation(loss=total / count, num_tokens=round(count), num_bytes=arrays.num_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunEvaluation:
    """A model's loss on a text, with the bits per byte that gzip and xz reach on it."""

    step: int | None  # of the run's checkpoint; None: the model is not from a run
    evaluation: Evaluation  # of the texts by which the run's checkpoints are ranked
    sets: dict[str, Evaluation]  # of each text by name, where there are several
    baseline: CompressionBaseline


def evaluate_run(
    directory: Path,
    *,
    mesh: MeshConfig,
    cache_dir: Path,
    source: str | None,
    text_field: str | None,
    step: int | None,
) -> RunEvaluation:
    """Evaluates a checkpoint over every held-out token, once.

    Args:
        source: a text to evaluate on as a whole, in place of the run's own held-out documents.
        text_field: field of the source's rows that holds the text; None: the run's.
        step: step of the checkpoint; None: the newest good one.
    """
    run = RunDirectory(directory)
    as_it_is = run.read_config()
    if not run.tokenizer_file.exists():
        raise ConfigError(f"{directory} has no tokenizer.json: the run was stopped before it began")
    keep_compiled_programs(cache_dir)
    data = as_it_is.data
    if source is not None:
        data = _held_out(source, data, text_field)
    config = dataclasses.replace(as_it_is, mesh=mesh, data=data)
    job = with_frozen(make_job(config))
    corpora = open_data(
        job,
        cache_dir=cache_dir,
        initial=lambda: first_state(job),
        run=run,
        tokenizer=Tokenizer.load(run.tokenizer_file),
    )
    if not corpora.heldout:
        raise DataError(
            f"{directory}: nothing is held out of {data.source!r}, so there is no text to evaluate "
            "on; name one with --data"
        )
    state = job.abstract_state()
    weights = "average" if state.average else "parameters"
    restored = load_state(
        run.checkpoints,
        dataclasses.replace(
            jax.tree.map(lambda _: None, state),
            model_state=state.model_state,
            **{weights: getattr(state, weights)},
        ),
        step=step,
        identity=identity(run, as_it_is),
        settings=codec.to_dict(as_it_is),
    )
    result = evaluate_sets(job, restored.state.evaluated, corpora)
    return RunEvaluation(
        step=restored.step,
        evaluation=result.ranking,
        sets=result.sets if len(result.sets) > 1 else {},
        baseline=compressed_bits_per_byte(corpora.ranking_documents()),
    )


def _held_out(source: str, data: DataConfig, text_field: str | None) -> DataConfig:
    """A text as both sides: the run's own training text, which may be gone, is not needed."""
    if text_field is not None and data.format is not DataFormat.TEXT:
        raise ConfigError(
            f"text_field={text_field!r} for rows of format {data.format}, which have fields of "
            "their own; leave it out"
        )
    return dataclasses.replace(
        data,
        source=source,
        heldout_source=source,
        text_field=text_field or data.text_field,
        mixture=(),
        validation=(),
        best_by=None,
    )


_SEQUENCE_LENGTH = 2048  # at most, in tokens
_TOKENS_A_SHARD = 4096  # of a batch, on each data shard


def evaluate_pretrained(
    directory: Path,
    *,
    mesh: MeshConfig,
    cache_dir: Path,
    source: str | None,
    text_field: str | None,
) -> RunEvaluation:
    """Evaluates a model directory over every token of a text, once.

    Documents are separated as the tokenizer's own separators say.

    Args:
        source: a text, all of it; None: the held-out part of the standard library's source.
        text_field: field of the source's rows that holds the text; None: ``text``.
    """
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json; text needs one to become tokens")
    keep_compiled_programs(cache_dir)
    data = DataConfig()
    if source is not None:
        field = text_field or data.text_field
        data = dataclasses.replace(data, source=source, heldout_source=source, text_field=field)
    placement = Placement(mesh=make_mesh(mesh, devices=jax.local_devices()))
    model = load_pretrained(directory, placement=placement, keep_packed=True)
    model.definition.config.require_logits()
    corpus = open_corpus(
        data,
        vocab_size=model.definition.config.vocab_size,
        cache_dir=cache_dir,
        tokenizer=Tokenizer.load(directory / "tokenizer.json"),
    )
    assert corpus.heldout is not None, "the standard library or a text of its own"
    length = min(_SEQUENCE_LENGTH, model.definition.config.max_positions)
    batches = HeldoutBatches(
        corpus.heldout,
        sequence_length=length,
        batch_size=mesh.num_data_shards * max(1, _TOKENS_A_SHARD // length),
    )
    rows = model.placement.batch

    def put(batch: Batch) -> Batch:
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(rows, np.asarray(x)), batch
        )

    result = evaluate(
        jax.jit(make_evaluation_step(model.definition)),
        model.parameters,
        batches,
        corpus.heldout,
        put=put,
    )
    return RunEvaluation(
        step=None,
        evaluation=result,
        sets={},
        baseline=compressed_bits_per_byte(corpus.heldout_documents()),
    )
