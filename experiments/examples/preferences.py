"""Do pairs of answers teach a preference, with a reference model and without?

    python -m experiments.examples.preferences --steps 30 --out runs/preferences

Trains a model, then goes on from it three times on the same pairs of answers, an exact one before a
vague one: with DPO (Rafailov et al. 2023), SimPO (Meng et al. 2024) and ORPO (Hong et al. 2024).
What to conclude: the share of unseen pairs in order rises with all three; what the chosen answers
cost in bits shows which of them also keep to what the model wrote before.
"""

import argparse
import json
import random
from pathlib import Path

import jaxinfra


def write_pairs(file: Path, num: int = 400) -> Path:
    rng, lines = random.Random(0), []
    for _ in range(num):
        number = rng.randrange(100, 1000)
        row = {"prompt": f"size = {number}; count = ", "chosen": str(number)}
        lines.append(json.dumps(row | {"rejected": rng.choice(["some", "many", "a few"])}))
    file.write_text("\n".join(lines))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--set", action="append", default=[], help="settings of the first model")
    args, short = parser.parse_args(), ["training.steps=100", "optimizer.warmup_steps=10"]
    start = jaxinfra.override(jaxinfra.preset("tiny"), [*short, *args.set])
    jaxinfra.train(start, args.out / "start")
    pairs = write_pairs(args.out / "pairs.jsonl")
    for loss in ("dpo", "simpo", "orpo"):
        learned = jaxinfra.PreferenceConfig(loss=jaxinfra.PreferenceLoss(loss))
        config = jaxinfra.start_from(args.out / "start", preferences=learned)
        settings = {"training.steps": args.steps, "training.sequence_length": 128}
        settings |= {"data.source": pairs, "data.heldout_fraction": 0.1}
        settings |= {"optimizer.learning_rate": args.rate, "optimizer.warmup_steps": 0}
        config = jaxinfra.override(config, [f"{name}={x}" for name, x in settings.items()])
        found = jaxinfra.train(config, args.out / loss).result
        print(
            f"{loss}: {found['heldout_preferences/accuracy']:.2f} of unseen pairs in order, chosen "
            f"answers {found['heldout_preferences/chosen_nll']:.2f} nats per token"
        )


if __name__ == "__main__":
    main()
