"""How likely a model finds given texts: sums of log probabilities, many rows at a time."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxinfra.errors import DataError
from jaxinfra.model.decoder import Decoder
from jaxinfra.serving.generate import bucket

_TOKENS = 4096  # of a batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContinuationScore:
    """What a model makes of a continuation."""

    log_probability: float  # nats, over its tokens
    is_greedy: bool  # whether each token is the most likely one after those before it


def score_continuations(
    model: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[ContinuationScore]:
    """The log probability of each continuation after its context; rows are padded and batched.

    Of a context that does not fit, its end is used: as many tokens as the model has positions for.

    Args:
        pairs: token ids of a context, at least one, and of a continuation.

    Raises:
        DataError: no context, or a continuation longer than the model's positions.
    """
    most = model.config.max_positions
    rows = []
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or len(continuation) > most:
            raise DataError(
                f"text {number}: {len(context)} tokens of context and {len(continuation)} to be "
                f"scored; give at least one, and at most max_positions={most}"
            )
        rows.append(np.array([*context, *continuation], np.int64)[-(most + 1) :])
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
    """A long text as pairs of context and continuation: each token is scored once, and the last
    pair has as much context as there is room for.

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
