"""Thousands of requests, some of them bad, on one server: is anything wrong, lost or growing?

    python -m experiments.bench.serving.serve_endurance --requests 10000
    python -m experiments.bench.serving.serve_endurance --hybrid # a state beside attention

The gym's model is served by a process of its own. Clients ask for continuations of random lengths,
whole and as streams; a tenth go away within the stream, some send what is no request, some go away
before they are answered or in the middle of their own body. Every answer is compared with what
``generate`` gives the prompt alone. At the end nothing may be held, nothing have been compiled, and
the server's resident memory, read every few hundred requests, may not have grown.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from typing import Any

import numpy as np

from experiments.bench.environment import environment
from experiments.bench.serving.serve import events, served
from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.config.model import ModelConfig, stacked
from jaxinfra.config.recurrent import GatedDeltaConfig
from jaxinfra.errors import JaxinfraError
from jaxinfra.faults.servers import CONTEXT, POISON, SERVED_CONFIG, write_served_model
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.generate import generate
from jaxinfra.serving.load import load
from jaxinfra.serving.sampling import GREEDY

SERVER = ("--allow-nonfinite", "--max-running", "8", "--num-pages", "14", "--max-open", "14")
MOST_NEW = 24
SHARES = {"cancelled": 0.10, "malformed": 0.05, "disconnected": 0.05, "poisoned": 0.01}
_LOOKS = 40  # number of samples of the server's memory


def hybrid() -> ModelConfig:
    """The served model, with a layer of the gated delta rule before that of attention."""
    (attention,) = SERVED_CONFIG.blocks
    mixer = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
    delta = dataclasses.replace(attention, mixer=mixer)
    return dataclasses.replace(SERVED_CONFIG, stacks=stacked(delta, attention, num_layers=2))


class Wrong(JaxinfraError):
    """An answer that is not what it has to be."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt and its continuation, token by token."""

    ids: tuple[int, ...]
    tokens: tuple[int, ...]


def expected(model: pathlib.Path, number: int) -> tuple[list[Prompt], Any]:
    """Prompts of random lengths, half of them with one of few beginnings, and what follows."""
    rng = np.random.default_rng(1)
    beginnings = [rng.integers(97, 123, 40).tolist() for _ in range(4)]
    prompts = [
        (256, *beginnings[n % 4][: rng.integers(0, 41) * (n % 2)], *_letters(rng, 1, 40))
        for n in range(number)
    ]
    with nonfinite_allowed():
        loaded = load(model)
    rows = [[] for _ in prompts]
    requests = [
        GenerationRequest(prompt_ids=prompt, max_new_tokens=MOST_NEW, sampling=GREEDY)
        for prompt in prompts
    ]
    for place, progress in generate(loaded, requests):
        rows[place] += progress.tokens
    both = zip(prompts, rows, strict=True)
    return [Prompt(ids=ids, tokens=tuple(row)) for ids, row in both], loaded.tokenizer


