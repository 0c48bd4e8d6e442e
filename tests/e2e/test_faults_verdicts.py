"""A verdict that cannot fail is worth nothing: each is shown a product that is broken in its place.

A copy of the packages is changed in one place, ``jaxinfra faults`` injects the fault that this
place answers, and must say FAIL, for that reason.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfra.faults import damage, deaths, replicas, serving, wrong_or_slow
from jaxinfra.faults.verdict import FAULTS

ROOT = Path(__file__).parents[2]
MODULES = (
    damage,
    deaths,
    replicas,
    serving,
    wrong_or_slow,
)  # they enter their faults when imported

# Fault: file, what it says, what the broken one says, and words of the evidence.
BREAKS = {
    1: (
        "training/start.py",
        "state=first_state(job) if restored is None else restored_state(job, restored),",
        "state=first_state(job),",
        "differs from the undisturbed run",
    ),
    2: (
        "runtime/supervisor.py",
        "self._command if number == 0 else self._again",
        "self._command",
        "exit 1, expected 0",
    ),
    3: (
        "checkpoint/directory_layout.py",
        "if _LEFTOVER.fullmatch(path.name))",
        "if False)",
        "a killed save left",
    ),
    4: (
        "checkpoint/checkpointer.py",
        'self._final.with_name(f"{self._final.name}.partial-{unique}")',
        "self._final",
        "it did not go on from step 4",
    ),
    5: (
        "training/loop.py",
        "if not processes.on_first(lambda: self._step in self._saver.steps()):",
        "if False:",
        "stopped by SIGTERM at step",
    ),
    6: (
        "training/loop.py",
        "                self._evaluate_and_save()  # what a stop or a kill left undone\n",
        "",
        "has other values",
    ),
    7: (
        "runtime/supervisor.py",
        "return 128 + signal.SIGKILL if any(end.killed_by_us for end in endings) else 0",
        "return 0",
        "exit 0, expected 137",
    ),
    8: (
        "runtime/watchdog.py",
        'gives no sign of life", [self._next]',
        'gives no sign of life", [self._recorder.rank]',
        "the report says",
    ),
    9: (
        "runtime/watchdog.py",
        "behind = min(places.values(), default=(0, 0))",
        "behind = max(places.values(), default=(0, 0))",
        "the report says",
    ),
    10: (
        "runtime/hashes.py",
        "return odd, len(common) > 1",
        "return [], False",
        "exit 0",
    ),
    11: (
        "training/step.py",
        "return jax.tree.map(lambda a, b: jnp.where(applies, a, b), new, before)",
        "return new",
        "'ranks': [0, 1]",
    ),
    12: ("training/watch.py", "    if loss != doubt.loss:\n", "    if True:\n", ""),
    13: (
        "runtime/hashes.py",
        "                if odd:\n",
        "                if False:\n",
        "0 incidents 'went back'",
    ),
    14: ("training/watch.py", "    if loss != doubt.loss:\n", "    if False:\n", ""),
    15: (
        "checkpoint/directory_layout.py",
        "    if digest == expected:\n",
        "    if True:\n",
        "was not seen",
    ),
    16: (
        "checkpoint/directory_layout.py",
        "for name in sorted(expected.keys() - actual.keys())",
        "for name in ()",
        "doctor said",
    ),
    17: (
        "training/loop.py",
        'self._watch.incident("not saved", step=step, text=str(error))',
        "raise",
        "exit 1",
    ),
    18: (
        "data/train_iterator.py",
        "return slice(process_index * rows, (process_index + 1) * rows)",
        "return slice(0, rows)",
        "",
    ),
    19: (
        "runtime/host_exchange.py",
        '"host_s": ("host"',
        '"host_s": ("input"',
        "named: [(1, 'input",
    ),
    20: (
        "runtime/host_exchange.py",
        '"input_s": ("input"',
        '"input_s": ("host"',
        "named: [(1, 'host",
    ),
    21: (
        "runtime/rendezvous.py",
        "absent = sorted(set(range(1, cluster.num_processes)) - here.keys())",
        "absent = []",
        "",
    ),
    22: ("runtime/supervisor.py", "if kills > kills_before:", "if kills < kills_before:", "rank 1"),
    23: (
        "runtime/rendezvous.py",
        "        jax.distributed.shutdown()\n",
        "        os._exit(jax.process_index() // 7)\n",
        "exit ",
    ),
    24: (
        "serving/http/service.py",
        "            if drawn:\n",
        "            if False:\n",
        "requests of 12 clients were cancelled",
    ),
    25: (
        "serving/http/start.py",
        "    if running.failure is not None:\n",
        "    if False:\n",
        "exit code 0, expected 1",
    ),
    26: (
        "serving/http/app.py",
        'headers = {"Retry-After": str(_RETRY_AFTER_S)}',
        "headers = {}",
        "429 without Retry-After",
    ),
    27: (
        "serving/http/service.py",
        "drawn[place] += len(progress.tokens)",
        "drawn[place] += len(progress.tokens) if sum(drawn.values()) < 80 else 1 // 0",
        "the slow client's stream did not end",
    ),
    28: (
        "serving/http/app.py",
        "_UNREADABLE = (400, 404, 405)",
        "_UNREADABLE = (404, 405)",
        "was answered 400",
    ),
    29: (
        "serving/engine/programs.py",
        "tokens_B = jnp.where(is_finite_B, drawn.ids_B, NO_TOKEN)",
        "tokens_B = jnp.maximum(drawn.ids_B, 0)",
        "was answered",
    ),
    30: (
        "serving/http/server.py",
        "await asyncio.to_thread(self._drain, self._drain_s)",
        "await asyncio.to_thread(self._drain, 0.0)",
        "not answered while it drained",
    ),
    31: (
        "serving/replicas/front.py",
        "_MOST_TRIES = 3",
        "_MOST_TRIES = 1",
        "neither whole nor told",
    ),
    32: (
        "serving/replicas/front.py",
        "            if misses == _LOOKS:\n",
        "            if False:\n",
        "neither whole nor told",
    ),
}


def test_every_fault_has_its_break():
    assert BREAKS.keys() == FAULTS.keys()
    for file, text, _, _ in BREAKS.values():
        assert (ROOT / "jaxinfra" / file).read_text().count(text) == 1, (file, text)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", sorted(BREAKS))
def test_the_verdict_fails_where_the_product_is_broken(tmp_path, number):
    file, text, other, words = BREAKS[number]
    for package in ("jaxinfra", "pallas_kernels"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    broken = tmp_path / "jaxinfra" / file
    broken.write_text(broken.read_text().replace(text, other))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", "jaxinfra", "faults", "--logs", str(tmp_path / "logs"), str(number)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 1, ended
    assert ended.stdout.startswith(f"FAIL  {number:2d}"), ended
    assert words in ended.stdout, ended
