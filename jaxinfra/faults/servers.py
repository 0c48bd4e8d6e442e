"""Servers of a tiny model to inject faults into, and a client that can misbehave."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from jaxinfra.checkpoint.finite import nonfinite_allowed
from jaxinfra.checkpoint.model_directory import write_ours
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.rope import RopeConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.faults.arena import Arena, RunningJob, require
from jaxinfra.model.definition import by_path, define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.injected_faults import VARIABLE

CONTEXT = 128
POISON = 257
"""A token beyond the tokenizer's, whose embedding is NaN: it is never sampled, but can be sent."""

SERVED_CONFIG = ModelConfig(
    vocab_size=258,
    model_dim=32,
    max_positions=CONTEXT,
    stacks=stacked(
        BlockConfig(
            mixer=GroupedAttentionConfig(
                num_q_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig()
            ),
            feed_forward=MlpConfig(hidden_dim=32),
        ),
        num_layers=1,
    ),
    tie_embeddings=False,
)
_LETTERS = slice(ord("a"), ord("z") + 1)
_LOUDER = 8.0  # what letters' logits are multiplied by: each token is then a character


def write_served_model(path: Path, config: ModelConfig = SERVED_CONFIG) -> Path:
    """Writes a tiny random model (fixed seed) with a byte tokenizer, for the faults' servers.

    Args:
        config: of a model with an embedding and an unembedding of 258 tokens.
    """
    definition = define_model(config, execution_on())
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda leaf: rng.normal(0.0, 0.4, leaf.shape).astype(leaf.dtype), definition.shapes
    )
    arrays["embedding"]["table"][POISON] = np.nan
    arrays["unembedding"]["table"][_LETTERS] *= _LOUDER
    beside = path.with_name(f"{path.name}-tokenizer")
    beside.mkdir(parents=True)
    bytes_tokenizer().save(beside / "tokenizer.json")
    with nonfinite_allowed():
        write_ours(
            LiveParameters(arrays=by_path(arrays)),
            definition,
            path,
            hf=None,
            tokenizer_directory=beside,
            dtype=None,
            max_shard_bytes=1 << 30,
        )
    return path


_SMALL = ("--max-running", "4", "--max-step-tokens", "64", "--allow-nonfinite")
_TIMEOUT_S = 240.0
# At the beginning of a line: replicas' own have their number before.
_ADDRESS = re.compile(r"^\w+ at (http\S+): ", re.MULTILINE)
_WRITING = threading.Lock()
PATH = "/v1/completions"
STEP = "jaxinfra.serving.engine.engine:Engine.step"
PROMPTS = ("once upon a time", "once upon another", "the mesh reads the data", "a")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A server's HTTP answer to a client."""

    status: int  # 0: the connection ended without an answer
    came: list[Any]  # the body, or the bodies of a stream's events
    headers: Mapping[str, str]
    is_whole: bool = True  # False for a stream that ended before its [DONE] event

    @property
    def text(self) -> str:
        """The text of the answer's first choice."""
        choices = [choice for each in self.came for choice in each.get("choices", ())]
        return "".join(choice["text"] for choice in choices if choice["index"] == 0)

    @property
    def error(self) -> str:
        """The answer's error message; empty if it has none."""
        found = [each["error"]["message"] for each in self.came if "error" in each]
        return found[-1] if found else ""


