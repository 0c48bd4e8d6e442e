"""What is wrong with a run, and what to do.

jaxinfra doctor checkpoint RUN      every file of every checkpoint against its SHA-256
jaxinfra doctor recorder RUN        what every rank did last, and where it was when a run hung
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from jaxinfra.checkpoint import directory_layout, verify
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.core.errors import ConfigError
from jaxinfra.core.files import read_json
from jaxinfra.reliability.recorder import describe_events, read_records
from jaxinfra.reliability.watchdog import REPORT, read_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=["checkpoint", "recorder"])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "--session", type=int, default=0, help="recorder: of how many starts ago (default: 0)"
    )
    parser.add_argument("--last", type=int, default=20, help="recorder: events a rank")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Looks at a run, and changes nothing; 1 where something is wrong."""
    directory = RunDirectory(args.run)
    directory.read_config()
    return _checkpoint(args, directory) if args.what == "checkpoint" else _recorder(args)


def _recorder(args: argparse.Namespace) -> int:
    """What the ranks recorded; 1 where the watchdog ended that session."""
    place = args.run / f"recorder.{args.session}" if args.session else args.run / "recorder"
    records = read_records(place)
    if not records:
        there = sorted(path.name for path in args.run.glob("recorder*"))
        raise ConfigError(f"{place} holds no recorder; there are {', '.join(there) or 'none'}")
    report = read_report(place)
    if args.json:
        shown = [dataclasses.asdict(record) for record in records]
        print(json.dumps({"report": report, "ranks": shown}))
        return 0 if report is None else 1
    for record in records:
        where = f"{record.phase} of step {record.step}"
        print(f"rank {record.rank} on {record.host}, process {record.pid}: {where}")
        for line in describe_events(record, last=args.last):
            print(f"    {line}")
    if report is not None:
        print(f"ended by the watchdog: {report}; all of it: {place / REPORT}")
        return 1
    return 0


def _checkpoint(args: argparse.Namespace, directory: RunDirectory) -> int:
    steps = directory_layout.steps(directory.checkpoints)
    if not steps:
        raise ConfigError(f"{args.run} has no checkpoint yet")
    found = {}
    for step in steps:
        began = time.perf_counter()
        problems = verify(directory.checkpoints, step)
        found[step] = (problems, time.perf_counter() - began)
    good = [step for step in steps if not found[step][0]]
    if args.json:
        print(
            json.dumps({step: [str(p) for p in problems] for step, (problems, _) in found.items()})
        )
        return 0 if len(good) == len(steps) else 1
    for step, (problems, seconds) in found.items():
        print(f"step {step}: {'DAMAGED' if problems else 'good'}  ({seconds:.2f} s)")
        for problem in problems:
            print(f"    {problem}")
    set_aside = sorted((directory.checkpoints / directory_layout.QUARANTINE).glob("step_*.json"))
    for note in set_aside:
        why = read_json(note, holds=dict[str, Any]).get("reasons")
        reasons = "; ".join(map(str, why)) if isinstance(why, list) else "not said"
        print(f"set aside earlier: {note.with_suffix('')}: {reasons}")
    if len(good) == len(steps):
        return 0
    print("copies of the named files from a backup would make the damaged ones good again")
    if not good:
        print("without them this run cannot go on: start another")
        return 1
    damaged = [step for step in steps if step not in good]
    if max(damaged) > good[-1]:
        print(
            f"without them, this sets aside what is damaged after step {good[-1]}, and goes on "
            f"from there: jaxinfra train --resume {args.run}"
        )
    older = [directory.checkpoints / directory_layout.step_name(step) for step in damaged]
    older = [path for path, step in zip(older, damaged, strict=True) if step < good[-1]]
    if older:
        print(f"nothing needs what is older and damaged: rm -r {' '.join(map(str, older))}")
    return 1
