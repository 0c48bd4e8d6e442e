"""Checks of every HTTP request: its API key, its body's size, and whether its client is there."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, final

import fastapi
from fastapi import responses

from jaxinfra.serving.http.answers import error_body

type Scope = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
type Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
type Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = ("/", "/health", "/ping")  # without a key, for people and for load balancers

_LINGER_S = 5.0
"""Seconds for which the rest of a refused request is read and dropped."""

_CLIENT_GONE = 499  # as nginx has it; nobody reads it


@final
class RequestGuards:
    """ASGI middleware that checks the API key and limits the size of request bodies.

    Args:
        api_key: key that requests must have; None: no key is required.
        max_body_bytes: most bytes of a request's body.
        open_metrics: ``/metrics`` needs no key.
    """

    def __init__(
        self,
        application: Application,
        *,
        api_key: str | None,
        max_body_bytes: int,
        open_metrics: bool = False,
    ):
        self._application = application
        self._api_key, self._max_body = api_key, max_body_bytes
        self._open = (*_OPEN, "/metrics") if open_metrics else _OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 without the key or 413 to a large body; else calls the application."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._api_key is not None and scope["path"] not in self._open:
            bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            given = bearer or headers.get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self._api_key.encode()):
                message = "this server asks for its key: Authorization: Bearer KEY, or x-api-key"
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
        """Reads the whole body; returns None if it is too large, without reading the rest."""
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
    """Sends a refusal, then reads and drops what the client still sends, and closes.

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


async def unless_gone(
    request: fastapi.Request, answering: Coroutine[Any, Any, responses.Response]
) -> responses.Response:
    """Waits for an answer to a request whose body is read, and cancels it when the client
    disconnects.
    """
    working = asyncio.create_task(answering)
    # Told by the server: to look now and then costs more than the answer, with many clients.
    leaving = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return responses.Response(status_code=_CLIENT_GONE)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
