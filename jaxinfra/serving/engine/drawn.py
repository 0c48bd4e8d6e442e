"""What a step drew, as the host reads it."""

import dataclasses

import numpy as np

from jaxinfra.serving.engine.plan import PlannedRow
from jaxinfra.serving.engine.requests import TokenScore
from jaxinfra.serving.sampling import LogProbabilities


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What a step drew for one row."""

    row: PlannedRow
    tokens: tuple[int, ...]  # after the first token, and after each draft
    num_held: int  # drafts that are what was drawn
    is_bad: bool  # its logits were not finite
    score: TokenScore | None = None  # of the token, where it was asked for
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt's tokens after these


def of_row(row: PlannedRow, place: int, drawn: np.ndarray, scores: list[LogProbabilities]) -> Drawn:
    """What a call gave for one row.

    Args:
        scores: of the draws, and of the tokens that follow the row's; none where nobody asked.
    """
    held, *tokens = drawn.tolist() if drawn.ndim else (0, int(drawn))
    asked, score, of_prompt = row.stream.request.sampling.logprobs, None, ()
    if asked is not None and row.draws:
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
