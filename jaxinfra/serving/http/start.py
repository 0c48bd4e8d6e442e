"""Serves one model over HTTP, from loading its engine until the last answer."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfra.errors import ConfigError, JaxinfraError
from jaxinfra.runtime.cluster import Cluster
from jaxinfra.runtime.signals import StopRequest
from jaxinfra.serving.adapter_bank import AdapterBank
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.engine import Engine, EngineCounts
from jaxinfra.serving.engine.followers import Followers, follow
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.engine.program_set import ProgramSet
from jaxinfra.serving.http.app import application
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.http.service import Service, ServiceLimits
from jaxinfra.serving.load import LoadedModel

_SAY_S = 5.0  # between lines of progress
_LOOK_S = 0.1  # between looks whether a stop is asked for


class EngineFailedError(JaxinfraError):
    """The engine failed, and its server has ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """All options of a server: the model's path and name, engine, address and limits."""

    path: Path  # directory of the model
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


def _service(
    model: LoadedModel, engine: EngineThread, options: ServeOptions, bank: AdapterBank | None
) -> Service:
    return Service(
        model,
        engine,
        path=options.path,
        name=options.name,
        limits=options.limits,
        template=options.template,
        bank=bank,
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
    read: Callable[[], Sequence[LoadedModel]] | None = None,
    draft: LoadedModel | None = None,
    bank: AdapterBank | None = None,
    cluster: Cluster | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serves a model until a stop is requested; open requests are then answered to their end.

    The address answers at once: ``/health`` says how far the start is, and requests wait for it.

    Raises:
        DeviceMemoryError: one request of the full context does not fit.
        EngineFailedError: the engine failed.
        LostPeerError: another process of the job has ended.

    Args:
        model: the model to serve; the engine takes over its weights.
        read: reads the weights, if ``model`` and ``draft`` have only shapes; programs compile
            meanwhile.
        draft: a smaller model with the same tokenizer, which drafts tokens.
        bank: LoRA adapters that clients may request in place of the model.
        cluster: the job whose processes hold shards of the model; all but the first call
            ``serve_as_follower``.
        say: called with lines that report progress.
    """
    _require_other_names(options.name, bank)
    engine = Engine.of(model, options=options.engine, draft=draft, bank=bank, consumes=True)
    say(_pool(engine.limits))
    running = EngineThread(engine, max_open=options.max_open)
    service = _service(model, running, options, bank)
    http = options.server
    app = application(service, api_key=http.api_key, open_metrics=http.open_metrics)
    server = HttpServer(app, http, drain=running.drain)  # a taken address is known now
    followers = None
    try:
        with server.running(), _told(running):
            followers = _ready(engine, running, read=read, cluster=cluster, say=say)
            request.defer()
            with _frozen():
                running.start()
                say(
                    f"{', '.join(service.names)} at {server.address}: {engine.limits.context} "
                    f"tokens of context, {options.engine.max_running} requests at a time"
                    f"{service.chat.parsing_summary}"
                )
                # Without its engine a server cannot answer: it ends, and a supervisor restarts it.
                _watch(engine.runner.programs, lambda: request.asked or running.failure, say)
    finally:
        engine.runner.programs.close()
        running.close()
    if running.failure is not None:
        raise (followers and followers.loss()) or _failed(running.failure)
    if followers is not None:
        followers.end()
    _say_end(engine.counts, request, say)


def _say_end(counts: EngineCounts, request: StopRequest, say: Callable[[str], None]) -> None:
    cause = request.asked.name if request.asked else "the server"
    ended = sum(counts.ended.values())
    say(f"stopped by {cause}: {ended} requests, {counts.generated_tokens} tokens")


def _pool(limits: SchedulerLimits) -> str:
    tokens = (limits.num_pages - 1) * limits.page_size
    return f"KV cache of {tokens:,} tokens, {limits.context:,} at most in a request"


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Leaves the objects that a start has made out of garbage collections, so that these hold up
    requests for less time.
    """
    gc.collect()  # frozen garbage would stay for ever, with the arrays that it holds
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _told(running: EngineThread) -> Iterator[None]:
    """Ends the requests that wait for a start that fails."""
    try:
        yield
    except BaseException as error:
        running.fail(error)
        raise


def _ready(
    engine: Engine,
    running: EngineThread,
    *,
    read: Callable[[], Sequence[LoadedModel]] | None,
    cluster: Cluster | None,
    say: Callable[[str], None],
) -> Followers | None:
    """Reads weights and makes the programs that serve every request, all of them in a cluster."""
    runner = engine.runner
    if cluster is not None:
        say(f"compiling {len(runner.keys)} programs ...")
        engine.warm_up()
        followers = Followers(cluster, lost=running.fail)
        runner.mirror(followers.send)
        return followers
    if read is not None:
        runner.require_memory()
    runner.begin_warm_up()
    if read is not None:
        engine.attach(*read())
    while not runner.wait_until_serving(_SAY_S):
        say(f"making programs: {runner.programs.progress}")
    return None


def _watch(programs: ProgramSet, asked: Callable[[], object], say: Callable[[str], None]) -> None:
    """Waits until a stop is asked for; meanwhile tells how many programs are made."""
    told = time.monotonic()
    is_whole = False
    while not asked():
        programs.wait((), 0)  # raises what the background failed with
        made = programs.progress
        if not is_whole and made.ready == made.all:
            is_whole = True
            if made.all:
                made_now, kept = programs.num_compiled, programs.num_loaded
                say(f"all programs are ready: {made_now} compiled, {kept} kept by an earlier start")
        elif not is_whole and time.monotonic() - told > _SAY_S:
            told = time.monotonic()
            say(f"making programs: {made}")
        time.sleep(_LOOK_S)


def serve_as_follower(
    model: LoadedModel, options: EngineOptions, request: StopRequest, cluster: Cluster
) -> None:
    """Runs a job's process other than the first: holds a shard, and runs what the first one sends.

    Raises:
        LostPeerError: the first process has ended.
    """
    engine = Engine.of(model, options=options, consumes=True)
    engine.warm_up()
    request.defer()  # the first process decides when it ends
    follow(cluster, engine.runner)
