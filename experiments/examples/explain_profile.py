"""Where does a step's time go?

    python -m experiments.examples.explain_profile RUN    # trained with --profile 20:23
    python -m experiments.examples.explain_profile        # the example that ships: four H200s

Reads a profile and prints what delays a step, the longest first. What to conclude: a collective
counts only where nothing hides it, so its share is what a better overlap could win at most; "idle"
is time in which no kernel ran, which larger batches or an unrolled loop over layers reduce.
"""

import argparse
import json
from pathlib import Path

import jaxinfra
from jaxinfra.diagnostics.waterfall import EXAMPLE, Waterfall, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--picture", type=Path, help="draw it there")
    args = parser.parse_args()
    found = (
        jaxinfra.trace(args.run) if args.run else Waterfall.of_json(json.loads(EXAMPLE.read_text()))
    )
    print(f"{found.span_ms:.2f} ms per step")
    for kind, ms in sorted(found.by_kind().items(), key=lambda item: -item[1]):
        print(f"{kind:12s} {ms:6.2f} ms {ms / found.span_ms:6.1%}")
    for axes, time in found.by_axis.items():
        print(f"over {axes}: {time.exposed_ms:.2f} ms exposed, {time.hidden_ms:.2f} hidden")
    if args.picture is not None:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
