"""Guards before every call: the key, and the limit of a body."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, final

from jaxinfra.serving.http.answers import error_body

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/health")  # without a key, for people and for load balancers

_LINGER_S = 5.0
"""For how long the rest of a refused request is taken in."""


@final
class RequestGuards:
    """An ASGI application that asks for the key and bounds bodies before another one is called.

    Args:
        api_key: None: no key is required.
        max_body_bytes: of a request.
    """

    def __init__(self, application: Application, *, api_key: str | None, max_body_bytes: int):
        self._application = application
        self._api_key, self._max_body = api_key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or 413, or lets the application answer."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._api_key is not None and scope["path"] not in _OPEN:
            expected = f"Bearer {self._api_key}".encode()
            if not hmac.compare_digest(headers.get(b"authorization", b""), expected):
                message = "this server asks for its key: Authorization: Bearer KEY"
                await _refuse(receive, send, 401, message, code="invalid_api_key")
                return
        body = await self._body(headers, receive)
        if body is None:
            message = f"the body has more than {self._max_body} bytes, the most taken here"
            await _refuse(receive, send, 413, message, code="body_too_large")
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def read() -> MutableMapping[str, Any]:
            return next(messages, None) or await receive()

        await self._application(scope, read, send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None where it is too large, of which no more is read."""
        said = headers.get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._max_body:
            return None
        parts, size = [], 0
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


async def _refuse(receive: Receive, send: Send, status: int, message: str, *, code: str) -> None:
    """Answers, takes in what the client still sends, kept nowhere, and closes.

    A connection that is closed with bytes unread is reset, and a client that is still sending, or
    has not read yet, may lose the answer.
    """
    error = {"error": error_body(message, kind="invalid_request_error", code=code)}
    body = json.dumps(error).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})