@final
class GymServer:
    """A running ``jaxinfra serve`` process, with a client for its requests."""

    def __init__(self, job: RunningJob, url: str):
        self.job, self.url = job, url
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)

    def ask(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        path: str = PATH,
        timeout_s: float = _TIMEOUT_S,
    ) -> Reply:
        """Sends one request and returns the whole answer.

        Args:
            timeout_s: longest wait for the next byte, in seconds.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            return _read(connection.getresponse())
        except (OSError, http.client.HTTPException):
            return Reply(status=0, came=[], headers={}, is_whole=False)
        finally:
            connection.close()

    def ask_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Sends all requests at once and returns their answers."""
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            return [*pool.map(self.ask, bodies)]

    def texts(self) -> list[str]:
        """Returns the server's answers to fixed prompts, sent one after another."""
        replies = [self.ask(body(prompt)) for prompt in PROMPTS]
        bad = [reply for reply in replies if reply.status != 200 or len(reply.text) < 20]
        require(not bad, f"the undisturbed server answered {bad[:1]}")
        return [reply.text for reply in replies]

    def send(
        self, body: Mapping[str, Any] | bytes, *, receive_buffer: int | None = None
    ) -> socket.socket:
        """Opens a connection and sends a request, without reading the answer.

        Args:
            receive_buffer: bytes of the connection's receive buffer; None: the system's default.
        """
        made = socket.socket()
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(_TIMEOUT_S)
        made.connect((self.host, self.port))
        if isinstance(body, bytes):
            made.sendall(body)
        else:
            data = json.dumps(body).encode()
            made.sendall(head(len(data)) + data)
        return made

    def series(self) -> dict[str, float]:
        """Reads the server's ``/metrics``: values by name, and by name and label, summed."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            for key in {name, *(f"{name} {x}" for x in re.findall(r'="([^"]*)"', labels))}:
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def wait_until_idle(self) -> dict[str, float]:
        """Waits until the server has no open request, and returns its metrics.

        Raises NotProvenError if KV cache pages are still in use then.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            series = self.series()
            is_open = [series[f"vllm:num_requests_{kind}"] for kind in ("running", "waiting")]
            if not any(is_open):
                break
            require(time.monotonic() < deadline, f"requests do not end: {is_open}")
            time.sleep(0.05)
        held = series["vllm:kv_cache_usage_perc"]
        require(held == 0, f"{held:.1%} of the pages are held, though no request is open")
        late = series["jaxinfra:late_compiles_total"]
        require(late == 0, f"{late:.0f} programs were compiled while requests waited")
        return series


@contextlib.contextmanager
def serving(
    arena: Arena, run: str, *options: str, faults: Sequence[Mapping[str, Any]] = ()
) -> Iterator[GymServer]:
    """Starts ``jaxinfra serve`` of the tiny model, and ends it when the ``with`` block ends."""
    model = arena.directory / "served"
    with _WRITING:
        if not model.exists():
            write_served_model(model)
    # Programs are compiled once for all of these servers.
    environment = {
        VARIABLE: json.dumps(list(faults)),
        "XDG_CACHE_HOME": str(arena.directory / "cache"),
    }
    words = ["serve", str(model), "--port", "0", *_SMALL, *options]
    with arena.start(words, run=run, environment=environment) as job:
        job.wait_until(lambda: _ADDRESS.search(job.said()) is not None, "address")
        found = _ADDRESS.search(job.said())
        assert found is not None
        yield GymServer(job, found.group(1))


def body(prompt: str | Sequence[int], *, new: int = 40, **settings: Any) -> dict[str, Any]:
    """Returns the body of a greedy request that always generates ``new`` tokens."""
    asked = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    return asked | settings


def head(length: int) -> bytes:
    """Returns the HTTP head of a request whose body has ``length`` bytes."""
    return (
        f"POST {PATH} HTTP/1.1\r\nHost: faults\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()


def drop(connection: socket.socket, *, reset: bool) -> None:
    """Closes a client's connection normally, or with a reset as a failing machine would."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_rest(connection: socket.socket) -> Reply:
    """Reads the rest of the server's answer from a connection that ``GymServer.send`` opened."""
    with connection:
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return _read(response)
        except (OSError, http.client.HTTPException):
            return Reply(status=0, came=[], headers={}, is_whole=False)


def _read(response: http.client.HTTPResponse) -> Reply:
    headers = {name.lower(): value for name, value in response.getheaders()}
    if "text/event-stream" not in headers.get("content-type", ""):
        text = response.read()
        try:
            came = [json.loads(text)]
        except ValueError:
            came = [{"not JSON": text.decode(errors="replace")}]
        return Reply(status=response.status, came=came, headers=headers)
    came, is_whole = [], False
    with contextlib.suppress(OSError, http.client.HTTPException):
        for line in response:
            if line.startswith(b"data: {"):
                came.append(json.loads(line.removeprefix(b"data: ")))
            is_whole = is_whole or line.startswith(b"data: [DONE]")
    return Reply(status=response.status, came=came, headers=headers, is_whole=is_whole)
