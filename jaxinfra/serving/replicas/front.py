"""The front process's HTTP application: one address for all replicas.

It forwards a request to one replica, and streams the answer back. A replica that has cached the
prompt's prefix is preferred, unless it is far busier than others. If a replica ends or hangs, its
requests without any output yet are sent to another replica; a stream that has begun ends with an
error event. Replicas that are alive but do not answer are taken out and killed. Replicas check
bodies, count tokens and refuse invalid requests.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, final

import fastapi
from fastapi import responses
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from jaxinfra.runtime.signals import StopRequest
from jaxinfra.serving.http.answers import error_body, error_response, event, metrics_response
from jaxinfra.serving.http.guards import Receive, RequestGuards, Scope, Send, unless_gone
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.replicas.processes import ReplicaProcess, Replicas, serve_command
from jaxinfra.serving.replicas.upstream import LostReplicaError, Upstream

_CHARACTERS = 64  # of a block of text; a page of tokens, roughly
_IDS = 16  # of a block of token ids
_MOST_BLOCKS = 1 << 16  # that are remembered of a replica: what its pages may hold
_SLACK = 4  # requests that a replica may have more than the least busy one, or twice as many

type PromptBlocks = tuple[int, ...]
"""Hashes of a prompt's blocks; each hash covers all blocks up to its own."""


