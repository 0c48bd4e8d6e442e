"""Several servers behind one address, with stand-ins for the servers: who is asked, what is passed
on, and what becomes of requests whose replica ends.
"""

import argparse
import contextlib
import http.client
import json
import resource
import socketserver
import sys
import threading
import time
import types

import pytest

from jaxinfra.cli import serve
from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine import background
from jaxinfra.serving.engine.background import EngineThread
from jaxinfra.serving.engine.requests import EndReason, GenerationRequest, RequestProgress
from jaxinfra.serving.http import server
from jaxinfra.serving.http.guards import RequestGuards
from jaxinfra.serving.http.server import HttpServer, ServerOptions
from jaxinfra.serving.replicas import processes
from jaxinfra.serving.replicas.front import ReplicaChoice, ReplicaFront, blocks_of
from jaxinfra.serving.replicas.processes import NoReplicaError, Replicas, environments

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
STREAM = HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n"
    return head % (status, more, len(body)) + body


REFUSED = whole(b'{"error":{"message":"full"}}', b"429 Too Many Requests", b"retry-after: 1\r\n")
SERIES = b'# HELP vllm:x_total Of x.\n# TYPE vllm:x_total counter\nvllm:x_total{m="a"} %d\n'


class Stub:
    """A server that answers each request with the same bytes, and ends the connection.

    Args:
        hangs: it never ends what it has begun.
        stalled_s: what ``/health`` says; None: nothing.
    """

    def __init__(self, number: int, answer: bytes, *, hangs=False, stalled_s: float | None = 0.0):
        asked = self.asked = []
        released = self.released = threading.Event()
        self.taken_out = []

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                line = self.rfile.readline().split()
                length = 0
                while head := self.rfile.readline().strip():
                    name, _, value = head.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                body = self.rfile.read(length)
                if line[1] == b"/metrics":
                    self.wfile.write(whole(SERIES % (number + 1)))
                    return
                if line[1] == b"/health":
                    if stalled_s is None:
                        released.wait()
                    self.wfile.write(whole(b'{"stalled_s": %f}' % (stalled_s or 0.0)))
                    return
                asked.append(body)
                self.wfile.write(answer)
                if hangs:
                    released.wait()

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.number, self.num_open, self.num_starts, self.num_hangs = number, 0, 1, 0
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take_out(self, start, why):
        self.taken_out.append((start, why))
        self.address = None
        self.num_hangs += 1

    taken = processes.ReplicaProcess.taken


class Group:
    def __init__(self, stubs):
        self.all = stubs

    @property
    def ready(self):
        return [each for each in self.all if each.address is not None]


@pytest.fixture
def fronted():
    """Gives a function that puts stubs behind a front, and a way to ask it."""
    open_servers, stubs = [], []

    def make(*answers: bytes, hang_s=60.0, **first):
        stubs.extend(
            Stub(number, each, **({} if number else first)) for number, each in enumerate(answers)
        )
        replicas = Group(stubs)
        front = ReplicaFront(replicas, api_key=None, hang_s=hang_s)
        guarded = RequestGuards(front, api_key=None, max_body_bytes=10_000)
        server = HttpServer(guarded, ServerOptions(port=0, drain_s=1), drain=front.drain)
        running = server.running()
        running.__enter__()
        open_servers.append(running)

        def ask(body=b'{"prompt": "a"}', *, method="POST", path="/v1/completions", timeout=20.0):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
            with contextlib.closing(connection):
                connection.request(method, path, body)
                answer = connection.getresponse()
                return answer.status, answer.read(), answer.headers

        return types.SimpleNamespace(ask=ask, front=front, stubs=stubs, replicas=replicas)

    yield make
    for running in open_servers:
        running.__exit__(None, None, None)
    for stub in stubs:
        stub.released.set()
        stub.server.shutdown()
        stub.server.server_close()


def test_a_beginning_that_was_seen_decides_unless_its_replica_is_far_busier():
    choice, loads = ReplicaChoice(), {0: 0, 1: 0, 2: 0}
    prompt = blocks_of(json.dumps({"prompt": "x" * 200}).encode())
    assert len(prompt) == 3
    assert choice.choose(prompt, loads) == 0, "nobody has seen it: the least busy one"
    choice.note(1, prompt[:2])
    choice.note(2, prompt[:1])
    assert choice.choose(prompt, loads) == 1
    assert choice.choose(prompt, {0: 0, 1: 4, 2: 0}) == 1
    assert choice.choose(prompt, {0: 0, 1: 5, 2: 0}) == 2, "1 is far busier"
    assert choice.choose(prompt, {0: 20, 1: 40, 2: 21}) == 1
    choice.forget(1)
    assert choice.choose(prompt, loads) == 2


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({"prompt": list(range(40))}, 2),
        ({"prompt": [list(range(20)), [1]]}, 1),
        ({"prompt": ["y" * 64, "z"]}, 1),
        ({"messages": [{"role": "system", "content": "x" * 64}]}, 1),
        ({"input": "x" * 200}, 3),
        ({"prompt": 3}, 0),
        ([1], 0),
    ],
)
def test_blocks_of_every_form_of_prompt(body, number):
    assert len(blocks_of(json.dumps(body).encode())) == number
    assert blocks_of(b"{") == ()


