"""Load on a server of OpenAI's API: throughput, and what clients wait.

    jaxinfra bench serve runs/small-1 --rates 2 4 8 --seconds 20
    jaxinfra bench serve --url http://127.0.0.1:8000 --concurrency 1 8 32

A model is served by a process of its own, with the options after ``--``; a server that runs
already is named by its address. Open loop (``--rates``): requests arrive as a Poisson process,
whatever the server does. Closed loop (``--concurrency``): a client asks again when it is answered.
Prompts are random tokens, so that nothing is shared but what ``--shared-prefix`` says. With
``--whole`` answers are not streamed, and their first token counts when the last one is there.
``--settle`` also counts what clients get in ``--seconds`` that begin so much later: at first all
send their prompts at once, at last fewer and fewer wait for an answer.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import numpy as np

from experiments.bench.environment import environment
from experiments.pictures.serving import draw
from jaxinfra.errors import ConfigError, JaxinfraError

PERCENTILES = (50, 95, 99)
_TOGETHER = 16  # clients that connect before what others wait for is looked at


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """A distribution of token counts: ``128``, ``64:256`` (uniform) or ``~128`` (exponential)."""

    text: str

    def draw(self, rng: np.random.Generator) -> int:
        """One length, at least 1."""
        try:
            if self.text.startswith("~"):
                return max(1, round(rng.exponential(float(self.text[1:]))))
            low, _, high = self.text.partition(":")
            return int(rng.integers(int(low), int(high or low) + 1))
        except ValueError as error:
            raise ConfigError(
                f"lengths {self.text!r}: write 128, 64:256 (uniform) or ~128 (exponential)"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Address of the server under load, and the model it serves."""

    host: str
    port: int
    model: str
    api_key: str | None
    num_ids: int  # size of the vocabulary; prompts are sampled from the ids below it
    streams: bool  # answers come token by token


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request: what came of it, in seconds from its arrival."""

    status: int
    begun: float = 0.0  # its arrival, of ``time.perf_counter``
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def per_token_s(self) -> float:
        """Seconds per token after the first."""
        return (self.end_s - self.first_s) / max(1, self.new_tokens - 1)

    def new_between(self, start: float, end: float) -> float:
        """Number of new tokens between two times, if those after the first come evenly."""
        first, last = self.begun + self.first_s, self.begun + self.end_s
        later = max(0.0, min(end, last) - max(start, first)) / max(last - first, 1e-9)
        return (start <= first < end) + (self.new_tokens - 1) * later


async def asked(server: Server, request: bytes) -> Answer:
    """Sends a request, and reads its events to the end."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(request)
        status = int((await reader.readline()).split()[1])
        if status != 200:
            return Answer(status=status)
        first, usage = None, {}
        async for said in events(reader, read_only=(b'"usage"', b'"error"')):
            if "error" in said:
                return Answer(status=500)
            if first is None:
                first = time.perf_counter()
            usage = said.get("usage") or usage
        if first is None or not usage:
            return Answer(status=0)  # cut short
        return Answer(
            status=200,
            begun=begun,
            prompt_tokens=usage["prompt_tokens"],
            new_tokens=usage["completion_tokens"],
            first_s=first - begun,
            end_s=time.perf_counter() - begun,
        )
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def events(
    reader: asyncio.StreamReader, *, read_only: tuple[bytes, ...] = ()
) -> AsyncIterator[dict[str, Any]]:
    """The bodies of server-sent events as they come, or the body of a whole answer.

    Args:
        read_only: bodies with none of these words are given as {}, so that a client of thousands of
            events per second holds up no others.
    """
    while line := await reader.readline():
        if line.startswith((b"data: {", b"{")):
            is_read = not read_only or any(word in line for word in read_only)
            yield json.loads(line.removeprefix(b"data: ")) if is_read else {}


