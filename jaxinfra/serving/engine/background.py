"""The engine in a thread of its own, so that many callers can ask it at once."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import final

from jaxinfra.errors import JaxinfraError
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0  # that a step may take after the last request's time is up


class OverloadError(JaxinfraError):
    """More requests wait than the engine takes; later there may be room."""


class StoppedError(JaxinfraError):
    """The engine takes no requests any more."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """A request that was handed over."""

    request: GenerationRequest
    listen: Callable[[RequestProgress], None]
    number: int | None = None  # the engine's; None before it has seen it
    is_cancelled: bool = False


@final
class EngineThread:
    """Runs an engine's steps while it has requests.

    Args:
        max_open: requests that may wait or run at a time.
    """

    def __init__(self, engine: Engine, *, max_open: int):
        self.engine = engine
        self.max_open = max_open
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._arrived: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._open: dict[int, Ticket] = {}
        self._num_open = 0
        self._is_draining = self._is_closed = False
        self._step_begun: float | None = None  # None while there is nothing to do
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to take requests."""
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._num_open

    @property
    def stalled_s(self) -> float:
        """Seconds since the step under way was begun; 0 while there is nothing to do."""
        begun = self._step_begun
        return 0.0 if begun is None else time.monotonic() - begun

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return not self._is_draining and self.failure is None

    def submit(
        self, requests: list[GenerationRequest], listen: Callable[[int, RequestProgress], None]
    ) -> list[Ticket]:
        """Hands requests over, all of them or none.

        Args:
            listen: called in the engine's thread with the place of a request among these, and what
                a step brought for it; it must return at once.

        Raises:
            DataError, ConfigError: one of them cannot be served.
            OverloadError: there is no room for as many now.
            StoppedError: the engine is draining or has failed.
        """
        for request in requests:
            self.engine.check(request)
        tickets = [
            Ticket(request, lambda progress, place=place: listen(place, progress))
            for place, request in enumerate(requests)
        ]
        with self._changed:
            if not self.is_serving:
                raise StoppedError("the server is stopping; ask another one")
            if self._num_open + len(tickets) > self.max_open:
                raise OverloadError(
                    f"{self._num_open} requests run or wait and {len(tickets)} more would exceed "
                    f"{self.max_open}; try again later"
                )
            self._num_open += len(tickets)
            self._arrived += tickets
            self._changed.notify()
        return tickets

    def cancel(self, tickets: list[Ticket]) -> None:
        """Ends requests that no client waits for; those that have ended stay so."""
        with self._changed:
            self._cancelled += tickets
            self._changed.notify()

    def drain(self, timeout_s: float) -> bool:
        """Takes no more requests, and waits until those that are open have ended; whether they
        have.
        """
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(
                lambda: self._num_open == 0 or self.failure is not None, timeout_s
            )

    def close(self) -> None:
        """Ends the thread; open requests are told that they are cancelled. One that is stuck in a
        step is left behind, and ends with the process.
        """
        with self._changed:
            self._is_draining = self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_S if self.failure is None else 1.0)
        if self._thread.is_alive():
            _log.warning("the engine has been at one step for %.1f s; left behind", self.stalled_s)

    def fail(self, error: BaseException) -> None:
        """Takes no more requests, and tells those that are open; from any thread. The first error
        is the one that is remembered.
        """
        with self._changed:
            self.failure = self.failure or error
            tickets = [*self._open.values(), *self._arrived]
            self._open, self._arrived = {}, []
        for ticket in tickets:
            told = f"the engine failed: {type(error).__name__}"
            self._end(ticket, RequestProgress(request=-1, end=EndReason.ERROR, error=told))

    def _run(self) -> None:
        try:
            while self._take_in():
                for progress in self.engine.step():
                    self._tell(progress)
        except BaseException as error:
            _log.exception("the engine failed; it takes no more requests")
            self.fail(error)

    def _take_in(self) -> bool:
        """Gives the engine what came since, or waits for it; False: nothing is left to do."""
        with self._changed:
            self._step_begun = None
            self._changed.wait_for(
                lambda: self._arrived or self._cancelled or self._is_closed or self.engine.is_busy
            )
            self._step_begun = time.monotonic()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            if self._is_closed:
                cancelled = [*self._open.values(), *arrived]
        for ticket in cancelled:
            ticket.is_cancelled = True
            if ticket.number is not None:
                self.engine.cancel(ticket.number)
        for ticket in arrived:
            if ticket.is_cancelled:
                self._end(ticket, RequestProgress(request=-1, end=EndReason.CANCELLED))
                continue
            ticket.number = self.engine.submit(ticket.request)
            self._open[ticket.number] = ticket
        return not self._is_closed or self.engine.is_busy

    def _tell(self, progress: RequestProgress) -> None:
        ticket = self._open.get(progress.request)
        if ticket is None:
            return  # told of a failure meanwhile
        if progress.end is None:
            ticket.listen(progress)
        else:
            del self._open[progress.request]
            self._end(ticket, progress)

    def _end(self, ticket: Ticket, progress: RequestProgress) -> None:
        ticket.listen(progress)
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()
