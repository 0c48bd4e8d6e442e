"""Oracle of a pipeline program's buffer slots: it follows the named value in each slot."""

import functools

from jaxinfra.parallel.pipeline.schedule import Kind
from jaxinfra.parallel.pipeline.tick_program import TickProgram

type _Value = tuple[str, int, int]
"""Value in a slot: its kind, its micro-batch, and the position that reads or made it."""


def lifetime_violations(program: TickProgram) -> list[str]:
    """Lists actions that would read a wrong value from a buffer slot, found by running the tables
    with names instead of tensors. This does not depend on how slots were assigned.
    """
    schedule = program.schedule
    stages, last = schedule.num_stages, schedule.num_positions - 1
    counts = (program.num_inbox, program.num_saved, program.num_pending)
    empty: _Value | None = None
    inbox, saved, pending = ([[empty] * max(count, 1) for _ in range(stages)] for count in counts)
    found: list[str] = []
    for tick in range(schedule.num_ticks):
        outputs = [empty] * stages
        for stage in range(stages):
            action = schedule.action(tick, stage)
            if action is None:
                continue
            i, j = action.micro_batch, action.position
            expect = functools.partial(_expect, found, f"tick {tick} stage {stage}: {action}")
            at = int(program.saved[tick, stage]), int(program.pending[tick, stage])
            given = inbox[stage][program.read[tick, stage]]
            match action.kind:
                case Kind.FORWARD:
                    if j > 0:
                        expect(given, ("activation", i, j))
                    saved[stage][at[0]] = ("saved", i, j)
                    outputs[stage] = ("cotangent", i, j) if j == last else ("activation", i, j + 1)
                case Kind.BACKWARD | Kind.INPUT:
                    expect(given, ("cotangent", i, j))
                    expect(saved[stage][at[0]], ("saved", i, j))
                    outputs[stage] = ("cotangent", i, j - 1)
                    if action.kind is Kind.INPUT:
                        pending[stage][at[1]] = ("pending", i, j)
                case Kind.WEIGHT:
                    expect(saved[stage][at[0]], ("saved", i, j))
                    expect(pending[stage][at[1]], ("pending", i, j))
        for stage in range(stages):
            inbox[stage][program.write[tick, stage]] = outputs[stage]
        for direction, pairs in enumerate(program.exchanges[program.exchange[tick]]):
            for source, target in pairs:
                inbox[target][program.receive[tick, direction, target]] = outputs[source]
    return found


def _expect(found: list[str], reader: str, got: object, wanted: object) -> None:
    if got != wanted:
        found.append(f"{reader} reads {got} instead of {wanted}")