class Load:
    """Samples requests, and sends them at a rate or by a number of clients.

    Args:
        place: among the loads of a run. Each has other prompts, or the server would keep some.
        number: requests that are made ahead, so that making them takes no time of the load.
    """

    def __init__(self, server: Server, args: argparse.Namespace, *, place: int, number: int):
        self.server, self.args = server, args
        self.rng = np.random.default_rng((args.seed, place))
        self.prefix = self.rng.integers(1, server.num_ids, args.shared_prefix).tolist()
        self.made = collections.deque(self.new_request() for _ in range(number))

    def request(self) -> bytes:
        """The next request, as it is sent."""
        return self.made.popleft() if self.made else self.new_request()

    def new_request(self) -> bytes:
        """A new request, with a head of HTTP/1.0: the answer ends with the connection."""
        server, drawn = self.server, self.args.prompt_tokens.draw(self.rng)
        own = self.rng.integers(1, server.num_ids, drawn).tolist()
        asked_for = {
            "model": server.model,
            "prompt": [*self.prefix, *own],
            "max_tokens": self.args.new_tokens.draw(self.rng),
            "ignore_eos": True,
            "temperature": 0,
            "stream": server.streams,
            **({"stream_options": {"include_usage": True}} if server.streams else {}),
        }
        body = json.dumps(asked_for).encode()
        key = f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.0\r\nHost: {server.host}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def at_rate(self, rate: float) -> list[Answer]:
        """Requests arrive at random, at a mean rate per second."""
        end, tasks = time.perf_counter() + self.args.seconds, []
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(asked(self.server, self.request())))
            await asyncio.sleep(self.rng.exponential(1 / rate))
        return await asyncio.gather(*tasks)

    async def by_clients(self, number: int) -> list[Answer]:
        """Runs ``number`` closed-loop clients: each sends its next request after an answer."""
        end = time.perf_counter() + self.args.settle + self.args.seconds

        async def client() -> list[Answer]:
            answers = []
            while time.perf_counter() < end:
                answers.append(await asked(self.server, self.request()))
            return answers

        clients = []
        for place in range(number):
            clients.append(asyncio.create_task(client()))
            if place % _TOGETHER == 0:
                await asyncio.sleep(0)  # the first are not to wait until the last has a connection
        return [*itertools.chain.from_iterable(await asyncio.gather(*clients))]


