"""Whether the step learns as the plain-JAX step does: 200 steps on real text, seed by seed.

    python -m experiments.bench.step_curve                     # Llama-3.2-1B shapes, one GPU
    python -m experiments.bench.step_curve --preset tiny --steps 20 --length 64     # on a CPU

For each seed both start from the same weights and see the same text in the same order, so what
differs between them is rounding. Beside it stands what differs between seeds: weights and order.
Curves are compared as means over windows of steps, in nats a token.
"""

import argparse
import itertools
import json
import pathlib
import time
from collections.abc import Iterator

import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.step_programs import Program, ours, plain, without_rope_scaling
from jaxinfra.config.presets import MODELS
from jaxinfra.data.sources import scan
from jaxinfra.data.tokenizer import train_bpe
from jaxinfra.training.xla_options import parse_options

LEARNING_RATE = 3e-4
VOCABULARY = 8192  # ids that the text uses, of the model's
WINDOW = 10  # steps


def main() -> None:
    """Trains both sides from each seed, prints the comparison and writes the JSON."""
    parser = argparse.ArgumentParser(prog="jaxinfra bench step_curve", description=__doc__)
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--data", default="stdlib", help="a directory, a file, or stdlib")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--attention", default="auto")
    parser.add_argument(
        "--options", default="", metavar="SET", help="XLA's, of ours: name=value,..."
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    config = without_rope_scaling(MODELS[args.preset]())
    ids = tokens_of(args.data, vocab_size=min(VOCABULARY, config.vocab_size), args=args)
    sizes = {"batch": args.batch, "length": args.length, "learning_rate": LEARNING_RATE}
    programs = {
        "plain": plain(config, **sizes, remat="dots"),
        "ours": ours(
            config,
            **sizes,
            remat=args.remat,
            unroll=args.unroll,
            attention=args.attention,
            options=parse_options(args.options.split(",")) if args.options else None,
        ),
    }
    losses: dict[str, list[list[float]]] = {side: [] for side in programs}
    result = {"environment": environment(), "settings": vars(args) | {"out": None}}
    for seed in range(args.seeds):
        for side, program in programs.items():
            losses[side].append(train(program, ids, seed, args))
        if seed == 0:
            continue
        compared = compare(losses)
        print(compared, flush=True)
        if args.out:
            found = result | {"clocks_after": clocks(), **compared, "losses": losses}
            args.out.write_text(json.dumps(found, indent=1) + "\n")


def tokens_of(data: str, *, vocab_size: int, args: argparse.Namespace) -> np.ndarray:
    """As many ids of the text, one document after another, as the steps read."""
    needed = args.steps * args.batch * args.length + 1
    began = time.perf_counter()
    source = scan(data)
    texts = [
        document.text for document in itertools.islice(source.documents(text_field="text"), 1200)
    ]
    tokenizer = train_bpe(texts[:300], vocab_size=vocab_size)

    def pieces() -> Iterator[np.ndarray]:
        held = 0
        for text in texts:
            if held >= needed:
                return
            ids = tokenizer.encode(text)
            held += len(ids)
            yield ids

    ids = np.concatenate(list(pieces())).astype(np.int32)
    print(f"{len(ids):,} tokens in {time.perf_counter() - began:.1f} s", flush=True)
    if len(ids) < needed:
        raise SystemExit(
            f"bench step_curve: {needed:,} tokens are needed, the text has {len(ids):,}"
        )
    return ids[:needed]


def train(program: Program, ids: np.ndarray, seed: int, args: argparse.Namespace) -> list[float]:
    """Loss of each step."""
    rows = len(ids) // args.length
    inputs = ids[: rows * args.length].reshape(rows, args.length)
    targets = ids[1 : rows * args.length + 1].reshape(rows, args.length)
    order = np.random.default_rng(seed).permutation(rows).reshape(args.steps, args.batch)
    state, losses = program.start(seed), []
    for chosen in order:
        state, loss = program.advance(state, program.put(inputs[chosen], targets[chosen]))
        losses.append(loss)
    values = [float(loss) for loss in losses]
    print(
        f"{program.name} seed {seed}: {values[0]:.4f} -> {np.mean(values[-WINDOW:]):.4f}",
        flush=True,
    )
    return values


def compare(losses: dict[str, list[list[float]]]) -> dict[str, float | list[float] | bool]:
    """Distances of smoothed curves: ours from plain of the same seed, and plain's seeds apart."""

    def smooth(curves: list[list[float]]) -> np.ndarray:
        array = np.asarray(curves)
        return array.reshape(len(array), -1, WINDOW).mean(axis=2)

    theirs, mine = smooth(losses["plain"]), smooth(losses["ours"])
    pairs = list(itertools.combinations(range(len(theirs)), 2))
    apart = np.asarray([np.abs(theirs[a] - theirs[b]) for a, b in pairs])  # [pair, window]
    between = np.abs(mine - theirs)  # [seed, window]
    rms_seeds, rms_sides = (float(np.sqrt(np.mean(x**2))) for x in (apart, between))
    return {
        "last_window_plain": theirs[:, -1].tolist(),
        "last_window_ours": mine[:, -1].tolist(),
        "largest_difference_of_sides": float(between.max()),
        "rms_difference_of_sides": rms_sides,
        "largest_difference_of_seeds": float(apart.max()),
        "rms_difference_of_seeds": rms_seeds,
        "mean_signed_difference": float(np.mean(mine - theirs)),
        "within_noise": bool(between.max() <= apart.max() and rms_sides <= rms_seeds),
    }


if __name__ == "__main__":
    main()
