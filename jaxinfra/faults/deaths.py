"""Faults 1-9 and 21-23: processes that die, stop on a signal, hang, or never start."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint import directory_layout
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.faults.arena import (
    SAVE_EVERY,
    STEPS,
    Arena,
    RunningJob,
    injected,
    record_of,
    require,
    saved_steps,
)
from jaxinfra.faults.verdict import fault
from jaxinfra.runtime.recorder import read_record, record_file
from jaxinfra.runtime.watchdog import REPORT, TRIP

# Once a step, after it was handed to the devices.
_SEND = "jaxinfra.training.watch:Watch.send"
_GRACE_S = 120.0  # the most that a stop may take, on a busy machine


def _kill_at(target: str, *, rank: int, call: int) -> dict[str, Any]:
    return injected(target, "signal", signal.SIGKILL.value, call=call, rank=rank, attempt=0)


def _kill_in_step(arena: Arena, run: str, *, rank: int) -> dict[str, Any]:
    """Kills a rank in step 7, or later where a slow disk has not finished step 4's checkpoint."""
    saved = arena.directory / run / "checkpoints" / directory_layout.step_name(SAVE_EVERY)
    return _kill_at(_SEND, rank=rank, call=7) | {"once": str(saved)}


def _hold(arena: Arena, run: str, *, rank: int, step: int) -> dict[str, Any]:
    """Returns a fault that holds the rank in a step until ``_release``."""
    gate = str(_gate(arena, run))
    return injected(_SEND, "sleep", call=step, rank=rank, attempt=0, once=gate)


def _release(arena: Arena, run: str) -> None:
    _gate(arena, run).touch()


def _gate(arena: Arena, run: str) -> Path:
    return arena.directory / f"{run}.go"


def _wait_until_in(job: RunningJob, *, rank: int, phase: str, step: int) -> None:
    def is_there() -> bool:
        record = read_record(record_file(job.run / "recorder", rank))
        return record is not None and (record.phase, record.step) == (phase, step)

    job.wait_until(is_there, f"{phase} of rank {rank} in step {step}")


def _survives_kill(arena: Arena, run: str, plan: dict[str, Any]) -> str:
    ended = arena.run(run, arena.settings(), faults=[plan])
    rank = plan["rank"]
    ended.require(0, f"rank {rank} was ended by SIGKILL (exit 137) first")
    require(
        f"resumed at step {SAVE_EVERY}" in ended.said,
        f"it did not go on from step {SAVE_EVERY}: {ended.said[-1500:]}",
    )
    left = [path.name for path in (arena.directory / run / "checkpoints").glob("step_*.*")]
    require(not left, f"a killed save left {left}")
    return f"rank {rank} named, resumed at step {SAVE_EVERY}; {arena.require_same(run)}"


@fault(1, "SIGKILL of a worker in mid-step")
def kill_worker(arena: Arena) -> str:
    """Kills a worker at step 7; requires a resume from the checkpoint of step 4."""
    return _survives_kill(arena, "f1", _kill_in_step(arena, "f1", rank=1))


@fault(2, "SIGKILL of process 0")
def kill_first(arena: Arena) -> str:
    """Kills rank 0, the job's coordinator, and requires what ``kill_worker`` requires."""
    return _survives_kill(arena, "f2", _kill_in_step(arena, "f2", rank=0))


@fault(3, "SIGKILL during an asynchronous save")
def kill_in_save(arena: Arena) -> str:
    """Kills a rank during the second checkpoint save, and requires later saves to work."""
    plan = _kill_at("jaxinfra.checkpoint.arrays:Write.finish", rank=1, call=2)
    evidence = _survives_kill(arena, "f3", plan)
    return _require_all_saved(arena, "f3") + evidence


@fault(4, "SIGKILL between data and commit marker")
def kill_before_commit(arena: Arena) -> str:
    """Kills a rank before the second checkpoint's commit; requires a resume from the first."""
    plan = _kill_at("jaxinfra.checkpoint.directory_layout:commit", rank=0, call=2)
    evidence = _survives_kill(arena, "f4", plan)
    return _require_all_saved(arena, "f4") + evidence


def _require_all_saved(arena: Arena, run: str) -> str:
    steps = saved_steps(arena.directory / run)
    require(steps[-1] == STEPS and STEPS - SAVE_EVERY in steps, f"saved steps are {steps}")
    return f"saves after it {steps}; "


@fault(5, "SIGTERM to one rank")
def stop_one(arena: Arena) -> str:
    """Sends one rank a stop signal; requires all ranks to save one step and exit with 75."""
    held = _hold(arena, "f5", rank=1, step=6)
    with arena.launch("f5", arena.settings(), faults=[held]) as job:
        _wait_until_in(job, rank=1, phase="step", step=6)
        os.kill(job.pid_of(1), signal.SIGTERM)
        _release(arena, "f5")
        began = time.monotonic()
        ended = job.end()
        took_s = time.monotonic() - began
    ended.require(75)
    require(took_s < _GRACE_S, f"it took {took_s:.0f} s")
    ranks = _report(job.run)[-1]["ranks"]
    require(set(ranks.values()) == {75}, f"exit codes {ranks}")
    step = max(saved_steps(job.run))
    ended.require(75, f"stopped by SIGTERM at step {step}, saved")
    arena.run("f5", ["--resume"]).require(0)
    return f"all exit 75 after {took_s:.1f} s with step {step} saved; {arena.require_same('f5')}"


