"""Deliveries of other threads to the queues of an event loop."""

import asyncio
import collections
from typing import Any, final


@final
class Deliveries:
    """Wakes a loop once for all that came since it last looked, as each time is a system call.

    Args:
        loop: whose queues are put into; it looks when it is free.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._waiting: collections.deque[tuple[asyncio.Queue[Any], Any]] = collections.deque()
        self._is_called = False

    def put(self, queue: asyncio.Queue[Any], value: Any) -> None:
        """Appends to the queue, which has no bound, in order; callable from any thread."""
        self._waiting.append((queue, value))
        # Who finds the loop called has put a value there before the loop looks.
        if not self._is_called:
            self._is_called = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False
        while self._waiting:
            queue, value = self._waiting.popleft()
            queue.put_nowait(value)
