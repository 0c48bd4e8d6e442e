"""Do experts pay at equal active parameters?

    python -m experiments.examples.mixture --steps 400 --out runs/mixture

``tiny`` and ``tiny_moe`` for equal steps, tokens and optimizer, two seeds each. What to conclude:
experts pay where their worse seed is below the better dense one, and loads stay near even.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import jaxinfra

NAMES, SEEDS, LOAD = ("tiny", "tiny_moe"), (0, 1), "layers/expert_tokens/imbalance"


def steps_of(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def draw(out: Path) -> None:
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for seed in SEEDS:
        runs = [steps_of(out / f"{name}-{seed}") for name in NAMES]
        less = [routed["loss"] - dense["loss"] for dense, routed in zip(*runs, strict=True)]
        axes.plot(np.arange(20, len(less) + 1), np.convolve(less, np.ones(20) / 20, "valid"))
    axes.axhline(0.0, color="gray", linewidth=0.8)
    axes.legend([f"seed {seed}" for seed in SEEDS])
    axes.set(xlabel="step", ylabel="loss of tiny_moe less tiny's, mean of 20 steps")
    figure.savefig(out / "mixture.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="20 at least")
    parser.add_argument("--out", type=Path, default=Path("runs/mixture"))
    parser.add_argument("--set", action="append", default=[], help="settings of all runs")
    args = parser.parse_args()
    for name in NAMES:
        bits, loads = [], []
        for seed in SEEDS:
            sizes = [f"training.steps={args.steps}", f"training.seed={seed}", *args.set]
            run = args.out / f"{name}-{seed}"
            config = jaxinfra.override(jaxinfra.preset(name), sizes)
            bits.append(jaxinfra.train(config, run).result["heldout_bits_per_byte"])
            loads += [step[LOAD] for step in steps_of(run)[args.steps // 2 :] if LOAD in step]
        each = ", ".join(f"{value:.4f}" for value in bits)
        print(f"{name}: {np.mean(bits):.4f} bits per byte of held-out text ({each})")
        if loads:
            print(f"the busiest expert of a layer has {np.median(loads):.2f} times the mean load")
    draw(args.out)


if __name__ == "__main__":
    main()
