"""Runs the engine in its own thread, so that many callers can send requests at once."""

import concurrent.futures
import dataclasses
import functools
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
_TAKEN = 64  # new requests that are taken in between two steps, for which the device may wait


class OverloadError(JaxinfraError):
    """The engine has as many open requests as it accepts; try again later."""


class StoppedError(JaxinfraError):
    """The engine is stopping or has failed, and accepts no more requests."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """Handle of a request submitted to ``EngineThread``, with which it can be cancelled."""

    request: GenerationRequest
    listen: Callable[[RequestProgress], None]
    number: int | None = None  # the engine's; None before it has seen it
    is_cancelled: bool = False


@final
class EngineThread:
    """A thread that runs an engine's steps as long as it has requests.

    Args:
        max_open: most requests that may wait or run at a time.
    """

    def __init__(self, engine: Engine, *, max_open: int):
        self.engine = engine
        self.max_open = max_open
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._arrived: list[Ticket] = []
        self._cancelled: list[Ticket] = []
        self._works: list[tuple[Callable[[], None], concurrent.futures.Future[None]]] = []
        self._open: dict[int, Ticket] = {}
        self.num_open = 0  # submitted requests that have not ended
        self._is_draining = self._is_closed = False
        self.is_started = False  # until then requests wait
        self._step_begun: float | None = None  # None while there is nothing to do
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, which runs all submitted requests, also those submitted before."""
        self.is_started = True
        self._thread.start()

    @property
    def stalled_s(self) -> float:
        """Seconds since the current step began; 0 while the engine is idle."""
        begun = self._step_begun
        return 0.0 if begun is None else time.monotonic() - begun

    @property
    def is_serving(self) -> bool:
        """Whether the engine accepts requests: it is neither draining nor failed."""
        return not self._is_draining and self.failure is None

    def submit(
        self, requests: list[GenerationRequest], listen: Callable[[int, RequestProgress], None]
    ) -> list[Ticket]:
        """Submits requests to the engine: either all of them or, on an error, none.

        Args:
            listen: called in the engine's thread with a request's index in ``requests`` and its
                progress in a step; it must return at once.

        Raises:
            DataError, ConfigError: the engine cannot serve one of the requests.
            OverloadError: there would be more than ``max_open`` requests.
            StoppedError: the engine is draining or has failed.
        """
        for request in requests:
            self.engine.check(request)
        tickets = [
            Ticket(request, functools.partial(listen, place))
            for place, request in enumerate(requests)
        ]
        with self._changed:
            if not self.is_serving:
                raise StoppedError("the server is stopping; ask another one")
            if self.num_open + len(tickets) > self.max_open:
                raise OverloadError(
                    f"{self.num_open} requests run or wait and {len(tickets)} more would exceed "
                    f"{self.max_open}; try again later"
                )
            self.num_open += len(tickets)
            self._arrived += tickets
            self._changed.notify()
        return tickets

    def between_steps(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Runs a function in the engine's thread, between two steps; returns its future result."""
        coming: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            if not self.is_serving:
                raise StoppedError("the server is stopping; ask another one")
            self._works.append((work, coming))
            self._changed.notify()
        return coming

    def cancel(self, tickets: list[Ticket]) -> None:
        """Cancels requests; has no effect on requests that have ended."""
        with self._changed:
            self._cancelled += tickets
            self._changed.notify()

    def drain(self, timeout_s: float) -> bool:
        """Accepts no more requests, and waits for open ones. Returns whether all ended in time, or
        the engine failed.
        """
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(
                lambda: self.num_open == 0 or self.failure is not None, timeout_s
            )

    def close(self) -> None:
        """Ends the thread and cancels open requests. A thread stuck in a step is left behind, and
        ends with the process.
        """
        with self._changed:
            self._is_draining = self._is_closed = True
            self._changed.notify()
        if not self.is_started:
            return
        self._thread.join(_CLOSE_S if self.failure is None else 1.0)
        if self._thread.is_alive():
            _log.warning("the engine has been at one step for %.1f s; left behind", self.stalled_s)

    def fail(self, error: BaseException) -> None:
        """Marks the engine as failed and reports ``error`` to open requests; callable from any
        thread. Only the first error is kept.
        """
        with self._changed:
            self.failure = self.failure or error
            tickets = [*self._open.values(), *self._arrived]
            works, self._works = self._works, []
            self._open, self._arrived = {}, []
        for _, coming in works:
            coming.set_exception(error)
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
        """Passes some new submissions and all cancellations to the engine, or waits for some; False
        at the end.
        """
        with self._changed:
            self._step_begun = None
            self._changed.wait_for(
                lambda: (
                    self._arrived
                    or self._cancelled
                    or self._works
                    or self._is_closed
                    or self.engine.is_busy
                )
            )
            self._step_begun = time.monotonic()
            most = None if self._is_closed else _TAKEN
            arrived, self._arrived = self._arrived[:most], self._arrived[most:] if most else []
            cancelled, self._cancelled = self._cancelled, []
            works, self._works = self._works, []
            if self._is_closed:
                cancelled = [*self._open.values(), *arrived]
        for work, coming in works:
            try:
                coming.set_result(work())
            except Exception as error:  # it concerns the caller alone
                coming.set_exception(error)
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
            self.num_open -= 1
            self._changed.notify_all()