@fault(6, "SIGTERM during warm-up, compilation, a data stall and evaluation")
def stop_at_any_time(arena: Arena) -> str:
    """Stops one rank at several moments; requires the run to resume equally from each."""
    # The phase of each moment, and the call that the signal comes in, or that does not return.
    moments = {
        "warm-up": ("setup", "jaxinfra.training.run_data:open_corpora", 1),
        "compilation": ("compile", "jaxinfra.training.loop:same_program", 1),
        "a data stall": ("input", "jaxinfra.data.train_iterator:TrainIterator.__next__", 3),
        "evaluation": ("evaluate", "jaxinfra.training.loop:evaluate_sets", 1),
    }
    seen = []
    for moment, (phase, target, call) in moments.items():
        plans = [injected(target, "signal", signal.SIGTERM.value, call=call, rank=1)]
        if phase == "input":  # what is armed last acts first: the signal comes, the data do not
            plans.insert(0, injected(target, "sleep", 5, call=call, rank=1))
        if phase == "compile":  # where no handler of Python's runs, for longer than any grace
            plans = [injected(target, "sleep", 3600, call=call, rank=1, in_c=True)]
        command = [*arena.settings(), "--continue"]
        with arena.launch("f6", command, faults=plans, options=["--grace", f"{_GRACE_S:g}"]) as job:
            if phase == "compile":
                _wait_until_in(job, rank=1, phase=phase, step=1)
                os.kill(job.pid_of(1), signal.SIGTERM)
            ended = job.end()
        require(ended.code == 75, f"{moment}: exit {ended.code}: {ended.said[-1500:]}")
        asked_at = max(event.time for event in job.record_of(1).events if event.name == phase)
        took_s = ended.at - asked_at
        require(took_s < _GRACE_S, f"{moment}: it took {took_s:.0f} s")
        steps = saved_steps(arena.directory / "f6")
        done = f"step {steps[-1]} saved" if steps else "nothing to save"
        seen.append(f"{moment} ({done}, {took_s:.1f} s)")
        require(steps or phase in ("setup", "compile"), f"{moment}: nothing saved")
    arena.run("f6", ["--resume"]).require(0)
    return f"exit 75 at {', '.join(seen)}; {arena.require_same('f6')}"


@fault(7, "the grace expires in mid-save")
def grace_expires(arena: Arena) -> str:
    """Blocks a save beyond the grace period; requires the previous checkpoint to stay intact."""
    write = "jaxinfra.checkpoint.directory_layout:write_manifest"
    slow = injected(write, "sleep", 3600, call=2, rank=0)
    with arena.launch("f7", arena.settings(), faults=[slow], options=["--grace", "5"]) as job:
        job.wait_for_step(2 * SAVE_EVERY)
        partial = job.run / "checkpoints"
        job.wait_until(lambda: any(partial.glob("step_00000008.partial-*/arrays/*")), "the save")
        began = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        ended = job.end()
        took_s = time.monotonic() - began
    ended.require(137, "the grace of 5 s was not enough")
    require(took_s < 5 + 10, f"it took {took_s:.1f} s")
    require(saved_steps(job.run) == [SAVE_EVERY], f"saved steps are {saved_steps(job.run)}")
    problems = verify(job.run / "checkpoints", SAVE_EVERY)
    require(not problems, f"the checkpoint of step {SAVE_EVERY} is damaged: {problems}")
    arena.run("f7", ["--resume"]).require(0)
    return (
        f"killed {took_s:.1f} s after SIGTERM (exit 137), step {SAVE_EVERY} verifies; "
        f"{arena.require_same('f7')}"
    )


@fault(8, "SIGSTOP of a rank")
def halt_one(arena: Arena) -> str:
    """Suspends one rank; requires the job to name it within the heartbeat's limit plus 5 s."""
    heartbeat_s = 5.0
    command = arena.settings(f"reliability.heartbeat_s={heartbeat_s}")
    with arena.launch("f8", command, faults=[_hold(arena, "f8", rank=1, step=6)]) as job:
        _wait_until_in(job, rank=1, phase="step", step=6)
        os.kill(job.pid_of(1), signal.SIGSTOP)
        job.end().require(0)
    before = arena.directory / "f8" / "recorder.1"
    text = _report_of(before)
    require(text.startswith("rank 1 does not run"), f"the report says: {text}")
    took_s = _noticed_at(before) - record_of(before, 1).beat_time
    require(took_s <= heartbeat_s + 5, f"noticed {took_s:.1f} s after its last beat")
    same = arena.require_same("f8")
    return f"T: {took_s:.1f} s (heartbeat {heartbeat_s:g} s); W: {text}; {same}"


