"""Which mesh axis a trace's communication is of.

A trace names kernels and the operations that launched them, and no axes. Those are in the compiled
program, which ``training.profile`` writes down beside the trace.
"""

import collections
import re
from pathlib import Path
from typing import Any, TypedDict, final

from jaxinfra.diagnostics.trace import TraceEvent
from jaxinfra.runtime.files import read_json
from jaxinfra.training.profile import COLLECTIVES_FILE

UNKNOWN = "unknown"
_KIND = re.compile("all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute")


class _Collective(TypedDict):
    axes: list[str]
    instruction: str
    kind: str
    scope: str
    sent_bytes: float


@final
class CollectiveAxes:
    """Axes and bytes of a program's collectives."""

    def __init__(self, collectives: list[dict[str, Any]]):
        self._by_name: dict[str, str] = {}
        by_place: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
        by_kind: dict[str, set[str]] = collections.defaultdict(set)
        self.sent_bytes: dict[str, float] = collections.defaultdict(float)
        for each in collectives:
            axes = " x ".join(each["axes"])
            self._by_name[each["instruction"]] = axes
            by_place[each["kind"], each["scope"]].add(axes)
            by_kind[each["kind"]].add(axes)
            self.sent_bytes[axes] += each["sent_bytes"]
        self._by_place = {place: " or ".join(sorted(axes)) for place, axes in by_place.items()}
        self._by_kind = {kind: min(axes) for kind, axes in by_kind.items() if len(axes) == 1}

    def of(self, event: TraceEvent) -> str:
        """Such as ``fsdp`` or ``fsdp x tensor``; ``unknown`` where the program has no such one."""
        # Asynchronous ones are launched under the name of what they wrap, which the program's text
        # leaves out. Where the host's side of the trace does not say what started them, both still
        # say where in the source they come from.
        if axes := self._by_name.get(event.hlo_op) or self._by_name.get(event.started_by):
            return axes
        found = _KIND.search(event.hlo_op.replace("_", "-"))
        kind = found[0] if found else ""
        if axes := self._by_place.get((kind, event.op_name)):
            return axes
        return self._by_kind.get(kind, UNKNOWN)  # where all of a kind go over the same


def mesh_axes(trace: Path) -> CollectiveAxes | None:
    """Axes from the newest description under a trace's directory; None where there is none: of one
    device, or another program's.
    """
    files = sorted(trace.rglob(COLLECTIVES_FILE), key=lambda file: file.stat().st_mtime)
    return CollectiveAxes(read_json(files[-1], holds=list[_Collective])) if files else None
