"""Signals that ask a run to stop: obeyed at once until a step is done, between steps after it."""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

import jax

from jaxinfra.reliability.exchange import Exchange, ProcessRow, ProcessTable

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
        self.nothing_to_save = False

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def at_once(self, *, nothing_to_save: bool = False) -> Iterator[None]:
        """Within, a signal raises Stopped: for work that a second start does again.

        Args:
            nothing_to_save: the process may end on the spot. Where the main thread runs no Python
                for 3 s after the signal, since it compiles or waits for another process, it does.
        """
        before = self._at_once, self.nothing_to_save
        self._at_once, self.nothing_to_save = True, nothing_to_save
        try:
            if self:  # it came before
                raise Stopped
            yield
        finally:
            self._at_once, self.nothing_to_save = before

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        del frame
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_first = not self
        self.signal = signal.Signals(number)
        if self._at_once and is_first:  # a second must not disturb how the work ends
            raise Stopped


@final
class Agreement:
    """When to stop: alone as soon as asked, with others at the step that all of them know.

    A signal may reach one process only, and each at another moment. So a process tells the others
    in the table of its next step, and all stop after the step whose table they then read.

    Args:
        exchange: None where this process is alone.
    """

    def __init__(self, request: StopRequest, exchange: Exchange | None):
        self._request = request
        self._exchange = exchange
        self._agreed: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def interrupting(self) -> contextlib.AbstractContextManager[None]:
        """Within, a signal raises Stopped where this process is alone: a wait that may never end.

        With others it does not: they may have begun a step that needs this process.
        """
        return self._request.at_once() if self._exchange is None else contextlib.nullcontext()

    def with_unsaved(self, *, steps: bool) -> contextlib.AbstractContextManager[None]:
        """Within, a signal ends this process at once, and that ends the others; not where ``steps``
        were done that would be lost.
        """
        return contextlib.nullcontext() if steps else self._request.at_once(nothing_to_save=True)

    @property
    def signal(self) -> signal.Signals | None:
        """Why all stop; None while they do not."""
        return self._request.signal if self._exchange is None else self._agreed

    def start(self, row: ProcessRow) -> ProcessTable | None:
        """Sends this process's wish and times; a collective."""
        if self._exchange is None:
            return None
        asked = self._request.signal
        return self._exchange.start(dataclasses.replace(row, stop=float(asked or 0)))

    def read(self, table: ProcessTable | None) -> list[ProcessRow]:
        """What all sent, by process; from now on this may be true."""
        if table is None:
            return []
        rows = table.rows()
        asked = max(int(row.stop) for row in rows)
        if asked:
            self._agreed = signal.Signals(asked)
        return rows

    def now(self) -> bool:
        """Whether to stop, as of now; a collective."""
        self.read(self.start(ProcessRow()))
        return bool(self)


@contextmanager
def stop_on_signals(*, ends_process: bool = False) -> Iterator[StopRequest]:
    """Within, SIGINT and SIGTERM are noted instead of ending the process.

    A second SIGINT raises KeyboardInterrupt: somebody does not want to wait for the save.

    Args:
        ends_process: what follows is the exit. A SIGTERM that comes then, as from a launcher which
            sees that another process has stopped, must not make another exit code of it; it is
            ignored after a request and in a job of several.
    """
    request = StopRequest()
    handlers = dict.fromkeys(_ASKING, request.note)
    handlers[_NUDGE] = _nothing
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with _nudges(request):
            yield request
    finally:
        if ends_process and (request or jax.distributed.is_initialized()):
            before[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, handler)


_ASKING = (signal.SIGINT, signal.SIGTERM)
# Ignored by default, and used by nothing here.
_NUDGE = signal.SIGURG
_LONGEST_S = 5.0
_PATIENCE_S = 3.0


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler: what a signal without one would not do is to interrupt a wait."""


@contextmanager
def _nudges(request: StopRequest) -> Iterator[None]:
    """Within, a noted signal gets its handler, even if the main thread was about to wait.

    Python runs handlers in the main thread between two instructions. A signal that comes after the
    last of them and before the wait of a lock interrupts nothing, and a wait for data may be long.
    No nudge reaches a main thread that compiles, for minutes perhaps, or waits in a collective for
    another process: there the process is ended, if it has nothing to save.
    """
    noticed, notice = socket.socketpair()
    notice.setblocking(False)  # as signal.set_wakeup_fd asks
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        while number := noticed.recv(1):  # of any signal that has a handler
            wait_s, came = 0.1, time.monotonic()
            while number[0] in _ASKING and not request and not ended.wait(wait_s):
                if request.nothing_to_save and time.monotonic() - came >= _PATIENCE_S:
                    _leave(signal.Signals(number[0]))
                signal.pthread_kill(main, _NUDGE)
                wait_s = min(2 * wait_s, _LONGEST_S)

    ended = threading.Event()
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    before = signal.set_wakeup_fd(notice.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        notice.close()  # ends the watcher's reading
        watcher.join()
        noticed.close()


def _leave(asked: signal.Signals) -> None:
    """Ends the process, from a thread that is not the main one."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # a live panel hides the cursor
    sys.stdout.flush()
    print(
        f"stopped by {asked.name} in a compilation, or in a wait for another process, with nothing "
        "to save",
        file=sys.stderr,
        flush=True,
    )
    os._exit(RESUMABLE_EXIT)
