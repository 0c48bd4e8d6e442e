"""Faults 15-18: checkpoints that are damaged, cannot be written, or move to another mesh."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.faults.arena import (
    SAVE_EVERY,
    STEPS,
    Arena,
    incidents,
    injected,
    ledger,
    metrics,
    require,
    saved_steps,
    state_sums,
)
from jaxinfra.faults.verdict import fault
from jaxinfra.numerics.policy import POLICIES

_EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
_LAST = f"step_{STEPS:08d}"


def flip_a_bit(directory: Path, rng: random.Random) -> tuple[str, int, int]:
    """Flips one random bit of one file in a directory; returns the file, byte and bit."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
    file = rng.choices(files, weights=[path.stat().st_size for path in files])[0]
    at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
    _flip(file, at, bit)
    return file.relative_to(directory).as_posix(), at, bit


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


@fault(15, "a bit flips in a checkpoint")
def flipped_file(arena: Arena) -> str:
    """Requires 300 random bit flips in a checkpoint to be detected, and loading to fall back."""
    run = _copy(arena, "f15")
    seed = random.SystemRandom().randrange(2**32)
    rng, checkpoint = random.Random(seed), run / "checkpoints" / _LAST
    for number in range(300):
        file, at, bit = flip_a_bit(checkpoint, rng)
        problems = verify(run / "checkpoints", STEPS)
        require(problems, f"flip {number} (seed {seed}) of bit {bit} in {file}:{at} was not seen")
        _flip(checkpoint / file, at, bit)
    require(not verify(run / "checkpoints", STEPS), "flipped back, it does not verify")
    file, _, _ = flip_a_bit(checkpoint, rng)
    said = _falls_back(arena, "f15", file)
    return f"300 flips seen (seed {seed}); {said}"


def _largest_array(checkpoint: Path) -> Path:
    files = [path for path in (checkpoint / "arrays").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@fault(16, "a truncated or missing shard, empty metadata")
def damaged_files(arena: Arena) -> str:
    """Damages checkpoint files; requires the error to name them and the run to use an older one."""
    evidence = []
    for name in ("truncated", "missing", "empty"):
        checkpoint = _copy(arena, f"f16-{name}") / "checkpoints" / _LAST
        file = checkpoint / "metadata.json" if name == "empty" else _largest_array(checkpoint)
        match name:
            case "truncated":
                os.truncate(file, file.stat().st_size // 2)
            case "missing":
                file.unlink()
            case "empty":
                file.write_bytes(b"")
        named = file.relative_to(checkpoint).as_posix()
        evidence.append(f"{name}: {_falls_back(arena, f'f16-{name}', named)}")
    return "; ".join(evidence)


@fault(17, "no space, or an error, in a save")
def full_disk(arena: Arena) -> str:
    """Fails a save by a full disk; requires an alert, and training to continue."""
    evidence = []
    for number, name in ((28, "ENOSPC"), (5, "EIO")):
        run = f"f17-{name}"
        plan = injected("jaxinfra.checkpoint.arrays:Write.finish", "raise", number, call=2, rank=0)
        arena.run(run, arena.settings(), faults=[plan], restarts=0).require(0, "NOT SAVED")
        found = incidents(arena.directory / run, "not saved")
        require(len(found) == 1, f"incidents: {found}")
        require(os.strerror(number) in found[0]["text"], f"incident: {found[0]['text']}")
        steps = saved_steps(arena.directory / run)
        require(steps == [SAVE_EVERY, STEPS], f"saved steps are {steps}")
        evidence.append(f"{name}: {found[0]['text'][:150]}; {arena.require_same(run)}")
    return "; ".join(evidence)


@fault(18, "resumed by 4, then 2 processes, then on 8 devices of one", devices=8)
def other_shape(arena: Arena) -> str:
    """Resumes on other meshes; requires bitwise equal state after resharding, and data in order."""
    reference = arena.reference()
    run = arena.directory / "f18"
    _stop_at(arena, "f18", arena.settings(processes=4), call=4, processes=4)
    first = max(saved_steps(run))
    on_one = state_sums(run, first)
    resharded = _sums_on_eight(run, first)
    require(resharded == on_one, "on 8 devices a checkpoint is not what it is on one")
    _stop_at(arena, "f18", ["--resume", "--mesh", "fsdp=2"], call=4, processes=2)
    second = max(saved_steps(run))
    command = ["train", "--resume", str(run), "--mesh", "fsdp=8"]
    command += ["--cache", str(arena.directory / "cache")]
    with arena.start(command, run="f18-8", environment=_EIGHT) as job:
        job.end().require(0)
    require(ledger(run) == ledger(reference), "the ledgers of samples differ")
    worst = 0.0
    for got, want in zip(metrics(run), metrics(reference), strict=True):
        for name in {"loss", "heldout_loss"} & want.keys():
            worst = max(worst, abs(got[name] - want[name]) / abs(want[name]))
    # fp32 sums in another order differ by a few units in the last place a step, those of a narrower
    # compute dtype by a rounding.
    policy = RunDirectory(reference).read_config().precision.policy
    bound = max(1e-5, 2 * float(jnp.finfo(POLICIES[policy].compute).eps))
    require(worst < bound, f"a loss differs by {worst:.1e} of itself, bound {bound:.1e}")
    return (
        f"stopped at {first} and {second}; B: {len(on_one)} arrays of step {first}, saved by 4 "
        "processes, are the same on 1 and on 8 devices; L: the same ledger; losses differ by at "
        f"most {worst:.1e} of themselves"
    )


def _sums_on_eight(run: Path, step: int) -> dict[str, str]:
    """Returns ``state_sums`` of the state on 8 devices."""
    program = (
        "import json, sys; from pathlib import Path; from jaxinfra.config.mesh import MeshConfig;"
        "from jaxinfra.faults.arena import state_sums;"
        "print(json.dumps(state_sums(Path(sys.argv[1]), int(sys.argv[2]), MeshConfig(fsdp=8))))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(run), str(step)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **_EIGHT},
        capture_output=True,
        text=True,
        check=False,
    )
    require(ended.returncode == 0, ended.stderr[-1000:])
    return json.loads(ended.stdout)


def _stop_at(arena: Arena, run: str, command: list[str], *, call: int, processes: int) -> None:
    """Runs until one rank is asked to stop, in the ``call``-th step of this start."""
    plan = injected("jaxinfra.training.watch:Watch.send", "signal", 15, call=call, rank=1)
    arena.run(run, command, faults=[plan], processes=processes).require(75)


def _copy(arena: Arena, name: str) -> Path:
    """Copies the run without faults, as if it had been stopped before it ended."""
    run = shutil.copytree(arena.reference(), arena.directory / name, dirs_exist_ok=True)
    (run / "summary.json").unlink()
    return run


def _falls_back(arena: Arena, name: str, file: str) -> str:
    with arena.start(
        ["doctor", "checkpoint", str(arena.directory / name)], run=f"{name}-doctor", environment={}
    ) as job:
        ended = job.end()
    require(ended.code == 1 and file in ended.said, f"doctor said {ended.said[-1000:]}")
    before = STEPS - SAVE_EVERY
    ended = arena.run(name, ["--resume"], restarts=0)
    ended.require(0, f"resumed at step {before}", f"step {STEPS} ({file}")
    quarantine = list(
        (arena.directory / name / "checkpoints" / "quarantine").glob(f"{_LAST}-*.json")
    )
    require(len(quarantine) == 1 and file in quarantine[0].read_text(), "not in quarantine")
    return f"{file} named by doctor and at the start, resumed at step {before}; " + (
        arena.require_same(name)
    )
