"""Who is missing when a job stands still: read from the ranks' recorders, all ranks alike.

A rank that waits for the others is in ``wait``: it has handed its work to the devices. The one they
wait for is in another phase, or at an earlier step, or does not run at all.
"""

import dataclasses
from collections.abc import Collection, Sequence

from jaxinfra.runtime.recorder import RankRecord

# The order within a step; whoever is furthest behind is waited for.
_ORDER = {"input": 0, "place": 1, "compile": 2, "step": 2, "wait": 3, "evaluate": 4, "save": 5}
ENDED = ("done",)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """The verdict on a job that stands still."""

    ranks: tuple[int, ...]  # empty: all wait in one collective
    text: str


def find_absent(
    records: Sequence[RankRecord], *, num_ranks: int, not_running: Collection[int] = (), now: float
) -> Absence:
    """Names the ranks that the others wait for, and what those do instead.

    Args:
        not_running: ranks whose heartbeat stands still: stopped, dead, or their host is.
        now: wall time.
    """
    there = {record.rank: record for record in records}
    unseen = [rank for rank in range(num_ranks) if rank not in there]
    if unseen:
        return Absence(ranks=tuple(unseen), text=f"{_ranks(unseen)} never began to record")
    if not_running:
        absent = sorted(not_running)
        text = "; ".join(
            f"rank {rank} does not run: its process is stopped, dead or cut off, last in "
            f"{_where(there[rank])}"
            for rank in absent
        )
        return Absence(ranks=tuple(absent), text=text)
    places = {record.rank: _place(record) for record in records if record.phase not in ENDED}
    behind = min(places.values(), default=(0, 0))
    absent = sorted(rank for rank, place in places.items() if place == behind)
    if len(absent) == num_ranks:
        text = f"no rank is behind: all {num_ranks} are in {_where(there[absent[0]])}"
        return Absence(ranks=(), text=f"{text}; a device or a link between them stands still")
    others = [there[rank] for rank in sorted(places) if rank not in absent]
    waiting = (
        f"; {_ranks([record.rank for record in others])} in {_where(others[0])}" if others else ""
    )
    text = "; ".join(
        f"rank {rank} is absent: for {now - there[rank].since:.0f} s in {_where(there[rank])}"
        for rank in absent
    )
    return Absence(ranks=tuple(absent), text=text + waiting)


def _place(record: RankRecord) -> tuple[int, int]:
    return record.step, _ORDER.get(record.phase, -1)


def _where(record: RankRecord) -> str:
    return f"{record.phase} of step {record.step}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
