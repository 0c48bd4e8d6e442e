"""Do pairs of answers teach a preference, without a reward model and without a reference?

    python -m experiments.copy.preferences --steps 30 --out runs/preferences

Trains a model, then shows it answers in pairs, the better one first (SimPO, Meng et al. 2024).
What to conclude: the share of pairs in order rises on pairs that it has not seen.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfra


def mean_log_probability(logits, targets, weights):
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.sum(each * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1.0)


@jaxinfra.part
def simpo(logits, targets, *, weights):
    """-log sigmoid(2 (better - worse) - 1) of rows 2i and 2i + 1, at each of their tokens."""
    better, worse = mean_log_probability(logits, targets, weights).reshape(-1, 2).T
    loss = -jax.nn.log_sigmoid(2.0 * (better - worse) - 1.0)
    return jnp.broadcast_to(jnp.repeat(loss, 2)[:, None], targets.shape)


def pairs(tokenizer, numbers):  # of an answer that repeats the number, and a vague one
    rows, weights = np.zeros((2 * len(numbers), 33), int), np.zeros((2 * len(numbers), 32))
    for row in range(len(rows)):
        asked = tokenizer.encode(f"size = {numbers[row // 2]}; count = ")
        answer = tokenizer.encode("some, perhaps" if row % 2 else f"{numbers[row // 2]}")
        both = np.concatenate([asked, answer])[:33]
        rows[row, : len(both)], weights[row, len(asked) - 1 : len(both) - 1] = both, 1.0
    return jaxinfra.batch_of(rows, weights=weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/preferences")
    parser.add_argument("--set", action="append", default=[])
    args, short = parser.parse_args(), ["training.steps=100", "optimizer.warmup_steps=10"]
    config = jaxinfra.override(jaxinfra.preset("tiny"), [*short, *args.set])
    jaxinfra.train(config, args.out)
    steps = jaxinfra.Steps(jaxinfra.customize(config, loss=simpo))
    tokenizer, state = jaxinfra.load(args.out).tokenizer, steps.restore(args.out)
    unseen = pairs(tokenizer, range(900, 916))
    for step in range(args.steps + 1):
        logits = steps.model(state)(unseen.tokens)
        found = mean_log_probability(logits, unseen.targets, unseen.weights)
        print(f"step {step}: {np.mean(found[::2] > found[1::2]):.2f} of unseen pairs in order")
        state, _ = steps(state, pairs(tokenizer, range(100 + 8 * step, 108 + 8 * step)))


if __name__ == "__main__":
    main()
