"""Seconds from the command to a healthy server, with and without kept programs.

    python -m experiments.bench.serving.serve_start --models llama32_1b llama3_8b --out start.json

Each model is a directory of random weights in bf16, written first. A server is started twice with a
cache directory of its own: cold, and again. Both print their pool, programs and times.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.bench.environment import environment
from jaxinfra.checkpoint.tensor_files import write_tensor_files
from jaxinfra.config.precision import PolicyName
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.hf.config import to_hf_config
from jaxinfra.hf.mapping import weight_map
from jaxinfra.model.definition import define_model
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.model import find_model
from jaxinfra.quantize.recipes import DEFAULT_GROUP, config_of, quantization_recipe

_LIMIT_S = 560.0
_STD = 0.02  # of weights
_SPREAD = 80.0  # of their codes in e4m3, which end at 448: beyond 5 of it
_POOL = re.compile(r"KV cache of ([\d,]+) tokens")
_MADE = re.compile(r"programs are ready: (\d+) compiled, (\d+) kept")
_WHERE = re.compile(r" at (http://\S+):")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of a server: times from the command on, and what it printed."""

    model: str
    kind: str  # cold or again
    healthy_s: float
    first_token_s: float  # an answer of one token after the server is healthy
    whole_s: float | None  # all programs; None: not within the limit
    programs: int | None
    compiled: int | None
    pool_tokens: int


def measure(directory: pathlib.Path, cache: pathlib.Path, kind: str, options: list[str]) -> Start:
    """Starts a server, waits until it is healthy and has all programs, and stops it."""
    command = [sys.executable, "-m", "jaxinfra", "serve", str(directory), "--port", "0", *options]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    begun = time.monotonic()
    log = cache / f"{kind}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        where = _found(log, _WHERE, process, begun)
        address = where[1]
        _ask(f"{address}/health")
        healthy = time.monotonic() - begun
        body = {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
        _ask(f"{address}/v1/completions", body)
        answered = time.monotonic() - begun - healthy
        made = _found(log, _MADE, process, begun, is_needed=False)
        whole = time.monotonic() - begun if made else None
    except OSError as error:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        raise SystemExit(f"a request failed ({error}); the server:\n{log.read_text()}") from error
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    pool = _POOL.search(log.read_text())
    return Start(
        model=directory.name,
        kind=kind,
        healthy_s=round(healthy, 2),
        first_token_s=round(answered, 3),
        whole_s=whole and round(whole, 2),
        programs=int(made[1]) + int(made[2]) if made else None,
        compiled=int(made[1]) if made else None,
        pool_tokens=int(pool[1].replace(",", "")) if pool else 0,
    )


def _found(
    log: pathlib.Path,
    pattern: re.Pattern[str],
    process: subprocess.Popen[bytes],
    begun: float,
    *,
    is_needed: bool = True,
) -> Any:
    while time.monotonic() - begun < _LIMIT_S:
        found = pattern.search(log.read_text())
        if found:
            return found
        if process.poll() is not None:
            raise SystemExit(f"the server ended:\n{log.read_text()}")
        time.sleep(0.05)
    if is_needed:
        raise SystemExit(f"not within {_LIMIT_S:g} s:\n{log.read_text()}")
    return None


def _ask(url: str, body: dict[str, Any] | None = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def written(name: str, place: pathlib.Path, *, in_8_bits: bool = False) -> pathlib.Path:
    """Writes a preset with random weights as a Hugging Face directory: in bf16, or with projections
    as ``jaxinfra quantize --recipe w8a8-fp8`` writes them.
    """
    config = find_model(name).config
    policy = stored_as_computed(POLICIES[PolicyName.BF16])
    definition = define_model(config, execution_on(policy=policy))
    values = to_hf_config(config) | {"torch_dtype": "bfloat16"}
    weights = weight_map(values["model_type"], config, definition.arrays)
    dtype, code, scale = np.dtype(policy.compute), np.dtype("float8_e4m3fn"), np.dtype("float32")
    normal = np.random.default_rng(0).normal(0.0, 1.0, 1 << 24).astype(np.float32)
    block, codes = (_STD * normal).astype(dtype), (_SPREAD * normal).astype(code)

    def pieces(block: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        size = math.prod(shape)
        for start in range(0, size, block.size):
            yield block[: min(block.size, size - start)]

    tensors: dict[str, tuple[tuple[int, ...], np.dtype, Callable[[], Iterator[np.ndarray]]]] = {}
    for each, tensor in weights.tensors.items():
        shape = tensor.shape
        if in_8_bits and each.endswith("_proj.weight"):
            tensors[each] = (shape, code, functools.partial(pieces, codes, shape))
            of_rows = np.full((shape[0], 1), _STD / _SPREAD, scale)
            tensors[f"{each}_scale"] = (of_rows.shape, scale, functools.partial(iter, [of_rows]))
        else:
            tensors[each] = (shape, dtype, functools.partial(pieces, block, shape))
    if in_8_bits:
        recipe = quantization_recipe("w8a8-fp8", group=DEFAULT_GROUP)
        values["quantization_config"] = config_of(recipe, kept=["lm_head"])
    directory = place / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(values))
    _write_tokens(directory / "tokenizer.json", config.vocab_size)
    write_tensor_files(directory, tensors, max_shard_bytes=4 << 30)
    return directory


def _write_tokens(file: pathlib.Path, number: int) -> None:
    """Writes a tokenizer of this many tokens: bytes, and digits that no text is encoded as."""
    bytes_tokenizer().save(file)
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"{token:06d}": token for token in range(256, number - 1)}
    content["added_tokens"][0]["id"] = number - 1  # the separator comes last
    file.write_text(json.dumps(content))


def main() -> None:
    """Measures both starts of each model, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["llama32_1b", "llama3_8b"])
    parser.add_argument("--directories", nargs="*", default=[], type=pathlib.Path)
    parser.add_argument("--place", type=pathlib.Path, help="for the weights; default: a new one")
    parser.add_argument("--out", type=pathlib.Path)
    args, options = parser.parse_known_args()
    place = args.place or pathlib.Path(tempfile.mkdtemp())
    directories = [*args.directories, *(written(name, place) for name in args.models)]
    rows: list[dict[str, Any]] = []
    try:
        for directory in directories:
            cache = pathlib.Path(tempfile.mkdtemp())
            for kind in ("cold", "again"):
                rows.append(dataclasses.asdict(measure(directory, cache, kind, options)))
                print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(cache)
    finally:
        if args.out is not None:  # only now: asking for the device takes memory of it
            args.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