def test_answers_are_passed_on_as_they_are(fronted):
    events = [b'data: {"a":1}\n\n', b"data: [DONE]\n\n"]
    stream = STREAM + b"".join(map(chunk, events)) + chunk(b"")
    made = fronted(stream)
    status, body, headers = made.ask()
    assert (status, body) == (200, b"".join(events))
    assert headers["content-type"] == "text/event-stream"
    assert made.stubs[0].asked == [b'{"prompt": "a"}']
    wait_until_idle(made)


def wait_until_idle(made):
    deadline = time.monotonic() + 10
    while made.front.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made.front.num_open == made.stubs[0].num_open == 0


@pytest.mark.parametrize(
    "cut", [b"", HEAD, STREAM, HEAD % b"application/json" + b"content-length: 99\r\n\r\n{"]
)
def test_a_request_of_which_nothing_was_sent_is_asked_of_another(fronted, cut):
    made = fronted(cut, whole(b"{}"))
    assert made.ask()[:2] == (200, b"{}")
    assert [len(stub.asked) for stub in made.stubs] == [1, 1]
    assert made.front.num_repeated == 1


def test_a_stream_that_has_begun_ends_with_an_error(fronted):
    made = fronted(STREAM + chunk(b'data: {"a":1}\n\n'), whole(b"{}"))
    status, body, _ = made.ask()
    begun, error = body.decode().strip().split("\n\n")
    assert (status, begun) == (200, 'data: {"a":1}')
    assert "has ended" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert made.stubs[1].asked == []


def test_one_that_is_full_is_passed_over_and_all_that_are_say_so(fronted):
    made = fronted(REFUSED, whole(b"{}"))
    assert made.ask()[:2] == (200, b"{}")
    made.stubs[1].address = None
    status, body, headers = made.ask()
    assert (status, headers["retry-after"]) == (429, "1")
    assert b"full" in body


def test_a_request_that_ends_replicas_does_not_end_all(fronted):
    made = fronted(b"", b"", b"", b"")
    status, body, headers = made.ask()
    assert (status, headers["retry-after"]) == (502, None)
    assert b"3 replicas ended or hung before they answered" in body
    assert sum(len(stub.asked) for stub in made.stubs) == 3


def test_a_request_whose_only_replica_ends_is_told_to_come_again(fronted):
    made = fronted(b"")
    status, body, headers = made.ask()
    assert (status, headers["retry-after"]) == (503, "2")
    assert b"no other one is ready" in body
    made.stubs[0].address = None
    assert b"no replica is ready" in made.ask()[1]


BEGUN = STREAM + chunk(b'data: {"a":1}\n\n')


@pytest.mark.parametrize(
    ("answer", "stalled_s", "why"),
    [
        (b"", None, "/health was not answered within 0.3 s, 3 times in a row"),
        (BEGUN, None, "/health was not answered within 0.3 s, 3 times in a row"),
        (b"", 7.0, "its engine has been at one step for 7.0 s"),
    ],
    ids=["silent", "in_a_stream", "engine"],
)
def test_a_replica_that_hangs_is_taken_out(fronted, answer, stalled_s, why):
    """Nobody waits for it: what has begun ends with an error, the rest is asked of another."""
    made = fronted(answer, whole(b"{}"), hang_s=0.9, hangs=True, stalled_s=stalled_s)
    status, body, _ = made.ask()
    if body.startswith(b"data"):
        assert b"the replica that answered hangs; send the request again" in body
        assert made.stubs[1].asked == []
    else:
        assert (status, body) == (200, b"{}")
    assert made.stubs[0].taken_out == [(1, why)]
    assert made.stubs[1].taken_out == []
    text = made.ask(None, method="GET", path="/metrics")[1].decode()
    assert 'jaxinfra:replica_hangs_total{replica="0"} 1.0' in text
    assert 'jaxinfra:replica_up{replica="0"} 0.0' in text
    wait_until_idle(made)


def test_without_looks_whoever_asked_a_hung_replica_would_wait(fronted, monkeypatch):
    """What the tests above see is the watch's doing."""
    monkeypatch.setattr(ReplicaFront, "_take_out", lambda *_: None)
    made = fronted(b"", whole(b"{}"), hang_s=0.3, hangs=True, stalled_s=None)
    with pytest.raises(TimeoutError):
        made.ask(timeout=1.0)


