"""SIGINT and SIGTERM: handlers that raise nothing, and a thread that obeys.

An exception from a handler comes up wherever the main thread is, in a callback of the garbage
collector too, where Python ignores it; and none comes up while a compiler runs. So handlers only
note. A process that has nothing to save is ended by a thread of its own, within a second in every
phase; one that has says so with ``hold``, and looks at ``asked`` where it can save.
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
    """A stop request says which signal asked this process to stop, if one did.

    Args:
        code: of the exit where nothing is held; 128 + the signal's number where it is None.
        words: said before that exit, after "stopped by SIGINT"; with a space or a comma in front.
    """

    def __init__(self, *, code: int | None = None, words: Callable[[], str] = str):
        self.asked: signal.Signals | None = None
        self.code, self.words = code, words
        self._held = False
        self._elsewhere = False
        self._back = threading.Event()
        self._num_seen = 0
        self._unfinished: set[Path] = set()

    def __bool__(self) -> bool:
        return self.asked is not None

    @property
    def is_held(self) -> bool:
        """Whether a signal leaves the process to whoever called ``hold``."""
        return self._held

    def hold(self) -> None:
        """Makes signals be noted from now on, for the caller to obey. A second SIGINT still ends
        the process at once: somebody does not want to wait for the save.
        """
        self._held = True

    @contextlib.contextmanager
    def elsewhere(self, notice: int) -> Iterator[None]:
        """Leaves signals to handlers of the caller's own, within.

        Args:
            notice: the pipe whose reader calls ``obey`` and ``come_back``, in order.
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

    def come_back(self) -> None:
        """Marks that all signals of ``elsewhere`` are read; called in the thread that obeys."""
        self._elsewhere = False
        self._back.set()

    @contextlib.contextmanager
    def unfinished(self, path: Path) -> Iterator[None]:
        """Makes a stop remove this file or directory, within."""
        self._unfinished.add(path)
        try:
            yield
        finally:
            self._unfinished.discard(path)

    def note(self, number: int) -> None:
        """Notes a signal, from a handler: if held, it can be obeyed at the next step."""
        if not self._elsewhere:
            self.asked = self.asked or signal.Signals(number)

    def obey(self, number: int) -> None:
        """Obeys a signal; called in a thread of its own for each that comes."""
        if self._elsewhere:
            return
        self.note(number)
        self._num_seen += 1
        asked = signal.Signals(number)
        if not self._held:
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
    """Obeys signals from now until the process ends; to be called first of all.

    Raises nothing, and returns the request that ``process_request`` will return too.
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


def leave_ended() -> None:
    """Ignores signals from now on: the command has ended, and its exit code is settled.

    Python gives signals back to the system as it leaves, which takes a second with JAX: one that
    came then would make a failure of what is done.
    """
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)


def process_request() -> StopRequest | None:
    """Returns the request of ``guard_process``; None in a process that is not guarded."""
    return _of_process


@contextlib.contextmanager
def noted_signals() -> Iterator[StopRequest]:
    """Notes and holds SIGINT and SIGTERM, within, in a process that is not guarded.

    For a caller's own program: a second SIGINT raises KeyboardInterrupt as Python does. Where the
    process is guarded, this is its request, as it is.
    """
    if _of_process is not None:
        yield _of_process
        return
    request = StopRequest()
    request.hold()

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
def handled_elsewhere() -> Iterator[None]:
    """Leaves signals to handlers that the caller has set, within."""
    with _of_process.elsewhere(_notice) if _of_process is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt, within: for a command that has
    jobs to end.
    """
    with handled_elsewhere():
        before = {number: signal.signal(number, signal.default_int_handler) for number in _ASKING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[None]:
    """Makes a signal that ends this process remove ``path`` first, within."""
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
            request.come_back()
        elif number[0] in _ASKING:
            request.obey(number[0])
