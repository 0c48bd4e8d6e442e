"""Corruptions of a file or a command line, applied before a command reads it."""

import contextlib
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import safetensors
import tokenizers

_VALUES: tuple[Any, ...] = (
    None, True, [], {}, [[]], "", "x", "\ud800", 0, -1, 1, 5, 1 << 40, 10**30, 1.5, 1e308, math.nan,
    math.inf, "9" * 400,
)  # fmt: skip


def spoil_json(text: str, rng: random.Random) -> str:
    """One value of a JSON text replaced, removed, doubled or nested."""
    values = json.loads(text)
    node, steps = values, rng.randrange(1, 8)
    parent: Any = None
    key: Any = None
    for _ in range(steps):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        parent, key = node, rng.choice(keys)
        node = parent[key]
        if not isinstance(node, dict | list):
            break
    if parent is None:
        return json.dumps(rng.choice(_VALUES))
    what = rng.randrange(4)
    if what == 0:
        del parent[key]
    elif what == 1:
        depth = rng.choice((3, 1000, 100_000))
        return json.dumps(values).replace(json.dumps(node), "[" * depth + "]" * depth, 1)
    elif what == 2 and isinstance(parent, dict):
        return json.dumps(values).replace("{", '{"' + str(key) + '": 0, ', 1)
    else:
        parent[key] = rng.choice(_VALUES)
    return json.dumps(values)


def spoil_file(path: Path, rng: random.Random) -> str:
    """Spoils a file in one way, and says which."""
    data = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        with contextlib.suppress(ValueError):
            path.write_bytes(spoil_json(data.decode(), rng).encode(errors="surrogatepass"))
            return "json"
    way = rng.choice(("flip", "cut", "grow", "empty", "gone", "folder", "link", "pipe", "lines"))
    if way == "flip" and data:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 20))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(changed))
    elif way == "cut":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif way == "grow":
        path.write_bytes(data + rng.randbytes(rng.randrange(1, 200)))
    elif way == "lines":
        lines = data.split(b"\n")
        rng.shuffle(lines)
        path.write_bytes(b"\n".join(lines))
    elif way == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "link":
            path.symlink_to(rng.choice(("/dev/zero", "/nowhere", str(path), "/etc/passwd")))
        elif way == "pipe":
            os.mkfifo(path)
    return way


def spoil_arguments(words: list[str], rng: random.Random) -> list[str]:
    """One word of a command line replaced, doubled or left out."""
    words = list(words)
    at = rng.randrange(1, len(words))
    word = words[at]
    if "=" in word:
        name = word.rpartition("=")[0]
        words[at] = f"{name}={rng.choice((json.dumps(rng.choice(_VALUES)), 'x', '', '1e99'))}"
    elif rng.random() < 0.5:
        words[at] = rng.choice(
            ("", "-1", "0", "999999999999", "nan", "1e20", "\x00", "--", "x" * 9999)
        )
    elif rng.random() < 0.5:
        del words[at]
    else:
        words.insert(at, word)
    return [each.replace("\x00", "?") for each in words]


def refused_by_reference(path: Path) -> bool:
    """Whether a format's own reader refuses a file; False where there is none."""
    if not path.is_file():
        return False
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.name == "tokenizer.json":
            tokenizers.Tokenizer.from_file(str(path))
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="np"):
                pass
    except BaseException:  # the tokenizers' panics are no Exceptions
        return True
    return False
