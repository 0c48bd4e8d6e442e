"""Which programs an engine may need: all of them are compiled before the first request."""

import dataclasses

from jaxinfra.serving.engine.page_moves import PAGES_AT_ONCE
from jaxinfra.serving.engine.plan import SchedulerLimits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """One compiled program: what it does, and for which shapes."""

    name: str
    rows: int
    length: int = 1
    is_fresh: bool = False
    is_full: bool = False

    def __str__(self) -> str:
        kind = " from position 0" * self.is_fresh + " with all settings" * self.is_full
        return f"{self.name} {self.rows} x {self.length}{kind}"


COPY = ProgramKey(name="copy", rows=PAGES_AT_ONCE)
SAVE = ProgramKey(name="save", rows=PAGES_AT_ONCE)
RESTORE = ProgramKey(name="restore", rows=PAGES_AT_ONCE)
MASK = ProgramKey(name="mask", rows=1)


def listed_programs(
    limits: SchedulerLimits, *, verify_length: int | None
) -> tuple[ProgramKey, ...]:
    """Every program that a step may need.

    Args:
        verify_length: tokens of a row with drafts; none without speculation.
    """
    # All settings cost passes over the logits, which beside a chunk's own work are nothing.
    keys = [
        ProgramKey(name="step", rows=rows, is_full=is_full)
        for rows in limits.row_sizes
        for is_full in (False, True)
    ]
    keys += [
        ProgramKey(name="step", rows=rows, length=length, is_fresh=is_fresh, is_full=True)
        for rows, length in limits.chunk_shapes
        for is_fresh in (True, False)
    ]
    keys += [
        ProgramKey(name="score", rows=limits.rows(1), length=length)
        for length in limits.chunk_sizes
        if length <= limits.max_step_tokens
    ]
    if verify_length is not None:
        keys += [
            ProgramKey(name="verify", rows=rows, length=verify_length) for rows in limits.row_sizes
        ]
    if limits.num_host_pages:
        keys += [SAVE, RESTORE]
    return (*keys, COPY, history_program(limits), MASK)


def history_program(limits: SchedulerLimits) -> ProgramKey:
    """The one that begins a slot's history."""
    return ProgramKey(name="history", rows=1, length=limits.context)
