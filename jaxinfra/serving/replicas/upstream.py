"""Sends requests to a replica over loopback, and reads the answer's head, then its body."""

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any, final

import h11

_READ = 1 << 16  # bytes


class LostReplicaError(Exception):
    """The replica ended or its connection broke before the answer was complete."""


@final
class UpstreamAnswer:
    """A replica's HTTP answer: its status and headers, and its body to be read."""

    def __init__(self, reader: asyncio.StreamReader, connection: h11.Connection):
        self._reader, self._connection = reader, connection
        self.status, self.headers = 0, dict[str, str]()

    async def begin(self) -> None:
        """Reads the status and the headers; raises LostReplicaError if they do not come."""
        head = await self._next()
        if not isinstance(head, h11.Response):
            raise LostReplicaError
        self.status = head.status_code
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the body in parts as they come; raises LostReplicaError if it is cut off."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def whole(self) -> bytes:
        """Reads and returns the whole body."""
        return b"".join([part async for part in self.parts()])

    async def _next(self) -> Any:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._reader.read(_READ))
        except (OSError, h11.RemoteProtocolError) as error:
            raise LostReplicaError from error
        return event


@final
class Upstream:
    """Connections to one replica, a new one for each request."""

    def __init__(self) -> None:
        self._open: set[asyncio.StreamWriter] = set()
        self.is_closed = False

    @contextlib.asynccontextmanager
    async def ask(
        self,
        address: str,
        method: str,
        target: bytes,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
    ) -> AsyncIterator[UpstreamAnswer]:
        """Context manager that sends a request, and yields the answer to read. Leaving it closes
        the connection, which makes the replica cancel the request.

        Raises:
            LostReplicaError: the replica does not answer.
        """
        where = urllib.parse.urlsplit(address)
        size = {"host": "replica", "connection": "close", "content-length": str(len(body))}
        connection = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target=target, headers=[*{**headers, **size}.items()])
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
        except OSError as error:
            raise LostReplicaError from error
        self._open.add(writer)
        try:
            for each in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(connection.send(each) or b"")
            answer = UpstreamAnswer(reader, connection)
            await answer.begin()
            yield answer
        finally:
            self._open.remove(writer)
            writer.transport.abort()

    def close(self) -> None:
        """Ends all open requests with LostReplicaError, whatever the replica does."""
        self.is_closed = True
        for writer in self._open:
            writer.transport.abort()
