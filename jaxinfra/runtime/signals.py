"""Handling of SIGINT and SIGTERM: handlers that only note the signal, and a thread that obeys it.

An exception from a handler is raised wherever the main thread is: in a garbage collector's callback
Python ignores it, and while a compiler runs it does not come. So handlers only note the signal. If
a process has nothing to save, a thread ends it within a second in every phase. A process with
something to save calls ``defer``, and checks ``asked`` where it can save.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import final

RESUMABLE_EXIT = 75
"""Exit code of a run that was asked to stop and can be started again (EX_TEMPFAIL)."""

_ASKING = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 0.5
# In the pipe of signals' numbers: what came before it came while they were handled elsewhere.
_BACK = b"\0"


@final
class StopRequest:
    """Request to stop this process: the signal that asked for it, if one did."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        # Exit code if no signal is held; None: 128 + the signal's number.
        self.code: int | None = None
        # Makes the text printed at that exit, after "stopped by SIGINT": " ..." or ", ...".
        self.words: Callable[[], str] = str
        self.is_deferred = (
            False  # after ``defer``: signals are only noted, and the caller obeys them
        )
        self._elsewhere = False
        self._back = threading.Event()
        self._num_seen = 0
        self._unfinished: set[Path] = set()

    def __bool__(self) -> bool:
        return self.asked is not None

    def defer(self) -> None:
        """Makes handlers only note signals from now on; the caller checks ``asked`` and stops. A
        second SIGINT still ends the process at once, for a user who does not wait for the save.
        """
        self.is_deferred = True

    @contextlib.contextmanager
    def elsewhere(self, notice: int) -> Iterator[None]:
        """Leaves signals to the caller's own handlers within a ``with`` block.

        Args:
            notice: file descriptor of the pipe that tells the watching thread of the block's end.
        """
        self._elsewhere = True
        self._back.clear()
        try:
            yield
        finally:
            # A signal of within may not be read yet: obeyed now, it would end the process while
            # the caller ends its jobs.
            os.write(notice, _BACK)
            self._back.wait(_LAST_WORDS_S)
            self._elsewhere = False

    def end_delegation(self) -> None:
        """Marks that signals from an ``elsewhere`` block are read; the watching thread calls it."""
        self._elsewhere = False
        self._back.set()

    @contextlib.contextmanager
    def unfinished(self, path: Path) -> Iterator[None]:
        """Makes a stop within a ``with`` block remove this file or directory."""
        self._unfinished.add(path)
        try:
            yield
        finally:
            self._unfinished.discard(path)

    def note(self, number: int) -> None:
        """Notes a signal, in a handler; if held, the caller obeys it at its next step."""
        if not self._elsewhere:
            self.asked = self.asked or signal.Signals(number)

    def obey(self, number: int) -> None:
        """Obeys a signal, in the watching thread: ends the process unless signals are held."""
        if self._elsewhere:
            return
        self.note(number)
        self._num_seen += 1
        asked = signal.Signals(number)
        if not self.is_deferred:
            self._end(asked, self.code or 128 + number)
        elif self._num_seen > 1 and asked is signal.SIGINT:
            self._end(asked, 128 + number)

    def _end(self, asked: signal.Signals, code: int) -> None:
        # In a thread that may be left behind: the main one may hold the lock of a stream whose
        # reader stands still.
        speaking = threading.Thread(target=self._say, args=(asked,), daemon=True)
        speaking.start()
        for path in list(self._unfinished):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        speaking.join(_LAST_WORDS_S)
        os._exit(code)

    def _say(self, asked: signal.Signals) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a live panel hides the cursor
        sys.stdout.write(f"stopped by {asked.name}{self.words()}\n")
        sys.stdout.flush()


_of_process: StopRequest | None = None
_notice = -1  # where signals' numbers are written


def guard_process() -> StopRequest:
    """Starts to obey signals, until the process ends; call it before anything else.

    It raises nothing and returns what ``process_request`` returns later.
    """
    global _of_process, _notice
    if _of_process is not None:
        return _of_process
    _of_process = StopRequest()
    noticed, _notice = os.pipe()
    os.set_blocking(_notice, False)  # as signal.set_wakeup_fd asks
    for number in _ASKING:
        signal.signal(number, _note)
    # Written by the handler in C, in whichever thread, whatever the main thread does.
    signal.set_wakeup_fd(_notice, warn_on_full_buffer=False)
    threading.Thread(
        target=_watch, args=(noticed, _of_process), name="signals", daemon=True
    ).start()
    return _of_process


def ignore_signals_at_exit() -> None:
    """Ignores signals from now on, because the command has ended and its exit code is settled.

    Python restores the default handlers as it exits, which takes a second with JAX: a signal in
    that time would turn a success into a failure.
    """
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)


UNAWAITED = "unawaited"
"""Beginning of the names of threads whose work is useless once the command has ended."""


def end_without_waiting(code: int) -> None:
    """Ends the process at once if threads named ``UNAWAITED`` are left; Python would wait for them.

    Args:
        code: exit code of the process.
    """
    if any(thread.name.startswith(UNAWAITED) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def process_request() -> StopRequest | None:
    """Returns the stop request that ``guard_process`` made; None if the process is not guarded."""
    return _of_process


@contextlib.contextmanager
def noted_signals() -> Iterator[StopRequest]:
    """Notes and holds SIGINT and SIGTERM within a ``with`` block, in a process that is not guarded.

    It serves a caller's own program: a second SIGINT raises KeyboardInterrupt as usual. In a
    guarded process it returns the process's own request unchanged.
    """
    if _of_process is not None:
        yield _of_process
        return
    request = StopRequest()
    request.defer()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.asked = request.asked or signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield request  # Python lets only the main thread set handlers
        return
    before = {number: signal.signal(number, note) for number in _ASKING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def delegated_signals() -> Iterator[None]:
    """Leaves signals to handlers that the caller has set, within a ``with`` block."""
    with _of_process.elsewhere(_notice) if _of_process is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt, for a command with jobs to end."""
    with delegated_signals():
        before = {number: signal.signal(number, signal.default_int_handler) for number in _ASKING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[None]:
    """Makes a signal that ends this process within a ``with`` block remove ``path`` first."""
    with _of_process.unfinished(path) if _of_process is not None else contextlib.nullcontext():
        yield


def _note(number: int, frame: FrameType | None) -> None:
    """The handler, without which the signal would end the process by itself."""
    del frame
    if _of_process is not None:
        _of_process.note(number)


def _watch(noticed: int, request: StopRequest) -> None:
    while number := os.read(noticed, 1):
        if number == _BACK:
            request.end_delegation()
        elif number[0] in _ASKING:
            request.obey(number[0])
