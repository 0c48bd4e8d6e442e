"""A step of the engine as data: rows and their tokens, their limits, and what was sampled."""

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
    """Bounds of a step, and the shapes that its calls may have."""

    num_pages: int  # of the pool
    page_size: int  # tokens of a page
    max_running: int  # requests that have pages at a time
    max_step_tokens: int  # of a step, padding of its chunks included
    max_positions: int  # of the model
    row_sizes: tuple[int, ...]  # rows that a call may have, ascending; the last is max_running
    chunk_sizes: tuple[int, ...]  # tokens of a row that a call for prompts may have, ascending
    max_piece_rows: int  # rows of a call for prompts
    share_prefixes: bool = True
    long_context: int | None = None  # beyond as many tokens keys are others (LongRoPE)
    num_drafts: int = 0  # tokens proposed by a draft model for each step
    num_host_pages: int = 0  # of preempted requests, kept by the host; 0: they are computed again

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
        """Positions that one request can have."""
        return min(self.max_positions, (self.num_pages - 1) * self.page_size)

    @property
    def table_width(self) -> int:
        """Pages of the longest request."""
        return -(-self.context // self.page_size)

    def rows(self, number: int) -> int:
        """The smallest size of a call that has room for so many rows."""
        return self.row_sizes[bisect.bisect_left(self.row_sizes, number)]

    @property
    def chunk_shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and tokens of each call for prompts that a step may make."""
        return tuple(
            (rows, length)
            for rows in self.row_sizes
            if rows <= max(self.max_piece_rows, self.row_sizes[0])
            for length in self.chunk_sizes
            if rows * length <= self.max_step_tokens
        )


class PlannedRow(NamedTuple):
    """Tokens of one request that a step takes in; of a kind that is quickly made."""

    stream: RequestStream
    slot: int
    pages: tuple[int, ...]
    start: int  # position of the first
    ids: tuple[int, ...]  # empty: the one that the device drew last
    count: int
    draws: bool  # whether the token after the last one is drawn
    context: int  # tokens that the request has come to
    num_drafts: int = 0  # of these tokens the last are proposed only, and judged by the step
    targets: tuple[int, ...] = ()  # tokens after each of these, where the prompt is scored


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A step, in the order in which the device does it."""

    saves: list[tuple[int, int]]  # pages, and the host's slots that they go to
    copies: list[tuple[int, int]]  # pages, from and to
    zeros: list[int]  # pages to fill with zeros
    restores: list[tuple[int, int]]  # the host's slots, and the pages that they go to
    chunks: list[PlannedRow]
    chunk_length: int
    decodes: list[PlannedRow]
    verifies: list[PlannedRow]

    @property
    def num_tokens(self) -> int:
        """Tokens that are taken in."""
        return sum(row.count for row in self.rows)

    @property
    def rows(self) -> list[PlannedRow]:
        """All rows: prompts' first."""
        return [*self.chunks, *self.decodes, *self.verifies]

    @property
    def is_empty(self) -> bool:
        """Whether the device has nothing to do."""
        return not (self.saves or self.zeros or self.copies or self.restores or self.rows)


class Drawn(NamedTuple):
    """Tokens that a step sampled for one row; a tuple, which is quickly made."""

    row: PlannedRow
    tokens: tuple[int, ...]  # after the first token, and after each draft
    num_held: int  # drafts that are what was drawn
    is_bad: bool  # its logits were not finite
    score: TokenScore | None = None  # of the token, where it was asked for
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt's tokens after these


def drawn_of_rows(
    rows: Sequence[PlannedRow], drawn: np.ndarray, scores: Sequence[LogProbabilities]
) -> list[Drawn]:
    """Returns the tokens and scores of each of a call's rows that samples or is scored.

    Args:
        drawn: int32 samples, int32: one of each row [B], or the number of accepted drafts and a
            token after each of the row's [B, 1 + T]; rows beyond these are padding.
        scores: of the samples, and of the tokens that follow the rows'; none where not asked for.
    """
    values = drawn.tolist()
    if drawn.ndim == 1 and not scores:
        told = zip(rows, values, strict=False)
        return [Drawn(row, (token,), 0, token < 0) for row, token in told if row.draws]
    return [
        _of_row(row, place, value if drawn.ndim > 1 else [0, value], scores)
        for place, (row, value) in enumerate(zip(rows, values, strict=False))
        if row.draws or row.targets
    ]


def _of_row(
    row: PlannedRow, place: int, drawn: Sequence[int], scores: Sequence[LogProbabilities]
) -> Drawn:
    held, *tokens = drawn
    asked, score, of_prompt = row.stream.request.sampling.logprobs, None, ()
    if asked is not None and row.draws and scores:
        score = _score(scores[0], place, asked)
    if asked is not None and row.targets and len(scores) > 1:
        of_prompt = tuple(_score(scores[1], at, asked) for at in range(len(row.targets)))
    return Drawn(
        row=row,
        tokens=tuple(tokens) if row.draws else (),
        num_held=held,
        is_bad=held < 0 or tokens[0] < 0,
        score=score,
        prompt_scores=of_prompt,
    )


def _score(scores: LogProbabilities, place: int, number: int) -> TokenScore:
    return TokenScore(
        logprob=float(scores.chosen_B[place]),
        top=tuple(
            zip(
                scores.top_ids_BK[place, :number].tolist(),
                scores.top_BK[place, :number].tolist(),
                strict=True,
            )
        ),
    )
