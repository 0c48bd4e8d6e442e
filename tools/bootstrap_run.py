"""Runs the tools of the set-up and turns their failures into one line that says what to do."""

from __future__ import annotations  # this file runs under any Python >= 3.8

import os
import pathlib
import re
import shutil
import subprocess
from typing import Mapping, Sequence

import bootstrap_index

_DISK_FULL = re.compile(r"No space left on device|os error 28\b|Disk quota exceeded", re.IGNORECASE)
_WRONG_HASH = re.compile(r"hash mismatch|do not match the hashes", re.IGNORECASE)
_NO_NETWORK = re.compile(
    r"error sending request|failed to fetch|failed to download|dns error|connection refused"
    r"|connection reset|NewConnectionError|ProxyError|SSLError|tls handshake|invalid peer cert"
    r"|name resolution|timed out|could not connect|no route to host|network is unreachable"
    r"|not a trusted or secure host",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(
    r"no matching distribution|could not find a version|no solution found|not found in the",
    re.IGNORECASE,
)


class SetupError(Exception):
    """What is wrong, the rule, the remedy: one line for the person who ran the set-up."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def disk_full(root: pathlib.Path) -> str:
    """The line for a full disk."""
    free = shutil.disk_usage(str(root)).free // 2**20
    return (
        f"the disk is full ({free} MiB free at {root}); the environment takes about 1.2 GiB, with "
        "CUDA 5 GiB, and uv's cache (UV_CACHE_DIR) may be on another disk; free some, run again"
    )


def _brief(line: str) -> str:
    """The cause in a line of pip or uv, without the Python object it happened in."""
    system_error = re.search(r"\[Errno -?\d+\] [\w ]+", line)
    return (system_error.group() if system_error else re.sub(r"^(cause|error): ", "", line))[:200]


def explain(output: str, doing: str, root: pathlib.Path, source: str = "") -> str:
    """The one line that says why `doing` failed, from what the tool printed.

    `source` is what it asked for files; by default the package index.
    """
    if _DISK_FULL.search(output):
        return disk_full(root)
    report = re.split(r"^\W*hint:", output, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.strip(" ×╰─▶├│\t") for line in report.splitlines()]
    lines = [line for line in lines if line and not line.startswith("[notice]")]
    index = bootstrap_index.describe(os.environ, pathlib.Path.home())
    if _WRONG_HASH.search(output):
        return (
            f"{doing}: {index} served a file other than the locked one; only what matches the "
            "hashes in tools/requirements/ is installed; ask whoever runs the index"
        )
    # The innermost cause comes last and says most.
    for pattern, rule in (
        (_NO_NETWORK, "cannot be reached"),
        (_NOT_FOUND, "lacks a locked version"),
    ):
        causes = [line for line in lines if pattern.search(line)]
        if causes:
            remedy = "another index in PIP_INDEX_URL or UV_DEFAULT_INDEX"
            return (
                f"{doing}: {source or index} {rule} ({_brief(causes[-1])}); check the network and "
                f"proxy, or name {'a mirror' if source else remedy}"
            )
    first = [line for line in lines if line.lower().startswith("error")][:1]
    said = list(dict.fromkeys(first + lines[-1:])) or ["it printed nothing"]
    return f"{doing}: {'; '.join(said)[:400]}"


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    root: pathlib.Path,
    *,
    doing: str,
    source: str = "",
) -> None:
    """Runs a tool in `root`, shows what it downloads, and raises the reason if it fails."""
    lines: list[str] = []
    with subprocess.Popen(
        list(command),
        env={**os.environ, **env},
        cwd=str(root),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith(("Downloading", "Prepared", "Installed")):
                    say("  " + line.strip())
        except BaseException:
            process.kill()  # interrupted: the tool must not go on in a folder we give up
            raise
    if process.returncode:
        output = "".join(lines)
        log = root / ".bootstrap" / "failure.log"
        log.write_text(f"$ {' '.join(command)}\n{output}", "utf-8")
        raise SetupError(
            explain(output, doing, root, source) + f" (all of it: {log.relative_to(root)})"
        )
