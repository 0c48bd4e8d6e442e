"""Plan of an engine step as data: rows with their tokens, the limits, and the sampled results."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine.requests import RequestStream, TokenScore
from jaxinfra.serving.sampling import LogProbabilities


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Limits on an engine step's requests, pages and tokens, and the shapes of its device calls."""

    num_pages: int  # of the pool
    page_size: int  # tokens of a page
    max_running: int  # requests that have pages at a time
    max_step_tokens: int  # of a step, padding of its chunks included
    max_positions: int  # of the model
    row_sizes: tuple[int, ...]  # rows that a call may have, ascending; the last is max_running
    chunk_sizes: tuple[int, ...]  # tokens of a row that a call for prompts may have, ascending
    max_piece_rows: int  # rows of a call for prompts
    share_prefixes: bool = True
    long_context: int | None = None  # tokens beyond which LongRoPE rotates keys differently
    num_drafts: int = 0  # tokens proposed by a draft model for each step
    num_host_pages: int = 0  # of preempted requests, kept by the host; 0: they are computed again
    has_states: bool = False  # layers keep a state per request, in the request's slot
    num_snapshots: int = 0  # copies of states after prefixes, from which requests go on
    num_host_states: int = 0  # kept by the host: of preempted requests, and older snapshots

    def __post_init__(self) -> None:
        least = self.max_running * (1 + self.num_drafts) + self.chunk_sizes[0]
        if self.max_step_tokens < least:
            raise ConfigError(
                f"max_step_tokens={self.max_step_tokens} is less than {least}: a token of each of "
                f"max_running={self.max_running} requests and a chunk of {self.chunk_sizes[0]}; "
                "raise it, or lower max_running"
            )
        if self.num_pages < 2:
            raise ConfigError(f"num_pages={self.num_pages}: one is kept empty; give at least 2")
        if self.row_sizes[-1] != self.max_running:
            raise ConfigError(
                f"row_sizes={self.row_sizes} must end at max_running={self.max_running}"
            )

    @property
    def context(self) -> int:
        """Most tokens that one request can have, by the model's positions and the pool's pages."""
        return min(self.max_positions, (self.num_pages - 1) * self.page_size)

    @property
    def table_width(self) -> int:
        """Number of pages that the longest possible request needs."""
        return -(-self.context // self.page_size)

    @property
    def empty_state(self) -> int:
        """Slot of the state before the first token, which is never written."""
        return self.max_running

    @property
    def snapshot_slots(self) -> range:
        """Slots of snapshots of states; they come last."""
        first = self.max_running + 1
        return range(first, first + self.num_snapshots)

    @property
    def num_state_slots(self) -> int:
        """Number of slots of states: requests', the empty state's and snapshots'."""
        return self.max_running + 1 + self.num_snapshots

    @property
    def host_state_slots(self) -> range:
        """Numbers of the host's slots of states, which follow the device's."""
        return range(self.num_state_slots, self.num_state_slots + self.num_host_states)

    def rows(self, number: int) -> int:
        """Returns the smallest compiled batch size with at least ``number`` rows."""
        return self.row_sizes[bisect.bisect_left(self.row_sizes, number)]

    @property
    def chunk_shapes(self) -> tuple[tuple[int, int], ...]:
        """Possible shapes (rows, tokens per row) of calls that process chunks of prompts."""
        return tuple(
            (rows, length)
            for rows in self.row_sizes
            if rows <= max(self.max_piece_rows, self.row_sizes[0])
            for length in self.chunk_sizes
            if rows * length <= self.max_step_tokens
        )


class PlannedRow(NamedTuple):
    """One batch row of a step: a request's next input tokens, their pages and position."""

    stream: RequestStream
    slot: int
    pages: tuple[int, ...]
    start: int  # position of the row's first token
    ids: tuple[int, ...]  # token ids; empty: the token that the device sampled last
    count: int  # number of input tokens
    is_sampled: bool  # whether a token is sampled after the last input token
    context: int  # tokens of the request so far, prompt included
    num_drafts: int = 0  # number of trailing input tokens that are drafts to verify
    targets: tuple[int, ...] = ()  # next token after each input token, if the prompt is scored
    state: int = 0  # slot of the states before its first token, in a model that has states


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """The work of one engine step, with fields in the order in which the device does it."""

    saves: list[tuple[int, int]]  # pages, and the host's slots that they go to
    copies: list[tuple[int, int]]  # pages, from and to
    zeros: list[int]  # pages to fill with zeros
    restores: list[tuple[int, int]]  # the host's slots, and the pages that they go to
    states: list[tuple[int, int]]  # slots of states to copy in turn, from and to
    chunks: list[PlannedRow]
    chunk_length: int
    decodes: list[PlannedRow]
    verifies: list[PlannedRow]

    @property
    def num_tokens(self) -> int:
        """Number of input tokens of all rows."""
        return sum(row.count for row in self.rows)

    @property
    def rows(self) -> list[PlannedRow]:
        """All rows of the step; chunks of prompts come first."""
        return [*self.chunks, *self.decodes, *self.verifies]

    @property
    def is_empty(self) -> bool:
        """Whether the step has no rows, and nothing to move or clear."""
        moved = self.saves or self.zeros or self.copies or self.restores or self.states
        return not (moved or self.rows)


class RowSample(NamedTuple):
    """Tokens and scores that a step sampled for one row; a tuple, as it is quick to make."""

    row: PlannedRow
    tokens: tuple[int, ...]  # sampled after the first token, and after each draft
    num_accepted: int  # number of accepted drafts
    is_bad: bool  # whether the row's logits were not finite
    scores: tuple[TokenScore, ...] = ()  # of ``tokens``, if log-probabilities were requested
    prompt_scores: tuple[TokenScore, ...] = ()  # of the row's target tokens, if it is scored


def samples_of_rows(
    rows: Sequence[PlannedRow], drawn: np.ndarray, scores: Sequence[LogProbabilities]
) -> list[RowSample]:
    """Returns sampled tokens and scores for each row of a call.

    Args:
        drawn: int32: one sampled token per row [B]; or, with drafts, [B, 1 + T]: the number of
            accepted drafts, and a sample after each token. Rows beyond ``rows`` are padding.
        scores: log-probabilities of the sampled tokens, and of a scored prompt's next tokens; empty
            if no request asked for them.
    """
    values = drawn.tolist()
    if drawn.ndim == 1 and not scores:
        told = zip(rows, values, strict=False)
        return [
            RowSample(row, (token,) if row.is_sampled else (), 0, token < 0) for row, token in told
        ]
    return [
        _of_row(row, place, value if drawn.ndim > 1 else [0, value], scores)
        for place, (row, value) in enumerate(zip(rows, values, strict=False))
    ]


def _of_row(
    row: PlannedRow, place: int, drawn: Sequence[int], scores: Sequence[LogProbabilities]
) -> RowSample:
    held, *tokens = drawn
    asked, of_tokens, of_prompt = row.stream.request.sampling.logprobs, (), ()
    if asked is not None and row.is_sampled and scores:
        # Beside drafts a row has several.
        at_K = [(place, at) for at in range(1 + held)] if row.num_drafts else [(place,)]
        of_tokens = tuple(_score(scores[0], at, asked) for at in at_K)
    if asked is not None and row.targets and len(scores) > 1:
        of_prompt = tuple(_score(scores[1], (at,), asked) for at in range(len(row.targets)))
    return RowSample(
        row=row,
        tokens=tuple(tokens) if row.is_sampled else (),
        num_accepted=held,
        is_bad=held < 0 or tokens[0] < 0,
        scores=of_tokens,
        prompt_scores=of_prompt,
    )


def _score(scores: LogProbabilities, place: tuple[int, ...], number: int) -> TokenScore:
    value = float(scores.chosen_B[place])
    if not number:
        return TokenScore(logprob=value, top=())
    ids_K, top_K = (x[place][:number].tolist() for x in (scores.top_ids_BK, scores.top_BK))
    return TokenScore(logprob=value, top=tuple(zip(ids_K, top_K, strict=True)))
