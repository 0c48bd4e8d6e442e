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
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, final

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from jaxinfra.serving.http.answers import error_body, event
from jaxinfra.serving.http.guards import Receive, Scope, Send
from jaxinfra.serving.replicas.processes import ReplicaProcess, Replicas
from jaxinfra.serving.replicas.upstream import Headers, LostReplicaError, UpstreamAnswer, asked

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
    prompt: Any = asked.get("prompt", asked.get("messages"))
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


class HungReplicaError(LostReplicaError):
    """The replica that had a request hangs, and was taken out."""


@final
class HangWatch:
    """Polls each replica's ``/health``, and tracks each replica's open requests.

    A replica hangs if it does not answer, or if its engine does not finish a step. It is detected
    between ``hang_s`` and twice as many seconds after its last sign of life.
    """

    def __init__(self, replicas: Replicas, *, hang_s: float):
        self._replicas = replicas
        self._look_s = hang_s / _LOOKS
        self._lent: dict[int, set[asyncio.Timeout]] = {each.number: set() for each in replicas.all}

    async def run(self) -> None:
        """Polls the replicas until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for each in self._replicas.all:
                group.create_task(self._watch(each))

    @contextlib.asynccontextmanager
    async def lent(self, replica: ReplicaProcess) -> AsyncIterator[None]:
        """Context manager around a request that a replica answers; counts it as open.

        Raises:
            HungReplicaError: the replica was taken out meanwhile. This does not wait for the
                process's end, as a process within a driver call may outlive its kill.
        """
        limits = self._lent[replica.number]
        with replica.taken():
            try:
                async with asyncio.timeout(None) as limit:
                    limits.add(limit)
                    try:
                        yield
                    finally:
                        limits.discard(limit)
            except TimeoutError as error:
                raise HungReplicaError from error

    async def _watch(self, replica: ReplicaProcess) -> None:
        loop = asyncio.get_running_loop()
        misses, seen = 0, replica.num_starts
        while True:
            begun = loop.time()
            start, address = replica.num_starts, replica.address
            missed = "" if address is None else await self._missed(address)
            if not missed or start != seen:
                misses = 0
            misses += bool(missed)
            seen = start
            if misses == _LOOKS:
                self._take_out(replica, start, missed)
                misses = 0
            await asyncio.sleep(max(0.0, begun + self._look_s - loop.time()))

    async def _missed(self, address: str) -> str:
        """Polls a replica; returns which sign of life is missing, or "" if it lives."""
        try:
            async with (
                asyncio.timeout(self._look_s),
                asked(address, "GET", "/health", [], b"") as answer,
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
        replica.take_out(start, why)
        now = asyncio.get_running_loop().time()
        for limit in self._lent[replica.number]:
            limit.reschedule(now)


_MOST_TRIES = 3  # replicas that a request may be given to: one that ends them all is not to
_METRICS_S = 10.0
_KEPT = (b"content-type", b"authorization", b"accept")
_PASSED = (b"content-type", b"retry-after", b"cache-control", b"x-accel-buffering")
_GENERATES = ("/v1/completions", "/v1/chat/completions")
_AGAIN: Headers = [(b"retry-after", b"2")]
_JSON = (b"content-type", b"application/json")


@final
class ReplicaFront:
    """ASGI application that forwards each request to one of several replicas.

    Args:
        replicas: the replica processes; the caller starts them.
        hang_s: seconds without a sign of life after which a replica is taken out.
    """

    def __init__(self, replicas: Replicas, *, api_key: str | None, hang_s: float):
        self._replicas, self._choice = replicas, ReplicaChoice()
        self._watch = HangWatch(replicas, hang_s=hang_s)
        self._key: Headers = (
            [] if api_key is None else [(b"authorization", f"Bearer {api_key}".encode())]
        )
        self._starts = [0] * len(replicas.all)
        self._is_draining = False
        self.num_open = self.num_repeated = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose body ``RequestGuards`` has read."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        if scope["type"] != "http":
            return
        match scope["method"], scope["path"]:
            case "GET", "/health":
                await self._health(send)
            case "GET", "/metrics":
                await self._metrics(send)
            case _:
                await self._forward(scope, receive, send)

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
        watching = asyncio.create_task(self._watch.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a request to replicas until one answers or the client disconnects."""
        body = (await receive()).get("body", b"")
        self.num_open += 1
        working = asyncio.create_task(self._answer(scope, body, send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
            self.num_open -= 1

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        path = scope["path"] + (
            "?" + scope["query_string"].decode() if scope["query_string"] else ""
        )
        headers = [each for each in scope["headers"] if each[0] in _KEPT]
        blocks = blocks_of(body) if path in _GENERATES else ()
        tried: set[int] = set()
        num_lost = 0
        refused: tuple[int, Headers, bytes] | None = None
        while len(tried) < _MOST_TRIES and (replica := self._chosen(blocks, tried)) is not None:
            tried.add(replica.number)
            assert replica.address is not None
            passing = _Passing(send)
            try:
                async with (
                    self._watch.lent(replica),
                    asked(replica.address, scope["method"], path, headers, body) as answer,
                ):
                    if answer.status in (429, 503):
                        refused = answer.status, answer.headers, await answer.whole()
                        continue  # another may have room
                    await passing.all_of(answer)
                    return
            except LostReplicaError as error:
                if passing.has_begun:
                    how = "hangs" if isinstance(error, HungReplicaError) else "has ended"
                    text = f"the replica that answered {how}; send the request again"
                    await passing.end(event({"error": error_body(text, kind="server_error")}))
                    return
                num_lost += 1
                self.num_repeated += 1
        if refused is not None:
            await _send(send, *refused)
        else:
            await self._unanswered(send, num_lost)

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

    async def _unanswered(self, send: Send, num_lost: int) -> None:
        """Answers with an error if no replica is left to ask.

        Args:
            num_lost: replicas that ended or hung with this request.
        """
        if self._is_draining:
            status, text = 503, "the server is stopping; ask another one"
        elif num_lost == _MOST_TRIES:
            status = 502
            text = (
                f"{num_lost} replicas ended or hung before they answered this request; it may be "
                "the reason, so no other one is asked"
            )
        elif num_lost:
            status = 503
            text = (
                "the replica that was asked ended or hung before it answered, and no other one is "
                "ready; send the request again"
            )
        else:
            status, text = 503, "no replica is ready; they are being started again"
        body = json.dumps({"error": error_body(text, kind="server_error")})
        await _send(send, status, [_JSON, *(_AGAIN if status == 503 else [])], body.encode())

    async def _health(self, send: Send) -> None:
        ready = self._replicas.ready
        is_well = bool(ready) and not self._is_draining
        body = {
            "status": "ok"
            if is_well
            else "stopping"
            if self._is_draining
            else "no replica is ready",
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
        await _send(send, 200 if is_well else 503, [_JSON], json.dumps(body).encode())

    async def _metrics(self, send: Send) -> None:
        ready = self._replicas.ready
        texts = await asyncio.gather(*(self._series(each) for each in ready))
        by_replica = {
            each.number: text for each, text in zip(ready, texts, strict=True) if text is not None
        }
        registry = CollectorRegistry()
        registry.register(_Joined(by_replica, self._replicas, self.num_repeated))
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await _send(send, 200, headers, prometheus_client.generate_latest(registry))

    async def _series(self, replica: ReplicaProcess) -> str | None:
        """Returns a replica's own metrics; None if it does not answer."""
        if replica.address is None:
            return None
        try:
            async with (
                asyncio.timeout(_METRICS_S),
                asked(replica.address, "GET", "/metrics", self._key, b"") as answer,
            ):
                return (await answer.whole()).decode()
        except (LostReplicaError, TimeoutError):
            return None


@final
class _Passing:
    """An answer that is being passed from a replica to a client."""

    def __init__(self, send: Send):
        self._send = send
        self.has_begun = False

    async def all_of(self, answer: UpstreamAnswer) -> None:
        """Events as they come; any other body once all of it is there."""
        if answer.header(b"content-type").startswith(b"text/event-stream"):
            async for part in answer.parts():
                if not self.has_begun:
                    self.has_begun = True
                    await self._send(_start(answer.status, answer.headers))
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await self.end("")
            return
        await _send(self._send, answer.status, answer.headers, await answer.whole())

    async def end(self, text: str) -> None:
        """The last part."""
        await self._send({"type": "http.response.body", "body": text.encode()})


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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Headers) -> dict[str, Any]:
    kept = [each for each in headers if each[0] in _PASSED]
    return {"type": "http.response.start", "status": status, "headers": kept}


async def _send(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send(_start(status, [*headers]))
    await send({"type": "http.response.body", "body": body})