def _report_of(recorder: Path) -> str:
    """Returns the first line of the watchdog's report."""
    return (recorder / REPORT).read_text().splitlines()[0]


def _noticed_at(recorder: Path) -> float:
    return json.loads((recorder / TRIP).read_text())["time"]


@fault(9, "a live rank stuck before a collective")
def stuck_rank(arena: Arena) -> str:
    """Blocks one rank in a step; requires all ranks' stacks, the rank's name, and an abort."""
    hang_s = max(20.0, 5 * arena.longest_phase_s())
    plan = injected(_SEND, "sleep", 3600, call=7, rank=1, attempt=0)
    command = arena.settings(f"reliability.hang_s={hang_s}")
    arena.run("f9", command, faults=[plan]).require(0, "exit 74")
    before = arena.directory / "f9" / "recorder.1"
    text = _report_of(before)
    require("rank 1 is absent" in text, f"the report says: {text}")
    took_s = _noticed_at(before) - record_of(before, 1).since
    require(took_s <= hang_s + 5, f"noticed after {took_s:.1f} s")
    stacks = [(before / f"rank-{rank:05d}.stacks").read_text() for rank in range(arena.processes)]
    require(all("training/loop.py" in stack for stack in stacks), "not all stacks are there")
    require("faults.py" in stacks[1], f"rank 1's stack does not show where it is: {stacks[1]}")
    return (
        f"T: {took_s:.1f} s (bound {hang_s:g} s); W: {text}; stacks of {len(stacks)} ranks; "
        f"{arena.require_same('f9')}"
    )


@fault(21, "a missing rank, or a taken port, at the start")
def missing_rank(arena: Arena) -> str:
    """Starts a job without one rank; requires an error within 60 s that names that rank."""
    evidence = []
    port = _free_port()
    plain = {"JAXINFRA_COORDINATOR": f"127.0.0.1:{port}", "JAXINFRA_NUM_PROCESSES": "3"}
    words = [*arena.settings(processes=3), "--run", str(arena.directory / "f21")]
    began = time.monotonic()
    with (
        arena.start(words, run="f21-0", environment={**plain, "JAXINFRA_PROCESS_ID": "0"}) as zero,
        arena.start(words, run="f21-2", environment={**plain, "JAXINFRA_PROCESS_ID": "2"}) as two,
    ):
        for job in (zero, two):
            job.end().require(74, "process 1 of 3 did not come")
    took_s = time.monotonic() - began
    # Python and JAX are imported before the clock of the meeting starts.
    bound_s = 60 + 3 * arena.start_s()
    require(took_s < bound_s, f"it took {took_s:.0f} s, bound {bound_s:.0f} s")
    evidence.append(f"process 1 named by both others after {took_s:.0f} s, imports included")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        ended = arena.run("f21", arena.settings(), options=["--port", str(number)])
    ended.require(1, f"cannot listen on port {number}")
    require(ended.seconds < bound_s, f"it took {ended.seconds:.0f} s, bound {bound_s:.0f} s")
    evidence.append(f"taken port {number} named after {ended.seconds:.0f} s")
    return "; ".join(evidence)


@fault(22, "killed for memory")
def killed_for_memory(arena: Arena) -> str:
    """Kills a rank as the Linux out-of-memory killer would.

    A fake file for the cgroup's count of out-of-memory kills is incremented with the kill.
    """
    group = arena.directory / "memory-group"
    group.mkdir(exist_ok=True)
    events = group / "memory.events"
    events.write_text("oom 0\noom_kill 0\n")
    options = ["--memory-group", str(group)]
    held = _hold(arena, "f22", rank=1, step=6)
    with arena.launch("f22", arena.settings(), faults=[held], restarts=0, options=options) as job:
        _wait_until_in(job, rank=1, phase="step", step=6)
        events.write_text("oom 1\noom_kill 1\n")
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.end().require(137)
    text = _report(job.run)[-1]["text"]
    require("rank 1" in text and "killed it for host memory" in text, text)
    arena.run("f22", ["--resume"]).require(0)
    return f"exit 137, W: {text.split(';')[1].strip()}; {arena.require_same('f22')}"


@fault(23, "a normal end of 8 ranks", devices=8)
def normal_end(arena: Arena) -> str:
    """Lets a run end normally, and requires that no process aborts."""
    command = arena.settings("training.steps=4", processes=8)
    arena.run("f23", command, processes=8, restarts=0).require(0)
    ranks = _report(arena.directory / "f23")[-1]["ranks"]
    require(set(ranks.values()) == {0} and len(ranks) == 8, f"exit codes {ranks}")
    return f"exit codes {sorted(ranks.values())}"


def _report(run: Path) -> list[dict[str, Any]]:
    return json.loads((run.with_name(run.name + ".launch") / "report.json").read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
