"""Makes the table that ``implementation="auto"`` of flash attention follows, from measured rows.

python -m experiments.bench.attention_table experiments/results/attention-h200.json
"""

import argparse
import json
import pathlib

from pallas_kernels.common import device, tables
from pallas_kernels.flash_attention import dispatch


def table_of(result: dict) -> tables.Table:
    """The dispatch table of what ``experiments.bench.attention --time`` wrote.

    Raises:
        ValueError: a measurement ended early, so that rows may be missing.
    """
    if result["failures"]:
        raise ValueError(f"measured in part only: {'; '.join(result['failures'])}; measure again")
    source = result["environment"]
    rows = [
        tables.Row.of(
            case=row["fields"],
            choice={"implementation": row["implementation"]},
            ms=round(row["ms"], 4),
        )
        for row in result["rows"]
        if row["direction"] == "fwd+bwd" and "ms" in row
    ]
    return tables.Table(
        op="flash_attention",
        question=dispatch.QUESTION,
        device_kind=source["device"],
        environment=(
            ("clocks", str(source["clocks"])),
            ("command", source["command"]),
            ("date", source["date"]),
            *source["versions"].items(),
        ),
        rows=tuple(rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measured", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=dispatch.TUNED)
    args = parser.parse_args()
    table = table_of(json.loads(args.measured.read_text()))
    slug = device.Facts(kind=table.device_kind, is_gpu=True).slug
    path = args.folder / f"{dispatch.QUESTION}-{slug}.json"
    tables.save(table, path)
    print(f"{path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
