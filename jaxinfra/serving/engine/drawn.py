"""What a step drew, as the host reads it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxinfra.serving.engine.plan import PlannedRow
from jaxinfra.serving.engine.requests import TokenScore
from jaxinfra.serving.sampling import LogProbabilities


class Drawn(NamedTuple):
    """What a step drew for one row; of a kind that is quickly made."""

    row: PlannedRow
    tokens: tuple[int, ...]  # after the first token, and after each draft
    num_held: int  # drafts that are what was drawn
    is_bad: bool  # its logits were not finite
    score: TokenScore | None = None  # of the token, where it was asked for
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt's tokens after these


def of_rows(
    rows: Sequence[PlannedRow], drawn: np.ndarray, scores: Sequence[LogProbabilities]
) -> list[Drawn]:
    """What a call gave for each of its rows that draws or is scored.

    Args:
        drawn: int32, a token of each row [B], or how many drafts hold and a token after each of
            the row's [B, 1 + T]; rows beyond these are padding.
        scores: of the draws, and of the tokens that follow the rows'; none where nobody asked.
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
