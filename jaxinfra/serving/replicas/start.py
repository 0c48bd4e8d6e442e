"""Serves one model with several replicas, from starting their processes to the last answer."""

from collections.abc import Callable, Mapping, Sequence

from jaxinfra.runtime.signals import StopRequest
from jaxinfra.serving.http.guards import RequestGuards
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.replicas.front import ReplicaFront
from jaxinfra.serving.replicas.processes import Replicas, serve_command

_STOP_S = 5.0  # beyond what open requests have, for a replica to end


def serve_replicas(
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    options: ServerOptions,
    request: StopRequest,
    *,
    name: str,
    max_body_bytes: int,
    hang_s: float,
    say: Callable[[str], None] = print,
) -> None:
    """Serves until a stop is requested; open requests are then answered to their end.

    Args:
        words: arguments of a replica's command line.
        environments: each replica's environment variables, added to those of this process.
        hang_s: seconds without a sign of life after which a replica is killed and restarted.

    Raises:
        NoReplicaError: a replica ended before it served.
    """
    key = {} if options.api_key is None else {"JAXINFRA_API_KEY": options.api_key}
    each_has = [{**environment, **key} for environment in environments]
    replicas = Replicas(serve_command(words), each_has, say=say)
    front = ReplicaFront(replicas, api_key=options.api_key, hang_s=hang_s)
    guarded = RequestGuards(front, api_key=options.api_key, max_body_bytes=max_body_bytes)
    server = HttpServer(guarded, options, drain=front.drain)
    request.hold()
    try:
        replicas.start(lambda: request.asked)
        if not request.asked:
            say(f"{name} at {server.address}: {len(replicas.all)} replicas")
            server.run_until_asked(lambda: request.asked)
    finally:
        replicas.stop(options.drain_s + _STOP_S)
    say(f"stopped by {request.asked.name if request.asked else 'the server'}")
