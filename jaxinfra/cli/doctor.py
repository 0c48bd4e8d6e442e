"""What is wrong with a run, and what to do.

jaxinfra doctor checkpoint RUN      every file of every checkpoint against its SHA-256
"""

import argparse
import json
import time
from pathlib import Path

from jaxinfra.checkpoint import layout, verify
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=["checkpoint"])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Verifies every checkpoint; 1 where one is damaged. Changes nothing."""
    directory = RunDirectory(args.run)
    directory.read_config()
    steps = layout.steps(directory.checkpoints)
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
    set_aside = sorted((directory.checkpoints / layout.QUARANTINE).glob("step_*.json"))
    for note in set_aside:
        reasons = json.loads(note.read_text())["reasons"]
        print(f"set aside earlier: {note.with_suffix('')}: {'; '.join(reasons)}")
    if len(good) < len(steps):
        newest = f"step {good[-1]}" if good else "none of them"
        print(
            f"jaxinfra train --resume {args.run} would set the damaged ones aside and use {newest};"
            " copies of the named files from a backup would make them good again"
        )
        return 1
    return 0
