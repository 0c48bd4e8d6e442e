"""Faults 10-14, 19 and 20: processes that continue but compute wrongly or too slowly."""

import statistics
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.faults.arena import (
    Arena,
    incidents,
    injected,
    ledger,
    metrics,
    require,
    single_incident,
)
from jaxinfra.faults.verdict import fault

_BATCH = "jaxinfra.data.packing:PackedWindows.batch"
_STEP = "jaxinfra.training.loop:same_program"
_CORRUPTION = "jaxinfra.faults.corruption"
_WINDOW = 4  # losses before a spike can be told


@fault(10, "one rank compiles a different program")
def other_program(arena: Arena) -> str:
    """Gives one rank another program; requires the run to be refused before step 1."""
    plan = injected("jaxinfra.training.session:make_job", f"{_CORRUPTION}:other_program", rank=1)
    ended = arena.run("f10", arena.settings(), faults=[plan])
    named = "the program of the training step of rank 1"
    ended.require(1, named, "starting it again would not help")
    done = metrics(arena.directory / "f10")
    require(not done, f"steps were done: {done}")
    return f"W: {ended.line(named)}"


@fault(11, "NaN in one rank's gradient")
def not_a_number(arena: Arena) -> str:
    """Makes values NaN; requires the step to be skipped, and the rank and layer to be named."""
    step = 10
    plan = _poison(arena, step, rank=1, action=f"{_CORRUPTION}:poison_weights")
    arena.run("f11", arena.settings(), faults=[plan], restarts=0).require(0)
    found = single_incident(arena.directory / "f11", "not finite")
    require(found["step"] == step and found["ranks"] == [1], f"found {found}")
    require(found["tensors"] and "layer 0" in found["text"], f"found {found}")
    same = _require_like_excluded(arena, "f11", step)
    return f"W: step {step}: {found['text']}; {same}"


@fault(12, "a poison batch")
def poison_batch(arena: Arena) -> str:
    """Corrupts a batch; requires the run to roll back and to leave out exactly that batch."""
    step = 10
    action = f"{_CORRUPTION}:poison_targets"
    plans = [_poison(arena, step, rank=rank, action=action) for rank in range(arena.processes)]
    arena.run("f12", arena.settings(*_spike(arena)), faults=plans, restarts=0).require(0)
    _require_spike(arena, "f12", step, kind="batch excluded")
    found = single_incident(arena.directory / "f12", "batch excluded")
    require(found["step"] == step, f"found {found}")
    without = [entry[0] for entry in ledger(arena.directory / "f12") if not entry[-1]]
    require(without == [step], f"the ledger lacks the batches of steps {without}")
    same = _require_like_excluded(arena, "f12", step)
    return f"the ledger lacks samples {found['samples']} alone; {found['text']}; {same}"


@fault(13, "a bit flips in one replica's weights", devices=4)
def flipped_weight(arena: Arena) -> str:
    """Flips a weight's bit in one of four replicas; requires their comparison to name the rank."""
    plan = injected(_STEP, f"{_CORRUPTION}:flipping_step", rank=1, at=6)
    command = arena.settings(processes=4)
    arena.run("f13", command, faults=[plan], restarts=0, processes=4).require(0)
    back = single_incident(arena.directory / "f13", "went back")
    require(back["step"] == 8, f"seen at step {back['step']}, flipped at 6, compared every 4")
    found = single_incident(arena.directory / "f13", "transient fault")
    require(found["ranks"] == [1], f"found {found}")
    return f"W: {back['text']}; {found['text']}; {arena.require_same('f13', processes=4)}"


@fault(14, "a fault that passes spoils one step")
def transient(arena: Arena) -> str:
    """Corrupts one step's computation once; requires a repetition whose result is kept."""
    step = 10
    rare = RunDirectory(arena.reference()).read_config().model.vocab_size - 1
    plan = injected(_STEP, f"{_CORRUPTION}:poisoning_step", rank=1, at=step, token=rare)
    arena.run("f14", arena.settings(*_spike(arena)), faults=[plan], restarts=0).require(0)
    _require_spike(arena, "f14", step, kind="transient fault")
    found = single_incident(arena.directory / "f14", "transient fault")
    require(found["step"] == step, f"found {found}")
    require(not incidents(arena.directory / "f14", "batch excluded"), "a good batch was left out")
    return f"W: step {step}: {found['text']}; {arena.require_same('f14')}"


