"""Does a model learn a rule from its reward alone?

    python -m experiments.examples.reinforcement --out runs/reinforcement

Trains a small model on rows such as "7,2>4", whose answer is a random digit. Then it learns from a
reward that the answer is the larger one. What to conclude: the reward rises from 0.1 to over 0.9.
"""

import argparse
import json
import random
from pathlib import Path

import jaxinfra

LEARN = {
    "rl.max_new_tokens": 3,
    "rl.max_running": 64,
    "training.sequence_length": 8,
    "training.batch_size": 256,
    "training.log_every": 25,
    "optimizer.warmup_steps": 0,
    "optimizer.learning_rate": 5e-3,
}


def write_rows(directory: Path) -> None:
    rng = random.Random(0)
    prompts = [{"prompt": f"{n // 10},{n % 10}>", "answer": max(divmod(n, 10))} for n in range(100)]
    rows = [rng.choice(prompts) | {"completion": str(rng.randrange(10))} for _ in range(2000)]
    for name, lines in (("rows", rows), ("prompts", prompts)):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--out", type=Path, default=Path("runs/reinforcement"))
    parser.add_argument("--set", action="append", default=[], help="settings of learning")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    write_rows(args.out)
    start = jaxinfra.read_run_config(Path(__file__).with_suffix(".toml"))
    rows = [f"data.source={args.out / 'rows.jsonl'}"]
    jaxinfra.train(jaxinfra.override(start, rows), args.out / "start")
    for seed in args.seeds:
        rl = jaxinfra.RlConfig(prompts=str(args.out / "prompts.jsonl"), reward="exact_match")
        config = jaxinfra.start_from(args.out / "start", rl=rl)
        learn = LEARN | {"training.steps": args.steps, "training.seed": seed}
        settings = [*(f"{name}={value}" for name, value in learn.items()), *args.set]
        jaxinfra.rl(jaxinfra.override(config, settings), args.out / f"seed-{seed}")
        lines = (args.out / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["rl/reward"] for line in lines]
        print(f"seed {seed}: reward {sum(rewards[:5]) / 5:.2f} -> {sum(rewards[-5:]) / 5:.2f}")


if __name__ == "__main__":
    main()