@final
class ReplicaChoice:
    """Chooses replicas by the prompt prefixes that each of them has seen.

    A replica whose KV-cache pages hold a prompt's prefix need not compute it again.
    """

    def __init__(self) -> None:
        self._seen: dict[int, collections.OrderedDict[int, None]] = {}

    def choose(self, blocks: PromptBlocks, open_requests: Mapping[int, int]) -> int:
        """Returns the number of the replica that a prompt should be sent to.

        Args:
            open_requests: number of open requests of each ready replica.
        """
        least = min(open_requests.values())
        most = max(least + _SLACK, 2 * least)
        return max(
            (number for number, load in open_requests.items() if load <= most),
            key=lambda number: (self.matched(number, blocks), -open_requests[number], -number),
        )

    def matched(self, number: int, blocks: PromptBlocks) -> int:
        """Returns how many leading blocks of a prompt a replica has seen."""
        seen = self._seen.get(number, {})
        return sum(1 for _ in itertools.takewhile(seen.__contains__, blocks))

    def note(self, number: int, blocks: PromptBlocks) -> None:
        """Records that a replica has been sent a prompt with these blocks."""
        seen = self._seen.setdefault(number, collections.OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > _MOST_BLOCKS:
            seen.popitem(last=False)

    def forget(self, number: int) -> None:
        """Clears the record of a replica that was restarted, as its cache is empty."""
        self._seen.pop(number, None)


def blocks_of(body: bytes) -> PromptBlocks:
    """Returns hashes of the blocks of a request's first prompt; none for an invalid request.

    >>> a, b = (blocks_of(b'{"prompt": "%s"}' % (b"x" * 100 + end)) for end in (b"y" * 90, b"z"))
    >>> len(a), len(b), a[0] == b[0]
    (2, 1, True)
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(asked, dict):
        return ()
    prompt: Any = asked.get("prompt", asked.get("messages", asked.get("input")))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(type(each) is int for each in prompt):
        prompt = json.dumps(prompt)
    if isinstance(prompt, str):
        return _hashed(prompt, _CHARACTERS)
    return _hashed(prompt, _IDS) if isinstance(prompt, list) else ()


def _hashed(prompt: str | Sequence[int], size: int) -> PromptBlocks:
    result, before = [], 0
    for start in range(0, len(prompt) - size + 1, size):
        part = prompt[start : start + size]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        result.append(before)
    return tuple(result)


_LOOKS = 3
"""Number of failed polls in a row after which a replica counts as hanging. One poll alone may fail
for other reasons, as on a machine that slept."""

_MOST_TRIES = 3  # replicas that a request may be given to: one that ends them all is not to
_METRICS_S = 10.0
_KEPT = ("content-type", "authorization", "x-api-key", "accept")
_PASSED = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
_GENERATES = (b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/messages")


@final
class ReplicaFront:
    """ASGI application that forwards each request to one of several replicas.

    It polls each replica's ``/health``. A replica hangs if it does not answer, or if its engine
    does not finish a step. It is detected between ``hang_s`` and twice as many seconds after its
    last sign of life.

    Args:
        replicas: the replica processes; the caller starts them.
        hang_s: seconds without a sign of life after which a replica is taken out.
    """

    def __init__(self, replicas: Replicas, *, api_key: str | None, hang_s: float):
        self._replicas, self._choice = replicas, ReplicaChoice()
        self._look_s = hang_s / _LOOKS
        self._key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._upstreams = [Upstream() for _ in replicas.all]
        self._starts = [0] * len(replicas.all)
        self._is_draining = False
        self.num_open = self.num_repeated = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose body ``RequestGuards`` has read."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        if scope["type"] != "http":
            return
        request = fastapi.Request(scope, receive)
        # What the answer is read from stays open until it is sent.
        async with contextlib.AsyncExitStack() as held:
            match request.method, scope["path"]:
                case "GET", "/health":
                    answer = self._health()
                case "GET", "/metrics":
                    answer = await self._metrics()
                case _:
                    held.enter_context(self._counted())
                    body = await request.body()
                    answer = await unless_gone(request, self._answer(request, body, held))
            await answer(scope, receive, send)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def drain(self, timeout_s: float) -> bool:
        """Accepts no more requests, and waits for open ones; returns whether all ended in time.
        Call it from another thread.
        """
        self._is_draining = True
        until = time.monotonic() + timeout_s
        while self.num_open and time.monotonic() < until:
            time.sleep(0.02)
        return not self.num_open

    async def _live(self, receive: Receive, send: Send) -> None:
        """Watches replicas from the server's start to its end."""
        await receive()
        watching = [asyncio.create_task(self._watch(each)) for each in self._replicas.all]
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self, replica: ReplicaProcess) -> None:
        loop = asyncio.get_running_loop()
        misses, seen = 0, replica.num_starts
        while True:
            begun = loop.time()
            start, address = replica.num_starts, replica.address
            missed = "" if address is None else await self._missed(replica.number, address)
            if not missed or start != seen:
                misses = 0
            misses += bool(missed)
            seen = start
            if misses == _LOOKS:
                self._take_out(replica, start, missed)
                misses = 0
            await asyncio.sleep(max(0.0, begun + self._look_s - loop.time()))

    async def _missed(self, number: int, address: str) -> str:
        """Polls a replica; returns which sign of life is missing, or "" if it lives."""
        try:
            async with (
                asyncio.timeout(self._look_s),
                self._upstreams[number].ask(address, "GET", b"/health", headers={}) as answer,
            ):
                if answer.status != 200:
                    return ""  # it stops, or has too many connections
                stalled_s = json.loads(await answer.whole())["stalled_s"]
        except TimeoutError:
            return f"/health was not answered within {self._look_s:g} s, {_LOOKS} times in a row"
        except LostReplicaError:
            return f"/health ended without an answer, {_LOOKS} times in a row"
        if stalled_s > self._look_s:
            return f"its engine has been at one step for {stalled_s:.1f} s"
        return ""

    def _take_out(self, replica: ReplicaProcess, start: int, why: str) -> None:
        """Kills a replica, and ends its requests. This does not wait for the process's end, as a
        process within a driver call may outlive its kill.
        """
        replica.take_out(start, why)
        self._upstreams[replica.number].close()
        self._upstreams[replica.number] = Upstream()

    async def _answer(
        self, request: fastapi.Request, body: bytes, held: contextlib.AsyncExitStack
    ) -> responses.Response:
        """Sends a request to replicas until one answers.

        Args:
            held: closed once the answer is sent.
        """
        path, query = request.scope["raw_path"], request.scope["query_string"]
        headers = {name: request.headers[name] for name in _KEPT if name in request.headers}
        blocks = blocks_of(body) if path in _GENERATES else ()
        target = path + (b"?" + query if query else b"")
        tried: set[int] = set()
        num_lost, refused = 0, None
        while len(tried) < _MOST_TRIES and (replica := self._chosen(blocks, tried)) is not None:
            tried.add(replica.number)
            assert replica.address is not None
            upstream = self._upstreams[replica.number]
            ask = upstream.ask(replica.address, request.method, target, headers=headers, body=body)
            try:
                async with contextlib.AsyncExitStack() as asked:
                    asked.enter_context(replica.taken())
                    answer = await asked.enter_async_context(ask)
                    status, said = answer.status, answer.headers
                    passed = {name: said[name] for name in _PASSED if name in said}
                    if said.get("content-type", "").startswith("text/event-stream"):
                        parts = answer.parts()
                        events = _events(await anext(parts, b""), parts, upstream)
                        held.push_async_exit(asked.pop_all())
                        return responses.StreamingResponse(events, status, passed)
                    whole = responses.Response(await answer.whole(), status, passed)
                    if status not in (429, 503):
                        return whole
                    refused = whole  # another may have room
            except LostReplicaError:
                num_lost += 1
                self.num_repeated += 1
        return refused or self._unanswered(num_lost)

    def _chosen(self, blocks: PromptBlocks, tried: Collection[int]) -> ReplicaProcess | None:
        ready = {each.number: each for each in self._replicas.ready if each.number not in tried}
        if not ready or self._is_draining:
            return None
        for each in ready.values():
            if self._starts[each.number] != each.num_starts:
                self._starts[each.number] = each.num_starts
                self._choice.forget(each.number)
        number = self._choice.choose(blocks, {n: each.num_open for n, each in ready.items()})
        self._choice.note(number, blocks)
        return ready[number]

    def _unanswered(self, num_lost: int) -> responses.Response:
        """Returns the error if no replica is left to ask.

        Args:
            num_lost: replicas that ended or hung with this request.
        """
        if self._is_draining:
            text = "the server is stopping; ask another one"
        elif num_lost == _MOST_TRIES:
            text = (
                f"{num_lost} replicas ended or hung before they answered this request; it may be "
                "the reason, so no other one is asked"
            )
            return error_response(502, text, kind="server_error")
        elif num_lost:
            text = (
                "the replica that was asked ended or hung before it answered, and no other one is "
                "ready; send the request again"
            )
        else:
            text = "no replica is ready; they are being started again"
        return error_response(503, text, kind="server_error", headers={"retry-after": "2"})

    def _health(self) -> responses.Response:
        ready = self._replicas.ready
        is_well = bool(ready) and not self._is_draining
        ill = "stopping" if self._is_draining else "no replica is ready"
        body = {
            "status": "ok" if is_well else ill,
            "replicas": [
                {
                    "ready": each in ready,
                    "open": each.num_open,
                    "restarts": max(0, each.num_starts - 1),
                    "hangs": each.num_hangs,
                }
                for each in self._replicas.all
            ],
        }
        return responses.JSONResponse(body, 200 if is_well else 503)

    async def _metrics(self) -> responses.Response:
        ready = self._replicas.ready
        texts = await asyncio.gather(*(self._series(each) for each in ready))
        by_replica = {
            each.number: text for each, text in zip(ready, texts, strict=True) if text is not None
        }
        registry = CollectorRegistry()
        registry.register(_Joined(by_replica, self._replicas, self.num_repeated))
        return metrics_response(registry)

    async def _series(self, replica: ReplicaProcess) -> str | None:
        """Returns a replica's own metrics; None if it does not answer."""
        if replica.address is None:
            return None
        asked = self._upstreams[replica.number].ask(
            replica.address, "GET", b"/metrics", headers=self._key
        )
        try:
            async with asyncio.timeout(_METRICS_S), asked as answer:
                return (await answer.whole()).decode()
        except (LostReplicaError, TimeoutError):
            return None


