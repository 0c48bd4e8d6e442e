"""Does a model learn a rule from its reward alone?

    python -m experiments.examples.reinforcement --out runs/reinforcement

Trains a small model on rows such as "271809>8", whose answer is one of the six digits by chance.
Then it learns from a reward alone that the answer is the largest. What to conclude: the reward
rises from 0.17 to over 0.9, whatever the seed.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import jaxinfra

LEARN = (
    "rl.kl=0.02 rl.max_new_tokens=2 rl.max_running=64 training.sequence_length=10 "
    "training.batch_size=256 training.log_every=25 optimizer.learning_rate=3e-3 "
    "optimizer.warmup_steps=0"
)


def write_rows(directory: Path) -> None:
    rng, prompts, rows = random.Random(0), [], []
    for _ in range(2000):
        digits = rng.sample("0123456789", 6)
        prompts.append({"prompt": "".join(digits) + ">", "answer": max(digits)})
        rows.append(prompts[-1] | {"completion": rng.choice(digits)})
    for name, lines in (("rows", rows), ("prompts", prompts)):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=125)
    parser.add_argument("--out", type=Path, default=Path("runs/reinforcement"))
    parser.add_argument("--set", action="append", default=[], help="settings of learning")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True)
    write_rows(args.out)
    start = jaxinfra.read_run_config(Path(__file__).with_suffix(".toml"))
    rows = [f"data.source={args.out / 'rows.jsonl'}"]
    jaxinfra.train(jaxinfra.override(start, rows), args.out / "start")
    for seed in args.seeds:
        rl = jaxinfra.RlConfig(prompts=str(args.out / "prompts.jsonl"), reward="exact_match")
        config = jaxinfra.start_from(args.out / "start", rl=rl)
        settings = [f"training.steps={args.steps}", f"training.seed={seed}", *args.set]
        jaxinfra.rl(
            jaxinfra.override(config, [*LEARN.split(), *settings]), args.out / f"seed-{seed}"
        )
        lines = (args.out / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["rl/reward"] for line in lines]
        print(f"seed {seed}: reward {rewards[0]:.2f} -> {sum(rewards[-5:]) / 5:.2f}")


if __name__ == "__main__":
    main()