@fault(19, "200 ms more of work on one rank")
def slow_rank(arena: Arena) -> str:
    """Slows one rank; requires the run to name it within 50 steps."""
    plan = _slow(arena, "jaxinfra.training.job:Job.put")
    return _slow_is_named(arena, "f19", plan, cause="host")


@fault(20, "a starved loader on one rank; a loader's worker dies")
def starved(arena: Arena) -> str:
    """Starves the run of input; requires the verdict "input" and an end by the worker's error."""
    plan = _slow(arena, "jaxinfra.data.train_iterator:TrainIterator.__next__")
    named = _slow_is_named(arena, "f20", plan, cause="input")
    dead = injected(_BATCH, "raise", 5, call=7, rank=1)
    ended = arena.run("f20-dead", arena.settings(), faults=[dead], restarts=0)
    ended.require(1, "rank 1 failed (exit 1) first", "Input/output error")
    return f"{named}; the dead worker: {ended.line('rank 1 failed')}"


def _spike(arena: Arena) -> tuple[str, str]:
    """Returns settings of the loss-spike guard, a little above a run without faults."""
    ratios = _ratios(arena.reference())
    factor = 1.05 * max(1.0, *ratios.values())
    return f"reliability.spike_factor={factor:.4f}", f"reliability.spike_window={_WINDOW}"


def _ratios(run: Path) -> dict[int, float]:
    """Returns each step's loss over the median loss of the steps before it."""
    losses = {one["step"]: one["loss"] for one in metrics(run) if one.get("loss") is not None}
    return {
        step: loss / statistics.median([losses[step - back] for back in range(1, _WINDOW + 1)])
        for step, loss in losses.items()
        if all(step - back in losses for back in range(1, _WINDOW + 1))
    }


def _require_spike(arena: Arena, run: str, step: int, *, kind: str) -> None:
    """Requires a corrupted batch's loss to stand out, unless the guard noticed it."""
    if incidents(arena.directory / run, kind):
        return
    ratio, usual = _ratios(arena.directory / run)[step], _ratios(arena.reference())[step]
    require(
        ratio > 1.1 * usual,
        f"the spoilt batch's loss is {ratio:.3f} times the recent median, an undisturbed one's "
        f"{usual:.3f}: in {step} steps this config learns too little to be surprised; give it a "
        "higher --learning-rate here",
    )


def _slow(arena: Arena, target: str) -> dict[str, Any]:
    # On a busy machine a step takes seconds, and 200 ms are within what it varies by.
    laps = [record["step_s"] for record in metrics(arena.reference()) if record.get("step_s")]
    value = max(0.2, statistics.median(laps))
    return injected(target, "sleep", value, call=3, rank=1, until=1000)


def _slow_is_named(arena: Arena, run: str, plan: dict[str, Any], *, cause: str) -> str:
    settings = ["training.steps=20", "training.evaluate_every=20"]
    arena.run(run, arena.settings(*settings), faults=[plan], restarts=0).require(0)
    found = [(one["rank"], one["cause"]) for one in incidents(arena.directory / run, "slow rank")]
    require((1, cause) in found, f"named: {found or 'no rank'}")
    # Another cause may be true too: on a machine that is busy elsewhere any rank may be slow.
    slow = [one for one in incidents(arena.directory / run, "slow rank") if one["cause"] == cause]
    require(all(one["rank"] == 1 for one in slow), f"named: {found}")
    require(slow[0]["step"] <= 3 + 50, f"named at step {slow[0]['step']}")
    return f"W at step {slow[0]['step']}: {slow[0]['text']}"


def _poison(arena: Arena, step: int, *, rank: int, action: str) -> dict[str, Any]:
    """Returns a fault that corrupts the batch of a step whenever it is read."""
    config = RunDirectory(arena.reference()).read_config()
    size = config.training.batch_size
    samples = list(range((step - 1) * size, step * size))
    rare = config.model.vocab_size - 1
    return injected(_BATCH, action, rank=rank, samples=samples, token=rare)


def _require_like_excluded(arena: Arena, run: str, step: int) -> str:
    return arena.require_same(run, f"reliability.exclude_steps=[{step}]")
