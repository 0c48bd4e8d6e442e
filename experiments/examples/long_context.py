"""Is a sequence over four devices the same run?

    python -m experiments.examples.long_context --steps 20 --out runs/long

One run on one device, one with its sequences split over ``context=4``: every device holds a
quarter of the tokens, and keys travel round. What to conclude: losses agree to rounding, so the
axis changes how long a sequence may be, and nothing else. The bytes that it costs: jaxinfra plan.
"""

import argparse
import dataclasses
from pathlib import Path

import jax

import jaxinfra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("runs/long"))
    parser.add_argument("--set", action="append", default=[], help="settings of both runs")
    args = parser.parse_args()
    if len(jax.devices()) != 4:
        raise SystemExit("this needs four devices; without GPUs start with JAX_NUM_CPU_DEVICES=4")
    sizes = [f"training.steps={args.steps}", "optimizer.warmup_steps=0", "training.batch_size=2"]
    sizes.append(f"training.sequence_length={args.length}")
    base = jaxinfra.override(jaxinfra.preset("tiny"), [*sizes, *args.set])
    losses = []
    for name, mesh in {"one": {}, "four": {"context": 4}}.items():
        config = dataclasses.replace(base, mesh=jaxinfra.MeshConfig(**mesh))
        summary = jaxinfra.train(config, args.out / name).result
        losses.append(summary["final_loss"])
        print(f"{name}: final loss {losses[-1]:.6f}, {summary['tokens_per_s']:,.0f} tokens/s")
    print(f"difference {abs(losses[0] - losses[1]):.1e}")


if __name__ == "__main__":
    main()
