"""SIGINT and SIGTERM at sixty moments of a run, from its start as a process to its end."""

import concurrent.futures
import dataclasses
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import fast_compiling
import pytest
from e2e.runs import STEPS, Bench, assert_same_run

from jaxinfra.runtime.injected_faults import VARIABLE
from jaxinfra.runtime.signals import RESUMABLE_EXIT

INT, TERM = signal.SIGINT, signal.SIGTERM
_SPREAD_S = 20.0
# From a signal to the end: a second where nothing is held, else a step, an evaluation's batch and
# a save. All of them on cores that other tests share.
_BOUND_S = 15.0
# What a run has said when a phase begins.
PHASES = {
    "set-up": "parameters",
    "compilation": "documents",
    "first step": "compiled in",
    "step": "\nstep 3/",
    "save": ": saving",
    "evaluation": "\nstep 8/",
    "after evaluation": "held-out loss",
    "last steps": f"\nstep {STEPS - 1}/",
    "end": f"\nstep {STEPS}/",
    "summary": f"step {STEPS}: saving",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """When to signal: so long after the start, or after words were said."""

    number: signal.Signals
    after_s: float
    words: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a signalled process ended."""

    moment: Moment
    run: Path
    code: int
    took_s: float  # from the signal
    before: str  # what it had said by then
    said: str


def moments(rng: random.Random) -> list[Moment]:
    clock = [
        Moment(number=(INT, TERM)[number % 2], after_s=_SPREAD_S * (number + 1) / 40)
        for number in range(40)
    ]
    phases = [
        Moment(number=number, after_s=rng.uniform(0.0, 0.3), words=words)
        for words in PHASES.values()
        for number in (INT, TERM)
    ]
    return [*clock, *phases]


def signalled(bench: Bench, number: int, moment: Moment) -> Outcome:
    """A run whose steps take most of the time that the moments are spread over."""
    run, log = bench / f"run{number}", bench / f"run{number}.said"
    words = [str(word) for word in bench.new(run.name)]
    if number % 2:  # tokenizes and compiles anew
        words[words.index("--cache") + 1] = str(bench / f"cache{number}")
    pauses = {
        "target": "jaxinfra.data.packing:PackedWindows.batch",
        "samples": [8 * step for step in range(STEPS)],
        "action": "sleep",
        "value": 0.5,
    }
    environment = {
        "XLA_FLAGS": fast_compiling.FLAGS,
        "PYTHONUNBUFFERED": "1",
        VARIABLE: json.dumps([pauses]),
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            # A shell's background job ignores SIGINT, and so would its children until they begin.
            ["env", "--default-signal=INT", sys.executable, "-m", "jaxinfra", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
        with process:
            try:
                while moment.words not in log.read_text() and process.poll() is None:
                    time.sleep(0.01)
                time.sleep(moment.after_s)
                before = log.read_text()
                process.send_signal(moment.number)
                began = time.monotonic()
                code = process.wait(120)
            finally:
                process.kill()
    took_s = time.monotonic() - began
    said = log.read_text()
    return Outcome(moment=moment, run=run, code=code, took_s=took_s, before=before, said=said)


def is_obeyed(outcome: Outcome) -> bool:
    if outcome.code == 0:  # it came in the last step or later: the run ended as it would have
        is_last = f"\nstep {STEPS - 1}/" in outcome.before
        return (
            is_last and "loss picture" in outcome.said and (outcome.run / "summary.json").exists()
        )
    if outcome.code == RESUMABLE_EXIT:
        return f"stopped by {outcome.moment.number.name}" in outcome.said
    # Before this program's first line: Python itself is starting.
    return outcome.code == -outcome.moment.number and not outcome.said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_signals_are_obeyed_at_any_moment(bench, whole):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chosen = moments(random.Random(seed))
    assert len(chosen) == 60
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(signalled, [bench] * 60, range(60), chosen))
    wrong = [
        outcome
        for outcome in outcomes
        if not is_obeyed(outcome)
        or outcome.took_s > _BOUND_S
        or "Traceback" in outcome.said
        or "Exception ignored" in outcome.said
    ]
    assert not wrong, [(o.moment, o.code, round(o.took_s, 2), o.said[-200:]) for o in wrong]
    seconds = sorted(outcome.took_s for outcome in outcomes)
    codes = [outcome.code for outcome in outcomes]
    resumable = [outcome for outcome in outcomes if (outcome.run / "config.json").exists()]
    print(f"exit codes: { {code: codes.count(code) for code in sorted(set(codes))} }")
    print(f"seconds to the end: median {statistics.median(seconds):.2f}, most {seconds[-1]:.2f}")
    print(f"{len(resumable)} of 60 had begun a run")
    for outcome in resumable:
        ended = bench.run(bench.resume(outcome.run.name))
        assert ended.code == 0, (outcome, ended)
        assert_same_run(outcome.run, whole)
