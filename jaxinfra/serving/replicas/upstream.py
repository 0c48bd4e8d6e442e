"""Sends a request to a replica over loopback, and reads the answer's head, then its body."""

import asyncio
import contextlib
import dataclasses
import urllib.parse
from collections.abc import AsyncIterator

_MOST_HEAD = 1 << 16  # bytes
_READ = 1 << 16
type Headers = list[tuple[bytes, bytes]]


class LostReplicaError(Exception):
    """The replica ended or its connection broke before the answer was complete."""


@dataclasses.dataclass(slots=True)
class UpstreamAnswer:
    """A replica's HTTP answer: its status and headers, and its body to be read."""

    status: int
    headers: Headers
    _reader: asyncio.StreamReader

    def header(self, name: bytes) -> bytes:
        """Returns a header's value; empty if the answer has no such header."""
        return dict(self.headers).get(name, b"")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the body in parts as they come; raises LostReplicaError if it is cut off."""
        try:
            if self.header(b"transfer-encoding").lower() == b"chunked":
                while size := int(await self._reader.readline() or b"x", 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                return
            left = int(self.header(b"content-length") or b"0")
            while left:
                part = await self._reader.read(min(left, _READ))
                if not part:
                    raise LostReplicaError
                left -= len(part)
                yield part
        except (OSError, EOFError, ValueError) as error:
            raise LostReplicaError from error

    async def whole(self) -> bytes:
        """Reads and returns the whole body."""
        return b"".join([part async for part in self.parts()])


@contextlib.asynccontextmanager
async def asked(
    address: str, method: str, path: str, headers: Headers, body: bytes
) -> AsyncIterator[UpstreamAnswer]:
    """Context manager that sends a request to a replica, and yields the answer to read. Leaving it
    closes the connection, which makes the replica cancel the request.

    Raises:
        LostReplicaError: the replica does not answer.
    """
    where = urllib.parse.urlsplit(address)
    try:
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_MOST_HEAD)
    except OSError as error:
        raise LostReplicaError from error
    try:
        try:
            kept = b"".join(b"%s: %s\r\n" % each for each in headers)
            head = f"{method} {path} HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n"
            size = b"Content-Length: %d\r\n\r\n" % len(body)
            writer.write(head.encode() + kept + size + body)
            status = int((await reader.readline()).split()[1])
            answered = []
            while (line := await reader.readline()) != b"\r\n":
                name, colon, value = line.partition(b":")
                if not colon or not line.endswith(b"\n"):
                    raise LostReplicaError
                answered.append((name.lower(), value.strip()))
        except (OSError, ValueError, IndexError) as error:
            raise LostReplicaError from error
        yield UpstreamAnswer(status, answered, reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
