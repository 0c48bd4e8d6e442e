"""Serves one model over HTTP, from loading its engine until the last answer."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    """The engine failed, and its server has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """All options of a server: the model's path and name, engine, address and limits."""

    path: Path  # where the model lies
    name: str
    engine: EngineOptions
    server: ServerOptions
    limits: ServiceLimits
    max_open: int  # requests that may run or wait
    # Variables of the chat template, where a request gives no other value.
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _require_other_names(name: str, bank: AdapterBank | None) -> None:
    if bank is not None and name in bank.names:
        raise ConfigError(
            f"adapter {name!r} has the model's name, and clients could not tell them "
            "apart; name one of them otherwise (--name)"
        )


def _service(model: LoadedModel, engine: EngineThread, options: ServeOptions) -> Service:
    return Service(
        model,
        engine,
        path=options.path,
        name=options.name,
        limits=options.limits,
        template=options.template,
    )


def _failed(failure: BaseException) -> EngineFailedError:
    return EngineFailedError(
        f"the engine failed ({type(failure).__name__}: {failure}); requests that were open have "
        "been told so"
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
    """Serves a model until a stop is requested; open requests are then answered to their end.

    Raises:
        EngineFailedError: the engine failed.
        LostPeerError: another process of the job has ended.

    Args:
        model: the model to serve; the engine takes over its weights.
        draft: a smaller model with the same tokenizer, which drafts tokens.
        bank: LoRA adapters that clients may request in place of the model.
        cluster: the job whose processes hold shards of the model; all but the first call
            ``serve_part``.
        say: called with lines that report progress.
    """
    _require_other_names(options.name, bank)
    engine = Engine.of(model, options=options.engine, draft=draft, bank=bank, consumes=True)
    running = EngineThread(engine, max_open=options.max_open)
    service = _service(model, running, options)
    app = application(service, api_key=options.server.api_key)
    # An address that is taken is known at once.
    server = HttpServer(app, options.server, drain=running.drain)
    say(f"compiling {len(engine.runner.keys)} programs ...")
    engine.warm_up()
    followers = None if cluster is None else Followers(cluster, lost=running.fail)
    if followers is not None:
        engine.runner.mirror(followers.tell)
    request.hold()
    running.start()
    say(
        f"{', '.join(service.names)} at {server.address}: {engine.limits.context} tokens of "
        f"context, {options.engine.max_running} requests at a time{service.chat.told}"
    )
    try:
        # A server without an engine answers nobody: whoever watches it is to start another.
        server.run_until_asked(lambda: request.asked or running.failure)
    finally:
        running.close()
    if running.failure is not None:
        raise (followers and followers.loss()) or _failed(running.failure)
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
    """Runs a job's process other than the first: holds a shard, and runs what the first one sends.

    Raises:
        LostPeerError: the first process has ended.
    """
    engine = Engine.of(model, options=options, consumes=True)
    engine.warm_up()
    request.hold()  # the first process decides when it ends
    follow(cluster, engine.runner)
