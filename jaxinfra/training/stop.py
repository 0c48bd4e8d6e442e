"""Signals that ask a run to stop: noted at once, obeyed between steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RESUMABLE_EXIT = 75
"""Exit code of a run that was asked to stop, saved, and can be resumed (EX_TEMPFAIL)."""


class StopRequest:
    """Which signal asked, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within, SIGINT and SIGTERM are noted instead of ending the process.

    A second SIGINT raises KeyboardInterrupt: somebody does not want to wait for the save.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
