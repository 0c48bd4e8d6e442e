"""Signals that ask a run to stop: obeyed at once during set-up, between steps after it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RESUMABLE_EXIT = 75
"""Exit code of a run that was asked to stop and can be continued (EX_TEMPFAIL)."""


class Stopped(BaseException):
    """Raised by a signal while there is nothing to save.

    Like KeyboardInterrupt no Exception, so that no handler of failures takes it for one.
    """


class StopRequest:
    """Which signal asked, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, a signal raises Stopped: for work that a second start does again.

        In the middle of a compilation it does so when the compiler returns.
        """
        self._at_once = True
        try:
            if self:  # it came before
                raise Stopped
            yield
        finally:
            self._at_once = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del frame
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if self._at_once:
            raise Stopped


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within, SIGINT and SIGTERM are noted instead of ending the process.

    A second SIGINT raises KeyboardInterrupt: somebody does not want to wait for the save.
    """
    request = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, request.note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
