"""Does a model learn my data by adapters alone?

    python -m experiments.examples.fine_tune --steps 100 --out runs/fine-tune

Starts from a trained model (one is trained here where none is named), freezes it, and trains
adapters of rank 8 on other texts; prints the loss on these texts before and after. What to
conclude: the loss falls with a twentieth of the parameters trained; what adapters cannot reach,
training all weights (--all) shows.
"""

import argparse
import sys
from pathlib import Path

from jaxinfra.api.models import evaluate
from jaxinfra.cli.main import main as jaxinfra

OWN = "".join(
    f"Note {n}: the harvest of field {n % 7} was {n * 13 % 97} baskets.\n" for n in range(60)
)


def run(*words: object) -> None:
    """One jaxinfra command; ends the experiment where that fails."""
    print("\n$ jaxinfra", *words)
    if code := jaxinfra([str(word) for word in words]):
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/fine-tune"))
    parser.add_argument("--init", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--all", action="store_true", help="train all parameters")
    parser.add_argument("--set", action="append", default=[], help="settings of the first model")
    args = parser.parse_args()
    init, data = args.init or args.out / "base", args.data or args.out / "texts"
    if args.data is None:
        data.mkdir(parents=True)
        for number in range(8):
            (data / f"{number}.txt").write_text(OWN.replace("Note", f"Book {number}, note"))
    if args.init is None:
        settings = [f"--set={each}" for each in args.set]
        run("train", "tiny", "--steps", args.steps, "--run", init, "--no-sample", *settings)
    before = evaluate(init, data=str(data)).evaluation.loss
    start = ["train", "--init", init, "--data", data, "--steps", args.steps, "--no-sample"]
    start += ["--sequence-length", 64, "--set=data.heldout_fraction=0.25"]
    if not args.all:
        start += ["--lora", "rank=8,alpha=16,targets=query+value+up+down"]
    run(*start, "--run", args.out / "tuned")
    after = evaluate(args.out / "tuned", data=str(data)).evaluation.loss
    print(f"loss on these texts: {before:.4f} before, {after:.4f} after")


if __name__ == "__main__":
    main()
