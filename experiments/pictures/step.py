"""Draws docs/step.svg: where the milliseconds of the 1.2B step go, as traced and stored.

python -m experiments.pictures.step
"""

import json
import pathlib
from typing import Any

from matplotlib import rc_context

from jaxinfra.diagnostics.waterfall import Waterfall, draw

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments/results/step-h200.json"
PICTURE = ROOT / "docs/step.svg"


def stored(trace: dict[str, Any]) -> Waterfall:
    """A trace's JSON as the waterfall it was written from, without its single kernels."""
    return Waterfall(
        steps=trace["steps"],
        span_ms=trace["span_ms"],
        exposed_ms={(scope, kind): ms for scope, kind, ms in trace["exposed_ms"]},
        total_ms={},
        kernels=(),
        by_axis={},
    )


def main() -> None:
    """Draws our step."""
    document = json.loads(RESULTS.read_text())
    with rc_context({"svg.hashsalt": "jaxinfra", "svg.fonttype": "none"}):
        draw(stored(document["traces"]["ours"]), PICTURE)


if __name__ == "__main__":
    main()