def measured(answers: list[Answer], seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Summarizes a load: rates, percentiles in milliseconds, and the answers within the bounds."""
    good = [a for a in answers if a.status == 200]
    within = [
        a
        for a in good
        if 1000 * a.first_s <= args.first_ms and 1000 * a.per_token_s <= args.token_ms
    ]

    def percentiles(values: list[float]) -> dict[str, float]:
        points = np.percentile(values, PERCENTILES) if values else [float("nan")] * 3
        return {
            f"p{p}": round(1000 * float(x), 2) for p, x in zip(PERCENTILES, points, strict=True)
        }

    return {
        "requests": len(answers),
        "answered": len(good),
        "refused": sum(a.status == 429 for a in answers),
        "failed": sum(a.status not in (200, 429) for a in answers),
        "seconds": round(seconds, 2),
        "requests_s": round(len(good) / seconds, 3),
        "prompt_tokens_s": round(sum(a.prompt_tokens for a in good) / seconds, 1),
        "new_tokens_s": round(sum(a.new_tokens for a in good) / seconds, 1),
        "goodput_requests_s": round(len(within) / seconds, 3),
        "first_token_ms": percentiles([a.first_s for a in good]),
        "per_token_ms": percentiles([a.per_token_s for a in good if a.new_tokens > 1]),
        "whole_ms": percentiles([a.end_s for a in good]),
        "mean_new_tokens": round(statistics.fmean([a.new_tokens for a in good] or [0]), 1),
    }


@contextlib.contextmanager
def served(model: str, options: list[str]) -> Iterator[str]:
    """A server of this model in a process of its own; gives its address."""
    command = [sys.executable, "-m", "jaxinfra", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        showing = None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                # Replicas' own lines have their number before.
                if found := re.match(r"\S+ at (http\S+): ", line):
                    showing = threading.Thread(target=_show, args=(process.stdout,))
                    showing.start()
                    yield found.group(1)
                    break
            else:
                raise ConfigError(f"serving {model} ended with exit code {process.wait()}")
        finally:
            process.terminate()
            if showing is not None:
                showing.join()


def _show(lines: Iterable[str]) -> None:
    """Prints what a server says, which would wait for a reader otherwise."""
    for line in lines:
        print(line, end="", flush=True)


def reached(url: str, args: argparse.Namespace) -> Server:
    """The server at an address, and the model that it serves."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            model = json.loads(answer.read())["data"][0]["id"]
    except OSError as error:
        raise ConfigError(f"no server answers at {url} ({error}); start one") from error
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    return Server(
        host=host,
        port=parts.port or 80,
        model=model,
        api_key=args.api_key,
        num_ids=args.num_ids,
        streams=not args.whole,
    )


def run(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All loads, one after the other; prints a line of each."""
    server, rows = reached(url, args), []
    loads = [("requests/s", rate) for rate in args.rates]
    loads += [("clients", number) for number in args.concurrency]
    for place, (kind, value) in enumerate(loads):
        ahead = 1 + int(value) if kind == "clients" else 0
        load = Load(server, args, place=place, number=ahead)
        asyncio.run(asked(server, load.request()))  # the first call of a server finds caches empty
        begun = time.perf_counter()
        work = load.at_rate(value) if kind == "requests/s" else load.by_clients(int(value))
        answers = asyncio.run(work)
        row: dict[str, Any] = {"load": f"{value:g} {kind}", "kind": kind, "value": value}
        row |= measured(answers, time.perf_counter() - begun, args)
        if kind == "clients" and args.settle:
            start, end = begun + args.settle, begun + args.settle + args.seconds
            new = sum(a.new_between(start, end) for a in answers if a.status == 200)
            row["settled_new_tokens_s"] = round(new / args.seconds, 1)
            print(f"settled: {row['settled_new_tokens_s']} tokens/s for {args.seconds:g} s")
        rows.append(row)
        first, token = row["first_token_ms"], row["per_token_ms"]
        print(
            f"{row['load']:>14}: {row['new_tokens_s']:9.1f} tokens/s, {row['requests_s']:7.2f} "
            f"requests/s, good {row['goodput_requests_s']:7.2f}; first token p50/p95/p99 "
            f"{first['p50']:.0f}/{first['p95']:.0f}/{first['p99']:.0f} ms, per token "
            f"{token['p50']:.1f}/{token['p95']:.1f}/{token['p99']:.1f} ms; "
            f"{row['refused']} refused, {row['failed']} failed",
            flush=True,
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a run or a model directory, served here")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--api-key")
    parser.add_argument("--rates", type=float, nargs="+", default=[], metavar="R")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument(
        "--settle", type=float, default=0.0, metavar="S", help="seconds of clients before --seconds"
    )
    parser.add_argument(
        "--prompt-tokens", type=lambda t: Lengths(text=t), default=Lengths(text="128")
    )
    parser.add_argument("--new-tokens", type=lambda t: Lengths(text=t), default=Lengths(text="64"))
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that all begin with")
    parser.add_argument("--num-ids", type=int, default=256, help="prompts have ids below")
    parser.add_argument("--first-ms", type=float, default=1000.0, help="bound of goodput")
    parser.add_argument("--token-ms", type=float, default=50.0, help="bound of goodput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="answers are not streamed")
    parser.add_argument("--out", type=pathlib.Path, help="JSON, and a picture beside it")
    options = sys.argv[1:]
    at = options.index("--") if "--" in options else len(options)
    args = parser.parse_args(options[:at])
    args.serve = options[at + 1 :]
    if (args.model is None) == (args.url is None):
        parser.error("name a model, or --url of a server")
    if not args.rates and not args.concurrency:
        args.concurrency = [1, 8]
    return args


def main() -> None:
    args = arguments()
    where = served(args.model, args.serve) if args.url is None else contextlib.nullcontext(args.url)
    with where as url:
        rows = run(url, args)
    if args.out is not None:
        lengths = {"prompt": args.prompt_tokens.text, "new": args.new_tokens.text}
        bounds = {"first_ms": args.first_ms, "token_ms": args.token_ms}
        document = {
            "environment": environment(),
            "lengths": lengths,
            "bounds": bounds,
            "rows": rows,
        }
        args.out.write_text(json.dumps(document, indent=1) + "\n")
        draw(document, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    try:
        main()
    except JaxinfraError as error:
        sys.exit(f"bench serve: {error}")
