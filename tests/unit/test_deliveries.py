"""Event loop mailboxes: items from other threads arrive complete and in order, with few wakes."""

import asyncio
import json
import random
import threading
from unittest import mock

import fastapi
import prometheus_client
import pytest

from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.requests import (
    EndReason,
    GenerationRequest,
    RequestProgress,
    TokenScore,
)
from jaxinfra.serving.http.answers import CompletionForm
from jaxinfra.serving.http.bodies import ChatBody, CompletionBody
from jaxinfra.serving.http.chat import ChatTurn
from jaxinfra.serving.http.chat_answers import ChatForm
from jaxinfra.serving.http.guards import unless_gone
from jaxinfra.serving.http.service import Deliveries, Histogram, Mailbox, Service

_EACH = 2000


async def taken(box, count):
    """The values of a mailbox, until there are as many, and none more."""
    values = []
    while len(values) < count:
        values += await box.take()
    assert len(values) == count
    return values


def test_all_that_threads_tell_arrives_in_their_order():
    async def heard() -> list[list[tuple[int, int]]]:
        loop = asyncio.get_running_loop()
        deliveries, boxes = Deliveries(loop), [Mailbox(loop) for _ in range(3)]

        def tell(thread: int) -> None:
            for i in range(_EACH):
                deliveries.put(boxes[i % 3], (thread, i))

        threads = [threading.Thread(target=tell, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        counts = [4 * len(range(place, _EACH, 3)) for place in range(3)]
        found = [await taken(*each) for each in zip(boxes, counts, strict=True)]
        for each in threads:
            each.join()
        return found

    found = asyncio.run(asyncio.wait_for(heard(), 60))
    for place, told in enumerate(found):
        for thread in range(4):
            assert [i for who, i in told if who == thread] == [*range(place, _EACH, 3)]


def test_a_loop_is_woken_once_for_all_that_came_meanwhile(monkeypatch):
    async def wakes() -> tuple[int, int, list[int]]:
        loop, count = asyncio.get_running_loop(), 0
        box = Mailbox(loop)
        called = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal count
            count += 1
            return called(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        deliveries = Deliveries(loop)

        def tell() -> None:
            for i in range(50):
                deliveries.put(box, i)

        def told_by_a_thread() -> None:  # while the loop waits for it, and looks at nothing
            thread = threading.Thread(target=tell)
            thread.start()
            thread.join()

        told_by_a_thread()
        first = await box.take()
        once = count
        told_by_a_thread()
        assert await box.take() == first
        return once, count, first

    assert asyncio.run(wakes()) == (1, 2, [*range(50)])


class Told:
    """An engine's thread that tells of each request's steps when it is submitted."""

    def __init__(self, steps: int):
        self.steps = steps

    def submit(self, requests, listen):
        for place in range(len(requests)):
            for step in range(1, self.steps + 1):
                end = EndReason.LENGTH if step == self.steps else None
                listen(place, RequestProgress(request=place, tokens=(step,), end=end))
        return requests


def test_a_whole_answers_steps_wake_its_task_seldom_and_none_is_lost():
    async def batches(steps: int, together: int):
        service = object.__new__(Service)
        service.engine, service._deliveries = Told(steps), None
        service.metrics = mock.MagicMock()
        requests = [GenerationRequest(prompt_ids=(1,), max_new_tokens=steps)] * 2
        return [each async for each in service.stream(requests, together=together)]

    for together in (1, 4):
        (came,) = asyncio.run(batches(10, together))
        assert [p.tokens[0] for place, p in came if place == 1] == [*range(1, 11)]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_waits_costs_nothing_and_one_that_leaves_ends_its_answer(leaves):
    async def waited() -> tuple[int, int, bool]:
        num_looks, left, answer = 0, asyncio.Event(), asyncio.Event()
        was_cancelled = False

        async def receive() -> dict[str, str]:
            nonlocal num_looks
            num_looks += 1
            await left.wait()
            return {"type": "http.disconnect"}

        async def answered() -> fastapi.Response:
            nonlocal was_cancelled
            try:
                await answer.wait()
            except asyncio.CancelledError:
                was_cancelled = True
                raise
            return fastapi.Response(status_code=200)

        request = fastapi.Request({"type": "http"}, receive)
        waiting = asyncio.create_task(unless_gone(request, answered()))
        await asyncio.sleep(0.3)
        (left if leaves else answer).set()
        status = (await waiting).status_code
        await asyncio.sleep(0)
        return num_looks, status, was_cancelled

    assert asyncio.run(waited()) == (1, 499 if leaves else 200, leaves)


def test_tokens_that_came_at_a_time_are_one_event_of_each_choice():
    body = CompletionBody(prompt="a", n=2, logprobs=0, stream=True)
    form = CompletionForm("m", [(97,)], body, tokenizer=bytes_tokenizer(), echoes=None)

    def said(place, text, end=None):
        scores = (TokenScore(logprob=-1.0, top=()),)
        progress = RequestProgress(place, tuple(text.encode()), text, end, scores=scores)
        return place, progress

    async def batches():
        yield [said(0, "b"), said(1, "x"), said(0, "c")]
        yield [said(1, "y", EndReason.EOS), said(0, "d"), said(0, "e", EndReason.LENGTH)]

    async def written():
        return [each async for each in form.events(batches())]

    first, second, last = asyncio.run(written())
    assert last == b"data: [DONE]\n\n"
    told = [
        choice
        for each in (first + second).decode().split("\n\n")[:-1]
        for choice in json.loads(each.removeprefix("data: "))["choices"]
    ]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in told] == [
        (0, "bc", None),
        (1, "x", None),
        (1, "y", "stop"),
        (0, "de", "length"),
    ]
    assert [c["logprobs"]["text_offset"] for c in told] == [[0, 1], [0], [1], [2, 3]]


def test_a_histogram_counts_as_the_client_librarys():
    bounds, draw = (0.001, 0.05, 1, 60), random.Random(1)
    ours, theirs = (prometheus_client.CollectorRegistry() for _ in range(2))
    made = Histogram("vllm:s", "Seconds.", bounds, model="m")
    ours.register(made)
    other = prometheus_client.Histogram(
        "vllm:s", "Seconds.", ["model_name"], buckets=bounds, registry=theirs
    ).labels("m")
    for value in (0, *bounds, *(draw.expovariate(0.3) for _ in range(200)), 61):
        made.observe(value)
        other.observe(value)
    names = [f"vllm:s_{kind}" for kind in ("count", "sum")]
    labels = [{"model_name": "m"}] * 2
    bucket = [{"model_name": "m", "le": le} for le in ("0.001", "0.05", "1.0", "60.0", "+Inf")]
    for name, each in [*zip(names, labels, strict=True), *(("vllm:s_bucket", b) for b in bucket)]:
        assert ours.get_sample_value(name, each) == pytest.approx(
            theirs.get_sample_value(name, each)
        )


class Counted:
    """An engine that ends each request in the step after it was submitted."""

    def __init__(self):
        self.waiting: list[int] = []
        self.taken: list[int] = []  # requests that came before each step

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    def check(self, request) -> None:
        del request

    def submit(self, request) -> int:
        self.waiting.append(request)
        return request

    def step(self):
        ended, self.waiting = self.waiting, []
        self.taken.append(len(ended))
        return [RequestProgress(request=each, end=EndReason.LENGTH) for each in ended]


def test_steps_go_on_while_many_requests_arrive():
    engine, ended = Counted(), []
    thread = EngineThread(engine, max_open=1000)
    thread.submit([*range(200)], lambda place, progress: ended.append((place, progress.request)))
    thread.start()
    assert thread.drain(60)
    thread.close()
    assert ended == [(i, i) for i in range(200)]
    assert max(engine.taken) <= 64


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_has_the_ids_of_tokens_without_text_of_their_own(is_chat):
    """A character of three tokens."""
    asked = {"return_token_ids": True, "stream": True}
    if is_chat:
        chat, turn = ChatBody(messages=[{}], **asked), ChatTurn(prompt=(97,))
        form = ChatForm("m", turn, chat, tokenizer=bytes_tokenizer())
    else:
        body = CompletionBody(prompt="a", **asked)
        form = CompletionForm("m", [(97,)], body, tokenizer=bytes_tokenizer(), echoes=None)
    ids = [*"b日".encode()]

    async def batches():
        for token, text in zip(ids, ("b", "", "", "日"), strict=True):
            end = EndReason.LENGTH if text == "日" else None
            yield [(0, RequestProgress(0, (token,), text, end))]

    async def written():
        return [each async for each in form.events(batches())]

    *events, _ = asyncio.run(written())
    told = [json.loads(each.decode().removeprefix("data: "))["choices"][0] for each in events]
    assert [token for each in told for token in each["token_ids"]] == ids
