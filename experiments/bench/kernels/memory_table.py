"""Makes the tables that ``implementation="auto"`` of softmaxes and norms follows.

python -m experiments.bench.kernels.memory_table \\
    DIR/memory-{bound-dtypes,bound-odd,random,bound}-h200.json

Of a row that several files have the last counts; device, clock, date and versions are the last
file's, commands all files'.
``--skip "softmax 4096x131072"`` leaves out a kernel that was wrong there or was changed after it
was measured: XLA computes it then.
"""

import argparse
import json
import pathlib
import re
from collections.abc import Collection, Sequence

from experiments.bench.kernels.memory_cases import OPS
from pallas_kernels.common import device, tables
from pallas_kernels.norm import api as norm
from pallas_kernels.rows import dispatch
from pallas_kernels.softmax import api as softmax

_ROW = re.compile(
    r"(?P<op>\S+)( (?P<dtype>float\d+))? (?P<rows>\d+)x(?P<columns>\d+) (?P<form>hopper|xla)"
)

FOLDERS = {"softmax": softmax.TUNED, "norm": norm.TUNED}


def read(paths: Sequence[pathlib.Path]) -> dict:
    """What several runs on one kind of device wrote as if one had; the last counts.

    Raises:
        ValueError: they ran on different devices or versions.
    """
    results = [json.loads(path.read_text()) for path in paths]
    for key in ("device", "versions"):
        if len(found := {json.dumps(each[key]) for each in results}) > 1:
            raise ValueError(f"runs differ in {key}: {', '.join(sorted(found))}; measure together")
    rows_by_name = {row["name"]: row for each in results for row in each["rows"]}
    commands = " && ".join(each["command"] for each in results)
    return results[-1] | {"command": commands, "rows": list(rows_by_name.values())}


def table_of(result: dict, op: str, skip: Collection[str] = ()) -> tables.Table:
    """The dispatch table of what ``memory_bound`` wrote, for one folder of ops.

    Raises:
        ValueError: a kernel's results were wrong, or other from call to call.
    """
    wrong = [
        row["name"]
        for row in result["rows"]
        if row["name"].startswith("check ")
        and not _is_skipped(row["name"].removeprefix("check "), skip)
        and "skipped" not in row
        and not (row.get("ok") and row.get("repeats"))
    ]
    if wrong:
        raise ValueError(f"wrong or unsteady results: {'; '.join(wrong)}; a table of them is void")
    names = {name for name, case in OPS.items() if case.folder == op}
    measured = []
    for row in result["rows"]:
        if _is_skipped(row["name"], skip):
            continue
        parts = _ROW.fullmatch(row["name"])
        if parts is None or parts["op"] not in names or "ms" not in row:
            continue
        name = parts["op"]
        case: dict[str, tables.Value] = {
            "form": name.removesuffix("_gradient"),
            "direction": "gradient" if name.endswith("_gradient") else "forward",
            "rows": int(parts["rows"]),
            "columns": int(parts["columns"]),
            "dtype": parts["dtype"] or "bfloat16",
        }
        choice = {"implementation": parts["form"]}
        measured.append(tables.Row.of(case=case, choice=choice, ms=row["ms"]))
    return tables.Table(
        op=op,
        question=dispatch.QUESTION,
        device_kind=result["device"],
        environment=(
            ("clocks", str(result["clocks"])),
            ("command", result["command"]),
            ("date", result["date"]),
            *result["versions"].items(),
        ),
        rows=tuple(measured),
    )


def _is_skipped(name: str, skip: Collection[str]) -> bool:
    return any(f"{name} ".startswith(f"{prefix} ") for prefix in skip)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("measured", type=pathlib.Path, nargs="+")
    parser.add_argument("--skip", nargs="*", default=(), help="rows whose names begin so")
    args = parser.parse_args()
    result = read(args.measured)
    for op, folder in FOLDERS.items():
        table = table_of(result, op, args.skip)
        slug = device.Facts(kind=table.device_kind, is_gpu=True).slug
        path = folder / f"{dispatch.QUESTION}-{slug}.json"
        tables.save(table, path)
        print(f"{path.name} of {op}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