def test_health_and_metrics_are_of_all(fronted):
    made = fronted(whole(b"{}"), whole(b"{}"))
    status, body, _ = made.ask(None, method="GET", path="/health")
    assert status == 200
    assert [each["ready"] for each in json.loads(body)["replicas"]] == [True, True]
    text = made.ask(None, method="GET", path="/metrics")[1].decode()
    assert 'vllm:x_total{m="a",replica="0"} 1.0' in text
    assert 'vllm:x_total{m="a",replica="1"} 2.0' in text
    assert text.count("# TYPE vllm:x_total counter") == 1
    assert 'jaxinfra:replica_up{replica="1"} 1.0' in text
    for stub in made.stubs:
        stub.address = None
    assert made.ask(None, method="GET", path="/health")[0] == 503


def test_a_client_that_goes_away_is_not_waited_for(fronted):
    made = fronted(whole(b"{}"))
    (slow,) = made.stubs
    slow.server.shutdown()  # connections are accepted, and never answered
    with pytest.raises(TimeoutError):
        made.ask(timeout=0.2)
    wait_until_idle(made)


def test_an_engine_that_is_stuck_says_for_how_long(monkeypatch, caplog):
    """It is what ``/health`` tells a front; one with nothing to do is not stuck. Its server can
    end, as it has to where the front is gone.
    """
    monkeypatch.setattr(background, "_CLOSE_S", 0.01)
    begun, go = threading.Event(), threading.Event()

    class Stuck:
        is_busy = False
        check = staticmethod(lambda _: None)
        submit = staticmethod(lambda _: 0)

        def step(self):
            begun.set()
            go.wait()
            return [RequestProgress(request=0, end=EndReason.EOS)]

    thread = EngineThread(Stuck(), max_open=1)
    thread.start()
    assert thread.stalled_s == 0.0
    thread.submit([GenerationRequest(prompt_ids=(1,), max_new_tokens=1)], lambda *_: None)
    begun.wait()
    time.sleep(0.01)
    assert thread.stalled_s >= 0.01
    thread.close()
    assert "the engine has been at one step for 0.0 s; left behind" in caplog.text
    go.set()
    assert thread.drain(10)


def test_a_process_that_ends_is_started_again(monkeypatch):
    said = []
    code = "import os, time; print('m at http://127.0.0.1:1: x', flush=True); time.sleep(0.1)"
    replicas = Replicas([sys.executable, "-S", "-c", code], [{}], say=said.append)
    monkeypatch.setattr(processes, "_STEADY_S", 0.0)  # no pause
    replicas.start(lambda: False)
    (one,) = replicas.all
    deadline = time.monotonic() + 20
    while one.num_starts < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    replicas.stop(5.0)
    assert one.num_starts >= 3
    assert one.address is None
    assert "replica 0: m at http://127.0.0.1:1: x" in said
    assert "replica 0 ended (exit code 0); started again in 0 s" in said


def test_a_process_that_never_serves_ends_the_start():
    replicas = Replicas([sys.executable, "-S", "-c", "raise SystemExit(3)"], [{}], say=print)
    with pytest.raises(NoReplicaError, match="replica 0 ended with exit code 3 before it served"):
        replicas.start(lambda: False)
    replicas.stop(1.0)


def test_each_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    assert environments(2, 2) == [{"CUDA_VISIBLE_DEVICES": x} for x in ("3,4", "5,6")]
    with pytest.raises(ConfigError, match="--replicas 3 of 2 GPUs each need 6, 5 are here"):
        environments(3, 2)
    with pytest.raises(ConfigError, match="--replicas 0"):
        environments(0, 1)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert environments(2, 1) == [{}, {}]


def test_a_replica_whose_front_has_gone_is_asked_to_stop(monkeypatch):
    """Gone before the replica looked for the first time, too."""
    asked = threading.Event()
    monkeypatch.setattr(processes.os, "kill", lambda *_: asked.set())
    monkeypatch.setenv(processes.FRONT, str(2**22 + 1))  # beyond any process's number
    processes.end_with_front()
    assert asked.wait(10)


def test_connections_follow_from_open_requests_and_need_files(monkeypatch, caplog):
    parser, given = argparse.ArgumentParser(), []
    serve.add_arguments(parser)
    for words, most in ((["m"], 1024), (["m", "--max-open", "3000"], 6000)):
        assert serve._server(parser.parse_args(words)).max_connections == most
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    for connections in (500, 2000, 6000):
        server._let_open(connections)
    assert given == [(2256, 4096), (4096, 4096)]
    assert [each.args for each in caplog.records] == [(6000, 6256, 4096)]