def _letters(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(97, 123, rng.integers(low, high)).tolist()


class Clients:
    """Send requests of all kinds, and judge what they are answered."""

    def __init__(self, url: str, prompts: list[Prompt], tokenizer: Any, *, seed: int):
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port, self.url = int(port), url
        self.prompts, self.tokenizer = prompts, tokenizer
        self.rng = np.random.default_rng(seed)
        self.ends: collections.Counter[str] = collections.Counter()
        self.checked = self.refused = 0
        self.memory: list[tuple[int, int]] = []  # requests, resident bytes

    async def run(self, requests: int, number: int) -> None:
        """Sends ``requests`` requests, ``number`` clients at a time."""
        left = iter(range(requests))

        async def client() -> None:
            for at in left:
                if at % max(1, requests // _LOOKS) == 0:
                    series = await asyncio.to_thread(self.metrics)
                    self.memory.append((at, int(series["process_resident_memory_bytes"])))
                await self.one()

        await asyncio.gather(*(client() for _ in range(number)))

    async def one(self) -> None:
        """Sends one request of a random kind."""
        kind, drawn = "answered", self.rng.random()
        for name, share in SHARES.items():
            if 0 <= drawn < share:
                kind = name
            drawn -= share
        prompt = self.prompts[self.rng.integers(len(self.prompts))]
        new, is_stream = int(self.rng.integers(1, MOST_NEW + 1)), self.rng.random() < 0.5
        body = {
            "prompt": [*prompt.ids, POISON] if kind == "poisoned" else prompt.ids,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream or kind == "cancelled",
        }
        text = self._spoilt(body) if kind == "malformed" else json.dumps(body).encode()
        while True:
            status, came = await self.ask(text, kind=kind)
            if status != 429:
                break
            self.refused += 1
            await asyncio.sleep(0.05)
        self.judge(kind, status, came, prompt, new, is_stream=is_stream)
        self.ends[kind] += 1

    def _spoilt(self, body: dict[str, Any]) -> bytes:
        return [
            b'{"prompt": [97,',
            b"\xff\xfe\x00",
            json.dumps(body | {"prompt": [1] * (CONTEXT + 1)}).encode(),
            json.dumps(body | {"prompt": [POISON + 1]}).encode(),
            json.dumps(body | {"max_tokens": "many"}).encode(),
            json.dumps(body | {"best_of": 3}).encode(),
            json.dumps(body | {"n": 1000}).encode(),
            json.dumps({"prompt": ["a" * 10, 3]}).encode(),
        ][self.rng.integers(8)]

    async def ask(self, body: bytes, *, kind: str) -> tuple[int, list[Any]]:
        """The status and what came after it; (0, []) of one that did not wait for it."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
            )
            if kind == "disconnected":
                whole = self.rng.random() < 0.5
                writer.write(body if whole else body[: len(body) // 2])
                await writer.drain()
                await asyncio.sleep(float(self.rng.exponential(0.02)))
                return 0, []
            writer.write(body)
            status = int((await reader.readline()).split()[1])
            head = await reader.readuntil(b"\r\n\r\n")
            if b"text/event-stream" not in head:
                return status, [json.loads(await reader.read())]
            came = []
            async for event in events(reader):
                came.append(event)
                if kind == "cancelled" and len(came) == 2:
                    break
            return status, came
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def judge(
        self, kind: str, status: int, came: list[Any], prompt: Prompt, new: int, *, is_stream: bool
    ) -> None:
        """Raises Wrong where an answer is another one than it has to be."""

        def require(condition: object) -> None:
            if not condition:
                raise Wrong(f"{kind}: {status} {came} to {prompt} with {new} new tokens")

        if kind == "disconnected":
            return
        if kind == "malformed":
            require(status == 400 and came[0].get("error", {}).get("message"))
            return
        if kind == "poisoned":
            require(status == (200 if is_stream else 500))  # a stream has its status already
            require("not finite" in came[-1]["error"]["message"])
            return
        require(status == 200 and all("error" not in each for each in came))
        text = "".join(choice["text"] for each in came for choice in each["choices"])
        want = self.tokenizer.decode(prompt.tokens[:new])
        if kind == "cancelled":
            require(want.startswith(text))
        else:
            require(text == want)
            require(came[-1]["choices"][0]["finish_reason"] == "length")
        self.checked += 1

    def metrics(self) -> dict[str, float]:
        """The server's series, without labels; summed over them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        series: dict[str, float] = collections.defaultdict(float)
        for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            series[name] += float(value)
        return series


def judged(clients: Clients, requests: int) -> dict[str, Any]:
    """Result of the run, after the server had time to end abandoned requests."""
    deadline = time.monotonic() + 60
    while (series := clients.metrics())["vllm:num_requests_running"] and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    left = {
        name: series[name]
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "jaxinfra:late_compiles_total",
        )
    }
    if any(left.values()) or sum(clients.ends.values()) != requests:
        raise Wrong(f"at the end: {left}, {sum(clients.ends.values())} of {requests} requests")
    # The first fifth fills caches of Python and of the allocator.
    sizes = [size / 2**20 for at, size in clients.memory if at >= requests // 5]
    half = len(sizes) // 2
    return {
        "requests": requests,
        "ends": dict(sorted(clients.ends.items())),
        "texts_compared": clients.checked,
        "refused_then_repeated": clients.refused,
        "preemptions": series["vllm:num_preemptions_total"],
        "prefix_cache_hits": series["vllm:prefix_cache_hits_total"],
        "left": left,
        "resident_mib": {
            "first": round(clients.memory[0][1] / 2**20, 1),
            "after_a_fifth": round(sizes[0], 1),
            "last": round(sizes[-1], 1),
            "growth_between_halves": round(
                statistics.median(sizes[half:]) - statistics.median(sizes[:half]), 1
            ),
        },
        "memory": clients.memory,
    }


def run(
    requests: int,
    *,
    number: int = 16,
    prompts: int = 96,
    seed: int = 0,
    config: ModelConfig = SERVED_CONFIG,
) -> dict[str, Any]:
    """All of it; raises Wrong where something is."""
    with tempfile.TemporaryDirectory() as made:
        model = write_served_model(pathlib.Path(made) / "model", config)
        known, tokenizer = expected(model, prompts)
        with served(str(model), [*SERVER]) as url:
            clients = Clients(url, known, tokenizer, seed=seed)
            begun = time.monotonic()
            asyncio.run(clients.run(requests, number))
            seconds = time.monotonic() - begun
            return judged(clients, requests) | {"seconds": round(seconds, 1)}


def _cpu() -> str:
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hybrid", action="store_true", help="a model that also has a state")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    config = hybrid() if args.hybrid else SERVED_CONFIG
    result = run(args.requests, number=args.clients, seed=args.seed, config=config)
    told = {name: value for name, value in result.items() if name != "memory"}
    print(json.dumps(told, indent=1))
    if args.out is not None:
        here = {"cpu": _cpu(), "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        document = {"environment": environment() | here} | result
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except JaxinfraError as error:
        sys.exit(f"bench serve_endurance: {error}")
