"""Faults 24-30: a server with misbehaving clients, a full KV cache or a failing machine."""

import concurrent.futures
import json
import os
import signal
import time

from jaxinfra.faults.arena import Arena, injected, require
from jaxinfra.faults.servers import (
    POISON,
    PROMPTS,
    STEP,
    GymServer,
    body,
    drop,
    head,
    read_rest,
    serving,
)
from jaxinfra.faults.verdict import fault
from jaxinfra.serving.engine.options import Preemption

_LONG = 100  # new tokens of an answer that is still under way when something happens
_CHOICES = 8  # of it, of which the server runs four at a time
_MANY = 60  # of one that takes longer than a server that does not wait


def _require_texts(server: GymServer, texts: list[str]) -> str:
    """Requires the server to answer as before and to hold no pages; returns the evidence."""
    require(server.texts() == texts, "its answers are others than before")
    server.wait_until_idle()
    return "no page held, no late compile, answers as before"


@fault(24, "clients of a server go away in mid-stream", devices=1)
def clients_go(arena: Arena) -> str:
    """Disconnects clients before and during answers; requires their requests to be cancelled."""
    with serving(arena, "f24") as server:
        texts = server.texts()
        before = server.wait_until_idle()
        for number in range(12):
            asked = body(PROMPTS[0], new=_LONG, stream=number % 3 > 0, n=_CHOICES)
            connection = server.send(asked)
            if asked["stream"]:
                connection.recv(200)
            drop(connection, reset=number % 2 == 0)
        series = server.wait_until_idle()
        name = "vllm:request_success_total cancelled"
        cancelled = series.get(name, 0.0) - before.get(name, 0.0)
        # A request that ends before its connection's end is seen is not cancelled.
        require(cancelled >= 12, f"{cancelled:.0f} requests of 12 clients were cancelled")
        return f"{cancelled:.0f} requests of 12 clients cancelled; {_require_texts(server, texts)}"


@fault(25, "a server's engine fails", devices=1)
def engine_fails(arena: Arena) -> str:
    """Fails the engine; requires errors to clients, and the process to exit for a restart."""
    # After the undisturbed answers, in the midst of what is asked then.
    gate = arena.directory / "f25.go"
    plan = injected(STEP, "raise", 5, call=400, once=str(gate))
    gate.touch()
    with serving(arena, "f25", faults=[plan]) as server:
        asked = [body(p, new=_LONG, n=_CHOICES, stream=n % 2 > 0) for n, p in enumerate(PROMPTS)]
        replies = server.ask_all(asked * 2)
        lost = [reply for reply in replies if reply.status != 200 or reply.error]
        require(lost, "no request met the failure")
        unclear = [
            reply
            for reply in lost
            if reply.status not in (200, 500, 503)
            or not any(words in reply.error for words in ("engine failed", "stopping"))
        ]
        require(not unclear, f"not told what happened: {unclear[:1]}")
        code = server.job.end().code
    require(code == 1, f"the server ended with exit code {code}, expected 1")
    with serving(arena, "f25-again") as server:
        server.texts()
        server.wait_until_idle()
    return f"{len(lost)} of {len(replies)} clients were told that the engine failed; exit 1"


@fault(26, "more requests than pages, and than a server takes", devices=1)
def full_cache(arena: Arena) -> str:
    """Fills the KV cache; requires preempted requests to free their pages and continue later.

    Their pages are recomputed or saved to the host. Clients beyond ``--max-open`` get an answer to
    try again.
    """
    return "; ".join(_overfill(arena, preemption) for preemption in Preemption)


def _overfill(arena: Arena, preemption: Preemption) -> str:
    options = ("--num-pages", "18", "--max-open", "10", "--preemption", preemption.value)
    with serving(arena, f"f26-{preemption.value}", *options) as server:
        texts = server.texts()
        replies = server.ask_all([body(p, new=90) for _ in range(6) for p in PROMPTS])
        taken = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status == 429]
        require(len(taken) >= 10, f"{len(taken)} of {len(replies)} were answered")
        require(len(taken) + len(refused) == len(replies), "other answers than 200 and 429")
        require(refused, "no client was told to try again")
        require(all("retry-after" in reply.headers for reply in refused), "429 without Retry-After")
        wrong = [r for r in taken if not any(r.text.startswith(text) for text in texts)]
        require(not wrong, f"answered otherwise than alone: {wrong[:1]}")
        series = server.series()
        preempted = series["vllm:num_preemptions_total"]
        require(preempted > 0, "no request had to give up its pages")
        saved, restored = (
            series[f"jaxinfra:host_pages_{what}_total"] for what in ("saved", "restored")
        )
        is_kept = preemption is Preemption.HOST
        require((saved > 0) == is_kept, f"{preemption.value}, and the host got {saved:.0f} pages")
        said = _require_texts(server, texts)
        kept = server.series()["jaxinfra:host_pages"]
        require(kept == 0, f"the host keeps {kept:.0f} pages that no request uses")
        return (
            f"{preemption.value}: {len(taken)} answered as alone, {preempted:.0f} times after a "
            f"preemption, {saved:.0f} pages to the host and {restored:.0f} back; "
            f"{len(refused)} told 429; {said}"
        )


