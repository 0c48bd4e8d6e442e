"""Do windows in every second layer cost quality?

    python -m experiments.examples.ablation --steps 200 --out runs/ablation

Two models that differ in one thing, three seeds each. What to conclude: where the error bars of
the curves overlap, the difference is within what the seed decides; more seeds or steps may tell.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import jaxinfra


def windowed(config: jaxinfra.RunConfig) -> jaxinfra.RunConfig:
    """Windows of 32 tokens in every second layer, from the first."""
    (stack,) = config.model.stacks
    flat = jaxinfra.Stack(pattern=stack.pattern * stack.repeats, repeats=1)  # layer by layer
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, stacks=(flat,)))
    windows = [f"model.stacks.0.pattern.{i}.mixer.window=32" for i in range(0, stack.repeats, 2)]
    return jaxinfra.override(config, windows)


def curve(config: jaxinfra.RunConfig, run: Path) -> tuple[list[float], float]:
    """Training losses, and the held-out loss."""
    summary = jaxinfra.train(config, run).result
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], summary["heldout_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    sizes = [f"training.steps={args.steps}", f"optimizer.warmup_steps={args.steps // 10}"]
    base = jaxinfra.override(jaxinfra.preset("tiny"), [*sizes, *args.set])
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for name, config in {"full": base, "windowed": windowed(base)}.items():
        runs = [
            curve(jaxinfra.override(config, [f"training.seed={seed}"]), args.out / f"{name}-{seed}")
            for seed in range(3)
        ]
        losses, heldout = np.array([run[0] for run in runs]), np.array([run[1] for run in runs])
        steps = np.arange(1, losses.shape[1] + 1)
        axes.errorbar(steps, losses.mean(0), losses.std(0), errorevery=max(args.steps // 20, 1))
        print(f"{name}: held-out loss {heldout.mean():.4f} +- {heldout.std(ddof=1):.4f}")
    axes.legend(["full", "windowed"])
    axes.set(xlabel="step", ylabel="loss, nats per token", title="mean of three seeds")
    figure.savefig(args.out / "ablation.png", dpi=150)


if __name__ == "__main__":
    main()
