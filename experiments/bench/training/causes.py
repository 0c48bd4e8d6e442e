"""Every cause that the gym makes happen, what is named first, and what its remedy wins here.

    python -m experiments.bench.training.causes --logs gym --out experiments/results/causes-cpu.json
    python -m experiments.bench.training.causes --page docs/causes.md --out RESULTS

The second writes the tables of a page from results that there are. With names only those are made
to happen, and take the place of the results' rows.
"""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

from experiments.bench.environment import environment
from jaxinfra.faults.arena import Arena
from jaxinfra.faults.cause_list import all_causes, all_healthy
from jaxinfra.faults.causes import check_health, judge_cause


def cause_table(rows: dict[str, Any]) -> list[str]:
    """Lines of Markdown: each cause of the list with what is in the results."""
    lines = ["| cause | made by | named first by | ms won: said, measured |", "|---|---|---|---|"]
    for name, each in all_causes().items():
        row = rows.get(name, {})
        who = f"`{each.command}`" if row.get("named") else f"no (`{each.command}`)"
        gains = [row.get(which) for which in ("predicted_ms", "measured_ms")]
        won = ", ".join("-" if ms is None else f"{ms:,.0f}" for ms in gains)
        lines.append(f"| {' | '.join([name, each.made, who, won])} |")
    return lines


def health_table(rows: dict[str, Any]) -> list[str]:
    """Lines of Markdown: each healthy state, and what was alarmed about."""
    lines = ["| healthy | what it is | looked at by |", "|---|---|---|"]
    for name, each in all_healthy().items():
        alarm = rows.get(name, {}).get("alarm", "not run")
        who = f"`{each.command}`" + (f", alarm: {alarm}" if alarm else "")
        lines.append(f"| {' | '.join([name, each.what, who])} |")
    return lines


def with_tables(page: str, rows: dict[str, Any]) -> str:
    """A page with its two tables written anew."""
    for begin, lines in (("cause", cause_table(rows)), ("healthy", health_table(rows))):
        table = re.compile(rf"^\| {begin} \|.*\n(\|.*\n)*", re.MULTILINE)
        (old,) = table.finditer(page)
        page = page[: old.start()] + "\n".join([*lines, ""]) + page[old.end() :]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="causes and healthy states (all)")
    parser.add_argument("--logs", type=Path, help="where runs and logs stay")
    parser.add_argument("--page", type=Path, help="write this page's tables, and run nothing")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {"rows": {}}
    rows = results["rows"]
    if args.page is not None:
        args.page.write_text(with_tables(args.page.read_text(), rows))
        return
    arena = Arena(args.logs.absolute(), options=(), processes=2)
    for name in args.names or [*all_healthy(), *all_causes()]:
        if name in all_causes():
            rows[name] = dataclasses.asdict(judge_cause(name, arena))
        else:
            rows[name] = {"alarm": check_health(name, arena)}
        print(json.dumps({"name": name, **rows[name]}), flush=True)
        there = environment() | {"cpu": _cpu(), "load": os.getloadavg()[0]}
        results = {"environment": there, "rows": rows}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return f"{os.cpu_count()} x {model}"


if __name__ == "__main__":
    main()
