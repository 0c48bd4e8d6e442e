"""Examine this machine or a run: problems, and their remedies.

jaxinfra doctor                     GPUs, links, host, software and settings of this machine
jaxinfra doctor --record FILE       the same, and save the driver's answers to a file
jaxinfra doctor --answers FILE      examine such a recording
jaxinfra doctor data SOURCE         what a run cannot read of a source or a run, and what is odd
jaxinfra doctor checkpoint RUN      compare every checkpoint file with its SHA-256
jaxinfra doctor recorder RUN        the last events of every rank, and where it hung
"""

import argparse
import collections
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxinfra.checkpoint import directory_layout
from jaxinfra.checkpoint.directory_layout import verify
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.data import OWN_SOURCE, DataConfig, DataFormat
from jaxinfra.data.sources import scan
from jaxinfra.diagnostics.data_audit import audit
from jaxinfra.diagnostics.machine.examine import machine_findings
from jaxinfra.diagnostics.machine.finding import Finding, Grade, graded, headline, worst
from jaxinfra.diagnostics.machine.gpu import link_findings, measure_links
from jaxinfra.diagnostics.machine.nvml import LiveAnswers, RecordedAnswers
from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import read_json
from jaxinfra.runtime.recorder import describe_events, read_records
from jaxinfra.runtime.watchdog import REPORT, read_report

_OF_A_RUN = ("checkpoint", "data", "recorder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra doctor``."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=["machine", *_OF_A_RUN],
        default="machine",
        help="what to examine",
    )
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="run, or source of data")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs"),
        help="machine: directory of runs, whose disk is measured",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="machine: save answers")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="machine: examine a recording")
    parser.add_argument("--no-links", action="store_true", help="machine: skip measuring the links")
    parser.add_argument(
        "--text-field",
        metavar="NAME",
        help="data: field of rows that holds the text (default: the run's, or text)",
    )
    parser.add_argument(
        "--session",
        type=int,
        default=0,
        help="recorder: session, counted back from the last start (default: 0)",
    )
    parser.add_argument(
        "--last", type=int, default=20, help="recorder: events per rank (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Examines a machine or a run without changing it; returns 1 if something is wrong."""
    if args.what == "machine":
        return _machine(args)
    if args.run is None:
        raise ConfigError(f"doctor {args.what} needs a run directory: doctor {args.what} RUN")
    directory = RunDirectory(args.run)
    if args.what == "data":
        return _data(args, directory)
    directory.read_config()
    return _checkpoint(args, directory) if args.what == "checkpoint" else _recorder(args)


def _machine(args: argparse.Namespace) -> int:
    """Prints findings on GPUs, links, host, software and settings; returns 1 if one fails."""
    answers = None if args.answers is None else RecordedAnswers.read(args.answers)
    found = machine_findings(directory=args.directory, answers=answers, record=args.record)
    broken = any(each.subject == "XLA_FLAGS" and each.grade is Grade.FAIL for each in found)
    if answers is None and not args.no_links and not broken and jax.default_backend() == "gpu":
        found += link_findings(measure_links(LiveAnswers(), jax.local_devices()))
    return _show(found, as_json=args.json)


def _data(args: argparse.Namespace, directory: RunDirectory) -> int:
    """Prints unreadable and unusual documents of a run's training source or of a named source."""
    data = DataConfig(source=str(args.run))
    if directory.config_file.is_file():
        data = directory.read_config().data
        if data.source == OWN_SOURCE:
            raise ConfigError(
                f"{args.run}: a script gave the batches (jaxinfra.train(..., data=...)), or "
                "jaxinfra rl sampled them, so it has no source of documents; name one"
            )
    field = args.text_field or data.text_field
    text_field = field if data.format is DataFormat.TEXT else None  # others: rows as JSON
    refused: list[str] = []
    documents = (
        document
        for source in [each.source for each in data.mixture] or [data.source]
        for document in scan(source).documents(text_field=text_field, refused=refused)
    )
    found = audit(documents).findings()
    for each in refused:
        print(each, file=sys.stderr)
    unread = graded(
        "data: refused files and rows",
        f"{len(refused)}" + (", each named in a line above" if refused else ""),
        ok=not refused,
        rule="a run begins only if every file and row can be read",
        remedy="mend or remove each",
        otherwise=Grade.FAIL,
    )
    return _show([*found, unread], as_json=args.json)


def _show(found: Sequence[Finding], *, as_json: bool) -> int:
    """Prints findings; returns 1 if one fails."""
    if as_json:
        rows = [dataclasses.asdict(each) for each in found]
        first = {"grade": worst(found), "headline": headline(found)}
        print(json.dumps({**first, "findings": rows}, indent=1))
        return 1 if worst(found) is Grade.FAIL else 0
    print(headline(found))
    for each in found:
        print(f"{each.grade:7s}  {each.subject}: {each.value}")
        if each.remedy:
            print(f"         rule: {each.rule}\n         remedy: {each.remedy}")
    counts = collections.Counter(each.grade for each in found)
    print(", ".join(f"{counts[grade]} {grade}" for grade in Grade if counts[grade]))
    return 1 if worst(found) is Grade.FAIL else 0


def _recorder(args: argparse.Namespace) -> int:
    """Prints the ranks' recorded events; returns 1 if the watchdog ended the session."""
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
            f"from there: jaxinfra train --resume {shlex.quote(str(args.run))}"
        )
    older = [directory.checkpoints / directory_layout.step_name(step) for step in damaged]
    older = [path for path, step in zip(older, damaged, strict=True) if step < good[-1]]
    if older:
        print(f"nothing needs what is older and damaged: rm -r {shlex.join(map(str, older))}")
    return 1
