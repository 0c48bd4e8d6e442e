"""A server in this process: until it is asked to stop, and then until its requests have ended."""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from jaxinfra.errors import ConfigError
from jaxinfra.serving.http.guards import Application

_LOOK_S = 0.1  # between looks whether a stop is asked for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Where a server listens, and to whom."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    api_key: str | None = None
    drain_s: float = 30.0  # that open requests have to end once a stop is asked for
    max_connections: int = 1024


class HttpServer:
    """uvicorn with an application.

    Args:
        drain: called once a stop is asked for, with the seconds that open requests have to end;
            returns when they have.
    """

    def __init__(
        self, application: Application, options: ServerOptions, *, drain: Callable[[float], object]
    ):
        self._options = options
        self._socket = _bound(options)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,  # seconds beyond ``drain_s``
            limit_concurrency=options.max_connections,
            ws="none",
            http="h11",  # which bounds a request's headers; httptools does not
        )
        self._server = _DrainingServer(config, drain, options.drain_s)

    @property
    def address(self) -> str:
        """Where clients find it."""
        host = self._options.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}"

    def run(self) -> None:
        """Serves until ``stop`` is called; then drains."""
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def run_until_asked(self, asked: Callable[[], object]) -> None:
        """Serves until this says so; then drains."""

        def look() -> None:
            while not asked():
                time.sleep(_LOOK_S)
            self.stop()

        threading.Thread(target=look, name="stop", daemon=True).start()
        self.run()

    def stop(self) -> None:
        """Requests the server's end, from any thread."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Runs the server in a thread within a block; gives its address."""
        thread = threading.Thread(target=self.run, name="server")
        thread.start()
        try:
            while not self._server.started and thread.is_alive():
                thread.join(0.01)
            yield self.address
        finally:
            self.stop()
            thread.join()


class _DrainingServer(uvicorn.Server):
    """Lets requests end before connections are closed."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[float], object], drain_s: float):
        super().__init__(config)
        self._drain, self._drain_s = drain, drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to whoever runs the server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._drain, self._drain_s)
        await super().shutdown(sockets)


def _bound(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen()  # who connects before the server accepts waits for it
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen at {options.host}:{options.port} ({error.strerror}); name another "
            "--host or --port, or end what listens there"
        ) from error
    return listening
