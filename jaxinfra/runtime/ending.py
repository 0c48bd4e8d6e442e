"""How a process ended, and why: pure functions of what the system says about it."""

import dataclasses
import re
import signal
from pathlib import Path

from jaxinfra.runtime.signals import RESUMABLE_EXIT

_FATAL = (1, 2)
# Where a peer goes, the others end so: by JAX's own abort, or by our word for it. A rank that ended
# otherwise was there first.
_CONSEQUENCES = (74, -signal.SIGABRT)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A rank's end."""

    rank: int
    code: int  # minus the signal's number where one ended it
    order: int  # in which it was seen to end
    killed_by_us: bool = False
    stopped: bool = False  # its process was halted by a signal when it was killed

    @property
    def exit_code(self) -> int:
        """Exit code as a shell gives it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def is_fatal(self) -> bool:
        """Whether the same would happen again."""
        return self.code in _FATAL

    def describe(self) -> str:
        """How the process ended, in words."""
        if self.stopped:
            return f"rank {self.rank} was halted (SIGSTOP, or a debugger)"
        if self.code < 0:
            name = signal.Signals(-self.code).name
            return f"rank {self.rank} was ended by {name} (exit {self.exit_code})"
        meaning = {
            0: "ended normally",
            1: "failed",
            2: "was used wrongly",
            74: "lost another rank",
            RESUMABLE_EXIT: "was asked to stop",
        }.get(self.code, "failed")
        return f"rank {self.rank} {meaning} (exit {self.code})"


def first_failure(endings: list[Ending]) -> Ending | None:
    """The rank that the others' failures follow from."""
    failed = [end for end in endings if end.code != 0 and not end.killed_by_us]
    halted = [end for end in endings if end.stopped]
    return min(
        halted or failed,
        key=lambda end: (end.code in _CONSEQUENCES and not end.stopped, end.order),
        default=None,
    )


def is_halted(pid: int) -> bool:
    """Whether a process does not run because a signal has stopped it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")


def own_memory_group(root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The directory of this process's memory cgroup, of version 2 or 1; None where it has none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            candidates = [root / "memory" / path.lstrip("/"), root / "memory"]
        elif not controllers:
            candidates = [root / path.lstrip("/"), root]
        else:
            continue
        for candidate in candidates:
            if count_memory_kills(candidate) is not None:
                return candidate
    return None


def count_memory_kills(group: Path | None) -> int | None:
    """How many processes of a cgroup the kernel has killed for memory; None where not known."""
    if group is None:
        return None
    for name in ("memory.events", "memory.oom_control"):
        try:
            match = re.search(r"^oom_kill (\d+)$", (group / name).read_text(), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return None
