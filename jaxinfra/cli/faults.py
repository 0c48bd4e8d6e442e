"""Inject faults into small runs on this machine, and check what was lost.

jaxinfra faults --list
jaxinfra faults 1 9 13
jaxinfra faults --all --jobs 4
jaxinfra faults 1 2 -- small --data /texts --set model.stacks.0.repeats=2
jaxinfra faults --all -- --config runs/mine/config.json --set model.stacks.0.repeats=2

Options after -- describe a config of your own, as for jaxinfra train. This command chooses the
mesh and the number of steps; its own options come first. Without a config it trains a model of a
few thousand parameters on generated text. Jobs have 2 to 8
processes with one CPU device each, connected through the loopback. The exit code is 0 where every
fault passed. docs/faults.md explains each.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import time
from pathlib import Path

from jaxinfra.cli import train
from jaxinfra.cli.main import Parser
from jaxinfra.errors import ConfigError
from jaxinfra.faults import damage, deaths, own_config, replicas, serving, wrong_or_slow
from jaxinfra.faults.arena import Arena
from jaxinfra.faults.verdict import FAULTS, Verdict, judge
from jaxinfra.runtime.files import whole_number
from jaxinfra.runtime.signals import raised_signals

_LISTS = (deaths, wrong_or_slow, damage, serving, replicas)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra faults``."""
    parser.add_argument("--all", action="store_true", help="every fault")
    parser.add_argument("--list", action="store_true", help="list the faults, and stop")
    parser.add_argument("--logs", type=Path, help="runs and logs (default: faults/TIME)")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time (default: 1)")
    parser.add_argument("--json", action="store_true", help="verdicts as JSON lines")
    parser.add_argument(
        "words", nargs="*", metavar="FAULT", help="numbers of faults, then -- and options of train"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the requested faults and prints a verdict for each."""
    numbers = list(itertools.takewhile(str.isdecimal, args.words))
    options = args.words[len(numbers) :]
    if args.list:
        for number in sorted(FAULTS):
            print(f"{number:2d}  {FAULTS[number].title}")
        return 0
    unknown = [word for word in numbers if whole_number(word) not in FAULTS]
    if not args.all and not numbers:
        unknown = options[:1]
    if unknown or args.all == bool(numbers):
        what = f"no fault {unknown[0]!r}" if unknown else "name faults, or give --all"
        raise ConfigError(f"{what}; jaxinfra faults --list says which there are")
    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} must be at least 1")
    chosen = sorted(FAULTS) if args.all else [int(word) for word in numbers]
    if options:
        own_config.require_options(options)
        parser = Parser(prog="jaxinfra faults ... --", allow_abbrev=False)
        train.add_arguments(parser)
        config = train.config_of(parser.parse_args(options))
        own_config.require_runnable(config, chosen, jobs=args.jobs)
    place = _place(args)
    arena = Arena(place.absolute(), options=options, processes=2)
    failed = 0
    with raised_signals(), concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(judge, number, arena) for number in chosen]
        try:
            for done in concurrent.futures.as_completed(waiting):
                failed += not done.result().passed
                _show(done.result(), as_json=args.json)
        except KeyboardInterrupt:  # it has reached the jobs too; no other is to be started
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not args.json:
        print(f"{len(chosen) - failed} of {len(chosen)} faults passed; runs and logs in {place}")
    return 1 if failed else 0


def _place(args: argparse.Namespace) -> Path:
    place = args.logs or Path("faults") / time.strftime("%Y%m%d-%H%M%S")
    if place.exists() and any(place.iterdir()):
        raise ConfigError(f"{place} holds an earlier call's runs; choose another --logs")
    return place


def _show(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(verdict)), flush=True)
        return
    word = "pass" if verdict.passed else "FAIL"
    print(
        f"{word}  {verdict.number:2d}  {verdict.title}  ({verdict.seconds:.0f} s)\n"
        f"          {verdict.evidence}",
        flush=True,
    )
