"""Which learning rate?

    python -m experiments.examples.learning_rate --steps 200 --out runs/rates

A short run at the preset's rate, at a quarter and a half of it, at two and four times it. What to
conclude: take the largest rate on the flat of the curve; short runs favour larger rates than long
ones do, so go one down for a run ten times as long.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

import jaxinfra

RATES = (2.25e-3, 4.5e-3, 9e-3, 18e-3, 36e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--set", action="append", default=[], help="settings of all runs")
    args = parser.parse_args()
    sizes = [f"training.steps={args.steps}", f"optimizer.warmup_steps={args.steps // 10}"]
    base = jaxinfra.override(jaxinfra.preset("tiny"), [*sizes, *args.set])
    losses = []
    for rate in args.rates:
        config = jaxinfra.override(base, [f"optimizer.learning_rate={rate}"])
        summary = jaxinfra.train(config, args.out / f"{rate:g}").result
        losses.append(summary["heldout_loss"])
        print(f"learning rate {rate:g}: held-out loss {losses[-1]:.4f}")
    best = min(zip(losses, args.rates, strict=True))[1]
    print(f"lowest held-out loss at {best:g}")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(args.rates, losses, marker="o")
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss, nats per token")
    axes.set_xticks(args.rates, [f"{rate:g}" for rate in args.rates])
    axes.minorticks_off()
    figure.savefig(args.out / "rates.png", dpi=150)


if __name__ == "__main__":
    main()