async def _events(
    first: bytes, parts: AsyncIterator[bytes], upstream: Upstream
) -> AsyncIterator[bytes]:
    """Yields an answer's parts as they come; an error event ends them if the replica is lost."""
    yield first
    try:
        async for part in parts:
            yield part
    except LostReplicaError:
        how = "hangs" if upstream.is_closed else "has ended"
        text = f"the replica that answered {how}; send the request again"
        yield event({"error": error_body(text, kind="server_error")})


@final
class _Joined(Collector):
    """Metrics of all replicas, labelled with the replica's number, and the front's own."""

    def __init__(self, by_replica: dict[int, str], replicas: Replicas, num_repeated: int):
        self._by_replica, self._replicas, self._repeated = by_replica, replicas, num_repeated

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for number, text in self._by_replica.items():
            for family in text_string_to_metric_families(text):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                label = {"replica": str(number)}
                joined.samples += [
                    each._replace(labels={**each.labels, **label}) for each in family.samples
                ]
        up = GaugeMetricFamily("jaxinfra:replica_up", "Whether it serves.", labels=["replica"])
        starts = CounterMetricFamily(
            "jaxinfra:replica_restarts", "Starts after the first.", labels=["replica"]
        )
        hangs = CounterMetricFamily(
            "jaxinfra:replica_hangs", "Times that it was killed, as it hung.", labels=["replica"]
        )
        for each in self._replicas.all:
            up.add_metric([str(each.number)], each.address is not None)
            starts.add_metric([str(each.number)], max(0, each.num_starts - 1))
            hangs.add_metric([str(each.number)], each.num_hangs)
        repeated = CounterMetricFamily(
            "jaxinfra:repeated_requests",
            "Requests whose replica ended or hung before it sent anything.",
            self._repeated,
        )
        return [*families.values(), up, starts, hangs, repeated]


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
    guarded = RequestGuards(
        front,
        api_key=options.api_key,
        max_body_bytes=max_body_bytes,
        open_metrics=options.open_metrics,
    )
    server = HttpServer(guarded, options, drain=front.drain)
    request.defer()
    try:
        replicas.start(lambda: request.asked)
        if not request.asked:
            say(f"{name} at {server.address}: {len(replicas.all)} replicas")
            server.run_until_asked(lambda: request.asked)
    finally:
        replicas.stop(options.drain_s + _STOP_S)
    say(f"stopped by {request.asked.name if request.asked else 'the server'}")
