"""Makes the table that ``implementation="auto"`` of flash attention follows, from measured rows.

python -m experiments.bench.kernels.attention_table experiments/results/attention-h200.json \\
    experiments/results/attention-sweep-h200.json
python -m experiments.bench.kernels.attention_table \\
    --left-out experiments/results/attention-h200.json \\
    experiments/results/attention-sweep-h200.json      # writes nothing

Files are those of ``attention`` and of ``attention_sweep``; of a case that
several have the last counts. Device and versions must be the same. With ``--left-out`` each shape
of the sweep is left out of the table, and what "auto" takes there is held beside the fastest.
"""

import argparse
import itertools
import json
import pathlib
import re
from typing import Any

from experiments.bench.kernels.attention_sweep import Shape, spread
from experiments.bench.tuned_table import Table, save
from pallas_kernels.common import device, tables
from pallas_kernels.flash_attention import dispatch

GRADIENT = {"fwd": False, "fwd+bwd": True}
"""Timed directions; the value says whether "auto" is asked for a gradient."""
_BATCH_AND_HEADS = re.compile(r"b(\d+) s\d+ h(\d+)/\d+ d\d+/\d+ \w+( window(\d+))?")


def table_of(*results: dict[str, Any]) -> Table:
    """The dispatch table of what several runs wrote.

    Raises:
        ValueError: a measurement ended early, so that rows may be missing, or runs differ in
            device or versions.
    """
    sources, rows = [], []
    for result in results:
        is_sweep = "runs" in result
        sources += result["runs"] if is_sweep else [result["environment"]]
        rows += _of_sweep(result) if is_sweep else _of_grid(result)
    for key in ("device", "versions"):
        if len(found := {json.dumps(source[key], sort_keys=True) for source in sources}) > 1:
            raise ValueError(f"runs differ in {key}: {', '.join(sorted(found))}; measure together")
    last = sources[-1]
    table = Table(
        op="flash_attention",
        question=dispatch.QUESTION,
        device_kind=last["device"],
        environment={
            "clocks": str(last["clocks"]),
            "command": " && ".join(dict.fromkeys(source["command"] for source in sources)),
            "date": last["date"],
            **last["versions"],
        },
        rows=(),
    )
    return table.with_rows(rows)


def _row(case: dict[str, Any], name: str, ms: float) -> tables.Row:
    return tables.Row.of(case=case, choice={"implementation": name}, ms=round(ms, 4))


def _of_grid(result: dict[str, Any]) -> list[tables.Row]:
    if result["failures"]:
        raise ValueError(f"measured in part only: {'; '.join(result['failures'])}; measure again")
    return [
        _row(
            _with_sizes(row) | {"gradient": GRADIENT[row["direction"]]},
            row["implementation"],
            row["ms"],
        )
        for row in result["rows"]
        if row["direction"] in GRADIENT and "ms" in row
    ]


def _with_sizes(row: dict[str, Any]) -> dict[str, Any]:
    """A case's fields, and those that older files have in its name alone."""
    fields, parts = row["fields"], _BATCH_AND_HEADS.match(row["case"])
    assert parts is not None, row["case"]
    batch, heads, window = int(parts[1]), int(parts[2]), parts[4]
    length = fields["kv_length"]
    return {
        "batch": batch,
        "heads": heads,
        "window": int(window) if window else length,
        **fields,
    }


def _of_sweep(result: dict[str, Any]) -> list[tables.Row]:
    return [
        _row(dispatch.case_of(Shape.of(row).call(), gradient=gradient), name, ms)
        for row in result["rows"]
        for direction, gradient in GRADIENT.items()
        for name, ms in row["ms"][direction].items()
    ]


def left_out(table: Table, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Leave-one-out check: speed of the choice of "auto" without a case's own row, over the
    fastest."""
    found: dict[str, list[tuple[float, str]]] = {}
    for row, (direction, gradient) in itertools.product(rows, GRADIENT.items()):
        if not (ms := row["ms"][direction]):
            continue
        case = dispatch.case_of(Shape.of(row).call(), gradient=gradient)
        others = tuple(each for each in table.rows if dict(each.case) != case)
        ranked = dispatch.rank(others, case)
        taken = next(name for name in (*ranked, *dispatch.UNMEASURED) if name in ms)
        found.setdefault(direction, []).append((min(ms.values()) / ms[taken], row["name"]))
    return {direction: spread(each) for direction, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=pathlib.Path, nargs="+")
    parser.add_argument("--folder", type=pathlib.Path, default=dispatch.TUNED)
    parser.add_argument("--left-out", action="store_true", help="say how well it foretells")
    args = parser.parse_args()
    results = [json.loads(path.read_text()) for path in args.measured]
    table = table_of(*results)
    if args.left_out:
        rows = [row for result in results if "runs" in result for row in result["rows"]]
        print(json.dumps(left_out(table, rows), indent=1))
        return
    slug = device.Facts(kind=table.device_kind, is_gpu=True).slug
    path = args.folder / f"{dispatch.QUESTION}-{slug}.json"
    save(table, path)
    print(f"{path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
