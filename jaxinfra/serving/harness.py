"""Runs EleutherAI's lm-evaluation-harness on a model, and scores given continuations.

The harness's package ``lm_eval`` is no dependency: it is imported when it is first needed.
"""

import dataclasses
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxinfra.data.chat_template import ChatTemplate
from jaxinfra.errors import ConfigError, DataError, UnsupportedError
from jaxinfra.model.decoder import Decoder
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.generate import bucket, generate, request_of
from jaxinfra.serving.load import LoadedModel, load, load_template
from jaxinfra.serving.sampling import SamplingConfig

_TOKENS = 4096  # of a batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContinuationScore:
    """A continuation's log-probability by a model, and whether greedy sampling would give it."""

    log_probability: float  # nats, over its tokens
    is_greedy: bool  # whether each token is the most likely one after those before it


def score_continuations(
    model: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[ContinuationScore]:
    """Computes the log-probability of each continuation after its context, in padded batches.

    A context that does not fit is cut at its front to the model's number of positions.

    Args:
        pairs: token ids of a context, at least one, and of its continuation.

    Raises:
        DataError: a context is empty, a continuation is longer than the model's positions, or a
            token id is outside its vocabulary.
    """
    model.config.require_logits()
    most, vocab_size = model.config.max_positions, model.config.vocab_size
    rows = []
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or len(continuation) > most:
            raise DataError(
                f"text {number}: {len(context)} tokens of context and {len(continuation)} to be "
                f"scored; give at least one, and at most max_positions={most}"
            )
        ids = (*context, *continuation)
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise DataError(
                f"text {number} has token ids {min(ids)}..{max(ids)}, the model's vocabulary is "
                f"0..{vocab_size - 1}; encode it with the model's tokenizer"
            )
        rows.append(np.array(ids, np.int64)[-(most + 1) :])
    graphdef, parameters = nnx.split(model)
    scores: list[ContinuationScore | None] = [None] * len(rows)
    shards = model.execution.place.batch_shards
    for batch, length in _batches([len(row) - 1 for row in rows], limit=most, shards=shards):
        tokens, targets, counted = (np.zeros((len(batch), length), np.int32) for _ in range(3))
        for place, number in enumerate(batch):
            row = rows[number] if number >= 0 else np.zeros(2, np.int64)
            tokens[place, : len(row) - 1], targets[place, : len(row) - 1] = row[:-1], row[1:]
            if number >= 0:
                num = len(pairs[number][1])
                counted[place, len(row) - 1 - num : len(row) - 1] = 1
        found = _scored(graphdef, parameters, tokens, targets, counted)
        sums, greedy = (np.asarray(each) for each in found)
        for place, number in enumerate(batch):
            if number >= 0:
                scores[number] = ContinuationScore(
                    log_probability=float(sums[place]), is_greedy=bool(greedy[place])
                )
    return [score for score in scores if score is not None]


def rolling_pairs(
    ids: Sequence[int], *, first: int, max_positions: int
) -> list[tuple[list[int], list[int]]]:
    """Splits a long text into pairs of context and continuation that score each token once. The
    last pair has as much context as fits.

    >>> rolling_pairs([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], first=99, max_positions=4)
    [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]

    Args:
        first: the token before the text.
    """
    ids, pairs = list(ids), []
    for start in range(0, len(ids), max_positions):
        end = min(start + max_positions, len(ids))
        context = ids[max(end - max_positions - 1, 0) : start] if start else [first]
        pairs.append((context, ids[start:end]))
    return pairs


def _batches(lengths: Sequence[int], *, limit: int, shards: int) -> Iterable[tuple[list[int], int]]:
    """Numbers of rows, the longest first, and the length that they are padded to; -1: a row of
    padding, so that batches of one length have one size.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    while order:
        length = bucket(max(lengths[order[0]], 1), limit=limit)
        size = max(_TOKENS // length // shards, 1) * shards
        batch = [
            number for number in order[:size] if bucket(lengths[number], limit=limit) == length
        ]
        order = order[len(batch) :]
        yield batch + [-1] * (size - len(batch)), length


@functools.partial(jax.jit, static_argnums=0)
def _scored(
    graphdef: nnx.GraphDef,
    parameters: Any,
    tokens_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    counted_BT: Int[Array, "B T"],
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    model = nnx.merge(graphdef, parameters)
    logits_BTV = model.logits(model.hidden(tokens_BT))
    at_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)
    each_BT = at_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)
    greedy_BT = (jnp.argmax(logits_BTV, axis=-1) == targets_BT) | (counted_BT == 0)
    sums_B = jnp.sum(jnp.where(counted_BT == 1, each_BT, 0.0), axis=1)
    return sums_B, jnp.all(greedy_BT, axis=1)


_NEW_TOKENS = 256  # where a task does not say


def evaluate_tasks(
    model: str | Path | LoadedModel,
    tasks: Sequence[str],
    *,
    shots: int | None = None,
    limit: int | None = None,
    task_directory: str | Path | None = None,
    chat_template: str | Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluates a model on tasks of the harness; returns each task's metrics (``"acc,none"``).

    Args:
        model: a run, a model directory, or a model that ``load`` returned.
        tasks: names of tasks from ``lm_eval ls tasks`` or from ``task_directory``.
        shots: examples before each question; the task's own number by default.
        limit: documents per task; all by default.
        task_directory: directory with YAML files of further tasks.
        chat_template: a model's directory; questions are asked as user messages in its template.

    Raises:
        UnsupportedError: ``lm_eval`` is not installed.
        ConfigError: a task is unknown.

    Examples:
        Without the harness:

        >>> try:
        ...     figures = jaxinfra.evaluate_tasks("models/mine", ["arc_easy"], limit=100)
        ...     print(figures["arc_easy"]["acc,none"])
        ... except jaxinfra.UnsupportedError as error:
        ...     print("lm_eval" in str(error))
        True
    """
    evaluator, manager = _import("lm_eval.evaluator"), _import("lm_eval.tasks").TaskManager
    loaded = model if isinstance(model, LoadedModel) else load(model)
    template = None if chat_template is None else load_template(Path(chat_template))
    known = manager(include_path=None if task_directory is None else str(task_directory))
    if unknown := [task for task in tasks if task not in known.all_tasks]:
        raise ConfigError(
            f"the harness knows no task {', '.join(map(repr, unknown))}: lm_eval ls tasks lists "
            "them; tasks of your own are in --task-directory"
        )
    found = evaluator.simple_evaluate(
        model=harness_model(loaded, template=template),
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        task_manager=known,
        apply_chat_template=template is not None,
        log_samples=False,
        bootstrap_iters=0,
    )
    return {
        task: {
            name: value
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for task, figures in found["results"].items()
    }


def harness_model(model: LoadedModel, *, template: ChatTemplate | None = None) -> Any:
    """Returns the model as an ``lm_eval.api.model.LM``, for use with the harness's functions.

    Texts are tokenized as in generation, with the document's begin tokens first. A continuation's
    tokens are those that it adds to its context's.

    Args:
        template: chat template that renders conversations.

    Raises:
        UnsupportedError: ``lm_eval`` is not installed.
    """
    base = _import("lm_eval.api.model").LM
    made = type("HarnessModel", (HarnessAnswers, base), {})()
    made.attach(model, template)
    return made


class HarnessAnswers:
    """Answers the harness's requests with a model; combined with the harness's own base class."""

    def attach(self, model: LoadedModel, template: ChatTemplate | None) -> None:
        """Sets the model and the chat template that answer requests."""
        self._model = model
        self._decoder = model.decoder
        self._template = template
        self._ends = model.tokenizer.end_ids

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability after its context, in nats, and whether
        greedy sampling would give it.
        """
        scores = score_continuations(self._decoder, [self._pair(*each.args) for each in requests])
        return [(each.log_probability, each.is_greedy) for each in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns log-probabilities of whole texts, in nats; long texts are scored in windows."""
        most, (*_, first) = self._decoder.config.max_positions, self._begin()
        windows = [
            rolling_pairs(self._ids(each.args[0]), first=first, max_positions=most)
            for each in requests
        ]
        scores = iter(
            score_continuations(self._decoder, [pair for pairs in windows for pair in pairs])
        )
        return [sum(next(scores).log_probability for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continues texts up to the stop strings that a task defines."""
        if not requests:
            return []
        asked = [
            self._continuation(*each.args, number=number) for number, each in enumerate(requests)
        ]
        rows: list[list[int]] = [[] for _ in requests]
        for place, progress in generate(self._model, asked):
            rows[place] += progress.tokens
        answers = []
        for row, request in zip(rows, asked, strict=True):
            text = self._model.tokenizer.decode([each for each in row if each not in self._ends])
            answers.append(min((text.split(end)[0] for end in request.stop), key=len, default=text))
        return answers

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation as text with the model's chat template."""
        assert self._template is not None, "asked for with a template only"
        return self._template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns a name that identifies the chat template in the harness's caches."""
        return "" if self._template is None or not chat_template else self._template.identity

    @property
    def tokenizer_name(self) -> str:
        """Returns a name that identifies the tokenizer in the harness's caches."""
        return self._model.tokenizer.fingerprint

    def _continuation(
        self, text: str, settings: Mapping[str, Any], *, number: int
    ) -> GenerationRequest:
        until = settings.get("until") or []
        most = self._decoder.config.max_positions
        num_new = min(int(settings.get("max_gen_toks", _NEW_TOKENS)), most - 1)
        temperature = float(settings.get("temperature", 0.0))
        request = request_of(
            self._model,
            [*self._begin(), *self._ids(text)][-(most - num_new) :],
            max_new_tokens=num_new,
            sampling=SamplingConfig(
                temperature=temperature if settings.get("do_sample", temperature > 0) else 0.0,
                top_p=settings.get("top_p"),
                top_k=settings.get("top_k"),
            ),
            choice=number,
        )
        stop = (until,) if isinstance(until, str) else tuple(until)
        return dataclasses.replace(request, stop=tuple(filter(None, stop)))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of a context, what documents begin with among them, and of its continuation."""
        if not context:
            return self._begin(), self._ids(continuation)
        # A space before a word is a part of its token: the word's, not the context's.
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        before, whole = self._ids(context), self._ids(context + continuation)
        added = whole[len(before) :] if len(whole) > len(before) else self._ids(continuation)
        return [*self._begin(), *before], added

    def _begin(self) -> list[int]:
        """Ids that texts begin with; an end token where the model has no begin token."""
        return [*(self._model.begin_ids or self._ends[:1])]

    def _ids(self, text: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if self._template is None:
            return tokenizer.encode(text).tolist()
        ids = tokenizer.encode_rendered([text])[0].tolist()  # with special tokens spelled out
        begin = self._begin()
        return ids[len(begin) :] if ids[: len(begin)] == begin else ids


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"tasks are run by lm-evaluation-harness, which is not installed ({error}): pip "
            "install lm_eval"
        ) from error