@fault(27, "a client that does not read", devices=1)
def slow_reader(arena: Arena) -> str:
    """Reads one answer slowly; requires other answers not to wait, and no text to be lost.

    The slow request's pages are freed once its answer is computed. The unsent text is bounded by
    one request's limit.
    """
    with serving(arena, "f27") as server:
        texts = server.texts()
        asked = body(PROMPTS[0], new=_LONG, stream=True, n=16, logprobs=20)
        connection = server.send(asked, receive_buffer=4096)
        require(server.texts() == texts, "others were answered otherwise meanwhile")
        server.wait_until_idle()  # it is computed, though no client reads
        kept = server.series()["process_resident_memory_bytes"]
        for _ in range(3):
            drop(server.send(asked, receive_buffer=4096), reset=True)
        server.wait_until_idle()
        reply = read_rest(connection)
        require(reply.is_whole and not reply.error, "the slow client's stream did not end")
        require(reply.text.startswith(texts[0]), f"the slow client read {reply.text!r}")
        size = sum(len(json.dumps(each)) for each in reply.came)
        return (
            f"{size / 1e6:.1f} MB were read after all, correct to the end; resident "
            f"{kept / 2**20:.0f} MiB meanwhile; {_require_texts(server, texts)}"
        )


@fault(28, "malformed requests and bodies", devices=1)
def malformed(arena: Arena) -> str:
    """Sends malformed requests; requires errors in OpenAI's form, and no blocked connection."""
    bad: list[bytes | dict] = [
        b'{"prompt": [97,',
        b"\xff\xfe\x00\x80",
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"prompt": ' + b'"' + b"\\ud800" + b'"}',
        body("x", new=2, max_tokens="many"),
        body("x", new=2, best_of=3),
        body([POISON + 1]),
        body([97] * 1000),
        body("x", temperature=-1),
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
    ]
    raw = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"\0" * 1000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"A" * 100_000,
        head(400) + b'{"prompt": "half of',
    ]
    with serving(arena, "f28") as server:
        texts = server.texts()
        for each in bad:
            reply = server.ask(each)
            require(
                400 <= reply.status < 500 and reply.error,
                f"{str(each)[:80]} was answered {reply.status} {reply.came}",
            )
        for each in raw:
            connection = server.send(each)
            connection.settimeout(0.5)
            try:
                said = connection.recv(100)
            except TimeoutError:
                said = b""  # it waits for the rest
            except ConnectionError:
                said = b""
            drop(connection, reset=True)
            require(not said or b" 4" in said[:20], f"{each[:40]!r} was answered {said!r}")
        require(server.job.process.poll() is None, "the server has ended")
        said = server.job.said()
        require("Traceback" not in said, f"a traceback: {said[-2000:]}")
        return f"{len(bad)} bodies and {len(raw)} streams refused; {_require_texts(server, texts)}"


@fault(29, "a request whose logits are not finite", devices=1)
def poison_request(arena: Arena) -> str:
    """Makes one request fail in the engine; requires an error for its client alone.

    Requests in its batch, and requests that get its pages next, must be unaffected.
    """
    with serving(arena, "f29") as server:
        texts = server.texts()
        poisoned = [97, 98, POISON, 99]
        asked = []
        for number in range(12):
            asked.append(body(PROMPTS[number % len(PROMPTS)]))
            asked.append(body(poisoned, stream=number % 2 > 0))
        replies = server.ask_all(asked)
        for number, reply in enumerate(replies):
            if number % 2:
                right = reply.status in (200, 500) and "not finite" in reply.error
            else:
                right = reply.status == 200 and reply.text == texts[number // 2 % len(PROMPTS)]
            require(right, f"request {number} was answered {reply}")
        return (
            f"12 poisoned requests of 24 ended, with an error each; {_require_texts(server, texts)}"
        )


@fault(30, "the clock of a server's machine jumps", devices=1)
def clock_jump(arena: Arena) -> str:
    """Moves the wall clock forward and back repeatedly; requires unaffected answers.

    The server's waits must be measured by a monotonic clock.
    """
    action = "jaxinfra.faults.corruption:jump_clock"
    plan = injected("time:time", action, until=10**9)
    with serving(arena, "f30", faults=[plan]) as server:
        texts = server.texts()
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.ask, body(PROMPTS[1], new=_LONG, n=_MANY))
            while not server.series()["vllm:num_requests_running"]:
                require(not waiting.done(), "it ended before the server was asked to stop")
            os.kill(server.job.process.pid, signal.SIGTERM)
            reply = waiting.result()
        require(reply.status == 200 and not reply.error, f"not answered while it drained: {reply}")
        code = server.job.end().code
        require(code == 0, f"exit {code}, expected 0")
        return (
            f"{len(texts)} answers, then one of {_MANY} choices while it drained, in "
            f"{time.monotonic() - began:.1f} s; exit 0"
        )
