"""A server of one model, from its directory to the last answer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jaxinfra.errors import ConfigError, JaxinfraError
from jaxinfra.runtime.cluster import Cluster
from jaxinfra.runtime.signals import StopRequest
from jaxinfra.serving.adapter_bank import AdapterBank
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.followers import Followers, follow
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.load import LoadedModel


class EngineFailedError(JaxinfraError):
    """The engine could not go on, and its server has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Everything that a server is started with beside its model."""

    path: Path  # where the model lies
    name: str
    engine: EngineOptions
    server: ServerOptions
    limits: ServiceLimits
    max_open: int  # requests that may run or wait


def _require_other_names(name: str, bank: AdapterBank | None) -> None:
    if bank is not None and name in bank.names:
        raise ConfigError(
            f"adapter {name!r} has the model's name, and clients could not tell them "
            "apart; name one of them otherwise (--name)"
        )


def serve(
    model: LoadedModel,
    options: ServeOptions,
    request: StopRequest,
    *,
    draft: LoadedModel | None = None,
    bank: AdapterBank | None = None,
    cluster: Cluster | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serves until a stop is asked for; requests that are open then are answered to their end.

    Raises:
        EngineFailedError: the engine failed.
        LostPeerError: another process of the job is gone.

    Args:
        model: taken over; its weights are the engine's from here on.
        draft: a smaller model of the same tokenizer, which proposes tokens.
        bank: adapters that clients may name in place of the model.
        cluster: the job whose processes have parts of the model; the others ``follow``.
        say: told what happens, in lines.
    """
    _require_other_names(options.name, bank)
    engine = Engine.of(model, options=options.engine, draft=draft, bank=bank, consumes=True)
    running = EngineThread(engine, max_open=options.max_open)
    service = Service(model, running, path=options.path, name=options.name, limits=options.limits)
    app = application(service, api_key=options.server.api_key)
    # An address that is taken is known at once.
    server = HttpServer(app, options.server, drain=running.drain)
    say(f"compiling {len(engine.runner.keys)} programs ...")
    engine.warm_up()
    followers = None
    if cluster is not None:
        followers = Followers(cluster, lost=running.fail)
        engine.runner.mirror(followers.tell)
    request.hold()
    running.start()
    say(
        f"{', '.join(service.names)} at {server.address}: {engine.limits.context} tokens of "
        f"context, {options.engine.max_running} requests at a time"
    )
    try:
        # A server without an engine answers nobody: whoever watches it is to start another.
        server.run_until_asked(lambda: request.asked or running.failure)
    finally:
        running.close()
    if running.failure is not None:
        loss = None if followers is None else followers.loss()
        raise loss or EngineFailedError(
            f"the engine failed ({type(running.failure).__name__}: {running.failure}); requests "
            "that were open have been told so"
        )
    if followers is not None:
        followers.end()
    counts = engine.counts
    say(
        f"stopped by {request.asked.name if request.asked else 'the server'}: "
        f"{sum(counts.ended.values())} requests, {counts.generated_tokens} tokens"
    )


def serve_part(
    model: LoadedModel, options: EngineOptions, request: StopRequest, cluster: Cluster
) -> None:
    """A process of the job beside the first: it has a part of the model, and runs what that runs.

    Raises:
        LostPeerError: the first process is gone.
    """
    engine = Engine.of(model, options=options, consumes=True)
    engine.warm_up()
    request.hold()  # the first process decides when it ends
    follow(cluster, engine.runner)
