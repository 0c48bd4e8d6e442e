"""Xid errors: what the NVIDIA driver wrote into the kernel log.

Meanings: NVIDIA, "XID Errors", GPU deployment and management documentation.
"""

import collections
import contextlib
import os
import re
from collections.abc import Iterable

from jaxinfra.diagnostics.machine.finding import Finding, Grade, not_known

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_RULE = "the kernel log has no Xid error"
_RESET = "reset the GPU or restart the node before the next job"
_REPLACE = "take the node out of service and have the GPU replaced"
_PROGRAM = "a program's fault, or memory's: run the job again with compute-sanitizer"

# Number: what it says, whether the GPU itself is at fault, the remedy.
_MEANING = {
    13: ("a kernel raised an exception", Grade.WARN, _PROGRAM),
    31: ("a kernel read or wrote an unmapped address", Grade.WARN, _PROGRAM),
    43: ("a process was stopped after an error of its own", Grade.WARN, _PROGRAM),
    45: ("work was removed after an earlier error", Grade.WARN, "look at the error before it"),
    48: ("an uncorrectable memory error", Grade.FAIL, _RESET),
    62: ("an internal microcontroller halted", Grade.FAIL, _RESET),
    63: ("a memory row is to be remapped", Grade.FAIL, _RESET),
    64: ("a memory row could not be remapped", Grade.FAIL, _REPLACE),
    74: ("an NVLink error", Grade.FAIL, "restart the node; check links with nvidia-smi nvlink -e"),
    79: ("the GPU has fallen off the bus", Grade.FAIL, _REPLACE),
    92: ("many corrected memory errors", Grade.WARN, "watch the GPU; replace it if they go on"),
    94: ("a contained memory error", Grade.FAIL, "start the job again; reset the GPU"),
    95: ("an uncontained memory error", Grade.FAIL, _RESET),
    119: ("the GPU's system processor does not answer", Grade.FAIL, _RESET),
    120: ("an error of the GPU's system processor", Grade.FAIL, _RESET),
}


def kernel_log() -> list[str] | None:
    """Lines of the kernel's ring buffer; None where this user may not read it."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    lines = []
    try:
        with contextlib.suppress(BlockingIOError):  # the end of what there is
            while record := os.read(descriptor, 1 << 16):
                lines.append(record.decode(errors="replace"))
    except OSError:
        return lines or None  # overwritten while it was read
    finally:
        os.close(descriptor)
    return lines


def xid_findings(lines: Iterable[str] | None) -> list[Finding]:
    """One finding per kind of error and GPU."""
    if lines is None:
        return [not_known("Xid errors", "the kernel log cannot be read here", rule=_RULE)]
    counts = collections.Counter(
        (match[1], int(match[2])) for line in lines if (match := _LINE.search(line))
    )
    if not counts:
        return [Finding(subject="Xid errors", grade=Grade.OK, value="none", rule=_RULE)]
    found = []
    for (place, number), times in sorted(counts.items()):
        text, grade, remedy = _MEANING.get(
            number, ("see NVIDIA's list of Xid errors", Grade.WARN, _RESET)
        )
        found.append(
            Finding(
                subject=f"Xid {number}",
                grade=grade,
                value=f"{times} on GPU {place}: {text}",
                rule=_RULE,
                remedy=remedy,
            )
        )
    return found
