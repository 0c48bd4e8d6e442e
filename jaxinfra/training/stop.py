"""When a run that has steps to save obeys a signal: alone at once, with others together."""

import concurrent.futures
import dataclasses
import signal
import threading
from collections.abc import Callable
from typing import final

from jaxinfra.runtime.host_exchange import Exchange, ProcessRow, ProcessTable
from jaxinfra.runtime.signals import StopRequest

_LOOK_EVERY_S = 0.1


class Stopped(BaseException):
    """Raised in a wait that a signal has ended.

    Like KeyboardInterrupt no Exception, so that no handler of failures takes it for one.
    """


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

    def hold(self) -> None:
        """From now on there are steps to save: a signal no longer ends this process by itself."""
        self._request.hold()

    def wait_for[T](self, make: Callable[[], T]) -> T:
        """What ``make`` returns, in a wait that may never end.

        Raises Stopped where a signal comes first and this process is alone. With others it waits
        on: they may have begun a step that needs this process.
        """
        if self._exchange is not None:
            return make()
        made: concurrent.futures.Future[T] = concurrent.futures.Future()
        threading.Thread(target=_fulfil, args=(made, make), name="input", daemon=True).start()
        while not concurrent.futures.wait([made], timeout=_LOOK_EVERY_S).done:
            if self._request and self._request.is_held:
                raise Stopped
        return made.result()

    @property
    def signal(self) -> signal.Signals | None:
        """Why all stop; None while they do not."""
        return self._request.asked if self._exchange is None else self._agreed

    def start(self, row: ProcessRow) -> ProcessTable | None:
        """Sends this process's wish and times; a collective."""
        if self._exchange is None:
            return None
        asked = self._request.asked
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


def _fulfil[T](made: concurrent.futures.Future[T], make: Callable[[], T]) -> None:
    try:
        made.set_result(make())
    except BaseException as error:  # whoever waits gets it
        made.set_exception(error)
