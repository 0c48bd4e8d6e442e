"""Runs an HTTP server in this process until it is asked to stop and open requests have ended."""

import asyncio
import contextlib
import dataclasses
import logging
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

from jaxinfra.errors import ConfigError
from jaxinfra.serving.http.guards import Application

_LOOK_S = 0.1  # between looks whether a stop is asked for
# Most that the engine's thread waits for the interpreter, each time that it comes back from JAX,
# while many requests arrive. By default it is 5 ms, and a step then takes several times as long.
_SWITCH_S = 0.0002


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Address, API key and limits on connections of an HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    api_key: str | None = None
    open_metrics: bool = False  # /metrics needs no key
    drain_s: float = 30.0  # that open requests have to end once a stop is asked for
    max_connections: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port={self.port} must be in 0..65535; 0 takes one that is free")


class HttpServer:
    """An HTTP server (uvicorn) that lets open requests end before it stops.

    Args:
        drain: called when the server is to stop, with the seconds that open requests may take;
            returns when they have ended.
    """

    def __init__(
        self, application: Application, options: ServerOptions, *, drain: Callable[[float], object]
    ):
        self._options = options
        _let_open(options.max_connections)
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
        """The server's URL: ``http://host:port``."""
        host = self._options.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}"

    def run(self) -> None:
        """Serves until ``stop`` is called, then lets open requests end."""
        sys.setswitchinterval(_SWITCH_S)
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def run_until_asked(self, asked: Callable[[], object]) -> None:
        """Serves until ``asked`` returns a true value, then lets open requests end."""

        def look() -> None:
            while not asked():
                time.sleep(_LOOK_S)
            self.stop()

        threading.Thread(target=look, name="stop", daemon=True).start()
        self.run()

    def stop(self) -> None:
        """Asks the server to stop; callable from any thread."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Context manager that runs the server in a thread, and yields its URL."""
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


_log = logging.getLogger(__name__)
_OTHER_FILES = 256  # that a process has open besides connections


def _let_open(connections: int) -> None:
    """Raises this process's limit on open files to hold these connections; a warning says if that
    is not allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            _log.warning(
                "%d connections need %d open files, and this process may have %d: some clients may "
                "not be answered; raise the hard limit (ulimit -Hn), or lower --max-open",
                *(connections, wanted, most),
            )


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
