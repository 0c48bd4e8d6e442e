"""Do experts pay at equal active parameters?

    python -m experiments.examples.mixture --steps 400 --out runs/mixture

``tiny``, and ``tiny_moe``, of whose 8 experts a token passes 2 that are together as wide as the
other's mlp: equal steps, tokens and optimizer, two seeds each. What to conclude: experts pay where
the worse of their seeds is below the better of the dense ones, and their loads stay near even.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import jaxinfra

LOAD = "layers/expert_tokens/imbalance"
SMOOTH = 20  # steps of which the picture shows the mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/mixture"))
    parser.add_argument("--set", action="append", default=[], help="settings of all runs")
    args = parser.parse_args()
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for name, color in (("tiny", "C0"), ("tiny_moe", "C1")):
        bits, imbalance = [], []
        for seed in range(args.seeds):
            sizes = [f"training.steps={args.steps}", f"training.seed={seed}"]
            config = jaxinfra.override(jaxinfra.preset(name), [*sizes, *args.set])
            run = args.out / f"{name}-{seed}"
            summary = jaxinfra.train(config, run).result
            bits.append(summary["heldout_bits_per_byte"])
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if "loss" in line]
            imbalance += [line[LOAD] for line in steps[args.steps // 2 :] if LOAD in line]
            losses = np.convolve([line["loss"] for line in steps], np.ones(SMOOTH), "valid")
            label = name if seed == 0 else None
            axes.plot(np.arange(SMOOTH, args.steps + 1), losses / SMOOTH, color=color, label=label)
        each = ", ".join(f"{value:.4f}" for value in bits)
        print(f"{name}: {np.mean(bits):.4f} bits per byte of held-out text ({each})")
        if imbalance:
            print(
                f"the busiest expert of a layer has {np.median(imbalance):.2f} times the mean load"
            )
    axes.legend()
    axes.set(xlabel="step", ylabel=f"loss, nats per token, mean of {SMOOTH} steps")
    figure.savefig(args.out / "mixture.png", dpi=150)


if __name__ == "__main__":
    main()
