"""A job of two hosts, which are network namespaces here: who listens where, and who gets in."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import fast_compiling
import pytest
from e2e.runs import Bench, metrics

from jaxinfra.runtime.signals import RESUMABLE_EXIT

_PORT = 29571
_PATIENCE_S = 240
# Each host has an address that the job is given, and one that it is not.
_NAMED, _OTHER = ("10.77.0.1", "10.77.0.2"), ("10.78.0.1", "10.78.0.2")
# Says something on a connection, and prints what comes back.
_STRANGER = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as line:
        line.settimeout(8)
        line.sendall(bytes.fromhex(sys.argv[3]))
        print(line.recv(4096).hex())
except TimeoutError:
    print("silence")
except OSError as error:
    print(type(error).__name__)
"""


class Hosts:
    """Two namespaces that a cable joins."""

    def __init__(self, place: Path):
        unique = secrets.token_hex(3)
        self.names = [f"jx{unique}{letter}" for letter in "ab"]
        self._cables = [f"v{unique}{letter}" for letter in "ab"]
        self._files = place / "hosts"
        self._files.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} host{n}\n" for n, address in enumerate(_NAMED))
        )

    def make(self) -> None:
        one, two = self._cables
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", one, "type", "veth", "peer", "name", two)
        for number, (name, cable) in enumerate(zip(self.names, self._cables, strict=True)):
            _ip("link", "set", cable, "netns", name)
            for address in (_NAMED[number], _OTHER[number]):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for device in ("lo", cable):
                _ip("-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def start(self, host: int, words: list[str], *, log: Path, **environment: str):
        """A process on a host, whose name and whose peers' names mean what they do there."""
        there = (
            f"hostname host{host} && mount --bind {self._files} /etc/hosts && exec "
            f"{sys.executable} -m jaxinfra {' '.join(words)}"
        )
        with log.open("w") as said:
            return subprocess.Popen(
                [*self._on(host), "unshare", "--uts", "--mount", "sh", "-c", there],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )

    def say(self, address: str, port: int, data: bytes) -> str:
        """What a process on the second host is answered; the name of an error."""
        words = [sys.executable, "-c", _STRANGER, address, str(port), data.hex()]
        return subprocess.run(
            [*self._on(1), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    def listening(self, host: int) -> set[tuple[str, int]]:
        """Addresses and ports on which somebody listens there."""
        files = ("/proc/net/tcp", "/proc/net/tcp6")
        told = subprocess.run(
            [*self._on(host), "cat", *files], capture_output=True, text=True, check=True
        )
        found = set()
        for line in told.stdout.splitlines():
            fields = line.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                found.add((_spelled(address), int(port, 16)))
        return found

    def _on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _spelled(address: str) -> str:
    """An address of /proc/net/tcp, whose words are in the machine's order of bytes."""
    words = [address[at : at + 8] for at in range(0, len(address), 8)]
    found = ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


@pytest.fixture
def hosts(tmp_path) -> Iterator[Hosts]:
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and iproute2")
    made = Hosts(tmp_path)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield made
    finally:
        made.remove()


def until(condition, *, what: str, logs: list[Path]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        said = "\n".join(log.read_text()[-2000:] for log in logs if log.exists())
        assert time.monotonic() < deadline, f"{what}: {said}"
        time.sleep(0.2)


def greeting(token: str) -> bytes:
    said = {"greeting": "jaxinfra rendezvous 2", "process": 1, "of": 2, "token": token}
    return json.dumps(said).encode() + b"\n"


@pytest.mark.slow
def test_only_the_named_address_listens_and_strangers_get_nothing(hosts, bench: Bench):
    logs = [bench / "rank0.log", bench / "rank1.log"]
    words = [str(word) for word in bench.new("run", training__steps=100_000)]
    words += ["--mesh", "fsdp=2"]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": fast_compiling.FLAGS,
        "JAXINFRA_COORDINATOR": f"host0:{_PORT}",
        "JAXINFRA_NUM_PROCESSES": "2",
        "JAXINFRA_TOKEN": secrets.token_hex(16),
    }
    job: list[subprocess.Popen] = []

    def at_step(number: int) -> bool:
        ended = [process.poll() for process in job]
        assert ended == [None] * len(job), [log.read_text()[-2000:] for log in logs]
        lines = metrics(bench / "run") if (bench / "run" / "metrics.jsonl").exists() else []
        return bool(lines) and lines[-1]["step"] >= number

    def begin(rank: int) -> None:
        environment["JAXINFRA_PROCESS_ID"] = str(rank)
        job.append(hosts.start(rank, words, log=logs[rank], **environment))

    try:
        begin(0)
        met = (_NAMED[0], _PORT)
        until(lambda: hosts.listening(0), what="nobody listens", logs=logs)
        assert hosts.listening(0) == {met}
        assert hosts.say(_OTHER[0], _PORT, greeting("")) == "ConnectionRefusedError"
        for said in (greeting(""), greeting("guessed"), b"\xff\n", b"", secrets.token_bytes(512)):
            assert hosts.say(*met, said) in ("", "ConnectionResetError"), said
        begin(1)
        until(lambda: at_step(3), what="no step", logs=logs)
        for host in (0, 1):
            there = hosts.listening(host)
            assert {address for address, _ in there} == {_NAMED[host]}, there
        for address, port in sorted(hosts.listening(0) | hosts.listening(1)):
            if address == _NAMED[0]:
                for said in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(64), secrets.token_bytes(4096)):
                    hosts.say(address, port, said)
        reached = metrics(bench / "run")[-1]["step"]
        until(lambda: at_step(reached + 20), what="it stands still", logs=logs)
        for process in job:
            process.send_signal(signal.SIGTERM)
        ended = [process.wait(_PATIENCE_S) for process in job]
    finally:
        for process in job:
            process.kill()
            process.wait()
    said = [log.read_text() for log in logs]
    assert ended == [RESUMABLE_EXIT] * 2, said
    assert said[0].count(f"a stranger called from {_NAMED[1]} and was refused") == 5
    assert "Traceback" not in "".join(said)
