"""Whether the step learns as the plain-JAX step does: 200 steps on real text, seed by seed.

    python -m experiments.bench.training.step_curve # Llama-3.2-1B shapes, one GPU
    python -m experiments.bench.training.step_curve --preset tiny --steps 20 --length 64 # on a CPU
    python -m experiments.bench.training.step_curve --preset small --batch 16 --length 512 \\
        --learning-rate 2e-4 --recipes blocks squares # in 8 bits, too

For each seed all start from the same weights and see the same text in the same order. The rate
warms up linearly to a constant; the gradient is clipped by its global norm. Curves are compared as
means over windows of steps, in nats per token, by three distances:

    ours      ours from plain of the same seed: the verdict's subject
    control   plain from plain with every sum in another order (``plain_step.reordered``), of the
              same seed: what rounding alone does to the curve
    seeds     plain's seeds from one another: weights and order of the text

With ``--recipes``, ours in 8 bits is compared with ours in bf16, relative to the loss.
The losses are the same where the largest and the root mean square of the first are both at most the
larger of the other two.
"""

import argparse
import hashlib
import itertools
import json
import pathlib
import time
from typing import Any

import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.training.step_programs import (
    Program,
    ours,
    plain,
    plain_reordered,
    without_rope_scaling,
)
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scaling
from jaxinfra.config.presets import MODELS
from jaxinfra.data.sources import scan
from jaxinfra.data.tokenizer import train_bpe
from jaxinfra.training.xla_options import parse_options

LEARNING_RATE = 3e-4
VOCABULARY = 8192  # ids that the text uses, of the model's
TOKENIZER_DOCUMENTS = 300
WINDOW = 10  # steps
REPORTED = 5  # windows between lines of a run

type Batches = list[tuple[np.ndarray, np.ndarray]]
"""Tokens and targets of each step, int32 [batch, length]."""


def main() -> None:
    """Trains all sides from each seed; prints the comparison and writes the JSON after each."""
    args = _arguments()
    config = without_rope_scaling(MODELS[args.preset]())
    ids = tokens_of(
        args.data,
        vocab_size=min(VOCABULARY, config.vocab_size),
        needed=args.steps * args.batch * args.length + 1,
    )
    programs = _programs(config, args)
    result = {
        "environment": environment(),
        "settings": vars(args) | {"out": None},
        "ids_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "programs": {side: program.name for side, program in programs.items()},
        "compile_s": {side: round(program.compile_s, 1) for side, program in programs.items()},
    }
    losses: dict[str, list[list[float]]] = {side: [] for side in programs}
    for seed in range(args.seeds):
        # Made once: all sides read the very same arrays.
        batches = batches_of(ids, seed, batch=args.batch, length=args.length)
        for side, program in programs.items():
            losses[side].append(train(program, batches, seed))
        found: dict[str, Any] = {"verdict": "none yet: one seed, and noise needs two"}
        if seed > 0:
            found = compare({side: losses[side] for side in losses if side not in args.recipes})
            print(table(found), flush=True)
        found["recipes"] = {name: beside(losses[name], losses["ours"]) for name in args.recipes}
        _say(found["verdict"])
        if args.out:
            document = result | {"clocks_after": clocks(), **found, "losses": losses}
            args.out.write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="jaxinfra bench step_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--data", default="stdlib", help="a directory, a file, or stdlib")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200, help=f"a multiple of {WINDOW}")
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="the highest")
    parser.add_argument(
        "--warmup", type=int, help="steps to the highest rate; default: a fifth of all"
    )
    parser.add_argument(
        "--clip", type=float, default=1.0, help="the gradient's global norm; 0: not clipped"
    )
    parser.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the plain step with its sums in another order, besides",
    )
    parser.add_argument(
        "--recipes", nargs="*", default=[], choices=list(Fp8Scaling), help="ours in 8 bits, too"
    )
    parser.add_argument("--remat", default="none")
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--attention", default="auto")
    parser.add_argument(
        "--options", default="", metavar="SET", help="XLA's, of ours: name=value,..."
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    if args.steps < WINDOW or args.steps % WINDOW:
        parser.error(f"--steps {args.steps}: must be a multiple of the window, {WINDOW}")
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: must be at least 2, which make the noise")
    if args.warmup is None:
        args.warmup = args.steps // 5
    return args


def _programs(config: ModelConfig, args: argparse.Namespace) -> dict[str, Program]:
    sizes = {"batch": args.batch, "length": args.length}
    training = {
        "learning_rate": args.learning_rate,
        "warmup": args.warmup,
        "clip_norm": args.clip or None,
    }
    programs = {"plain": plain(config, **sizes, **training, remat="dots")}
    _say(f"plain compiled in {programs['plain'].compile_s:.1f} s")
    if args.control:
        programs["control"] = plain_reordered(programs["plain"], config, **sizes)
    for name in ("ours", *args.recipes):
        programs[name] = ours(
            config,
            **sizes,
            **training,
            remat=args.remat,
            unroll=args.unroll,
            attention=args.attention,
            fp8=None if name == "ours" else Fp8Matmuls(scaling=Fp8Scaling(name)),
            options=parse_options(args.options.split(",")) if args.options else None,
        )
        _say(f"{name} compiled in {programs[name].compile_s:.1f} s")
    return programs


def tokens_of(data: str, *, vocab_size: int, needed: int) -> np.ndarray:
    """The first ``needed`` ids of the text, int32, by a tokenizer trained on its first documents.

    Documents come in a fixed order, so that a text gives the same ids on every machine.
    """
    began = time.perf_counter()
    documents = (document.text for document in scan(data).documents(text_field="text"))
    first = list(itertools.islice(documents, TOKENIZER_DOCUMENTS))
    tokenizer = train_bpe(first, vocab_size=vocab_size)
    pieces: list[np.ndarray] = []
    held = 0
    for text in itertools.chain(first, documents):
        if held >= needed:
            break
        pieces.append(tokenizer.encode(text))
        held += len(pieces[-1])
    if held < needed:
        raise SystemExit(
            f"bench step_curve: the steps read {needed:,} tokens and {data} has {held:,}: name "
            "more text by --data, or fewer --steps"
        )
    _say(f"{needed:,} of {held:,} tokens in {time.perf_counter() - began:.1f} s")
    return np.concatenate(pieces)[:needed].astype(np.int32)


def batches_of(ids: np.ndarray, seed: int, *, batch: int, length: int) -> Batches:
    """The text cut into rows, all of them, each once, in the seed's order."""
    rows = (len(ids) - 1) // length
    inputs = ids[: rows * length].reshape(rows, length)
    targets = ids[1 : rows * length + 1].reshape(rows, length)
    order = np.random.default_rng(seed).permutation(rows).reshape(-1, batch)
    return [(inputs[chosen], targets[chosen]) for chosen in order]


def train(program: Program, batches: Batches, seed: int) -> list[float]:
    """Loss of each step. The state lives only here: one program's at a time is in memory."""
    state, pending, losses = program.start(seed), [], []
    began = time.perf_counter()
    for tokens, targets in batches:
        state, loss = program.advance(state, program.put(tokens, targets))
        pending.append(loss)
        done = len(losses) + len(pending)
        if done % (REPORTED * WINDOW) == 0 or done == len(batches):
            losses += [float(loss) for loss in pending]
            pending.clear()
            ms = (time.perf_counter() - began) / done * 1e3
            last = np.mean(losses[-WINDOW:])
            _say(f"{program.name}, seed {seed}, step {done}: {last:.4f}, {ms:.1f} ms a step")
    return losses


def compare(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Distances of smoothed curves, and whether ours is within the noise.

    Args:
        losses: of each side, each seed and each step; the control may be missing.

    Returns:
        ``verdict`` in words, ``holds``; ``differences``, the largest and the root mean square of
        each kind of distance; ``windows``, the same window by window; last windows of each side.
    """
    curves = {side: _smooth(each) for side, each in losses.items()}
    theirs = curves["plain"]
    seeds = list(itertools.combinations(range(len(theirs)), 2))
    signed = {side: curve - theirs for side, curve in curves.items() if side != "plain"}
    apart = {side: np.abs(each) for side, each in signed.items()}  # [seed, window]
    apart["seeds"] = np.abs([theirs[a] - theirs[b] for a, b in seeds])  # [pair, window]
    differences = {kind: _statistics(each) for kind, each in apart.items()}
    noise = {kind: each for kind, each in differences.items() if kind != "ours"}
    limits = {
        # NumPy's: a curve that is not finite is not within any noise.
        name: float(np.max([each[name] for each in noise.values()]))
        for name in ("largest", "rms")
    }
    within = {name: bool(differences["ours"][name] <= limits[name]) for name in limits}
    words = [
        f"{name} window difference of ours {differences['ours'][name]:.4f} nats is "
        f"{'within' if within[name] else 'PAST'} the noise of {limits[name]:.4f} ("
        + ", ".join(f"{kind} {each[name]:.4f}" for kind, each in noise.items())
        + ")"
        for name in limits
    ]
    holds = all(within.values())
    head = "HOLDS" if holds else "DOES NOT HOLD"
    return {
        "verdict": f"same losses: {head}, {len(theirs)} seeds; " + "; ".join(words),
        "holds": holds,
        "differences": differences,
        "mean_signed": {side: float(np.mean(each)) for side, each in signed.items()},
        "last_window": {side: curve[:, -1].tolist() for side, curve in curves.items()},
        "windows": [
            {
                "first_step": window * WINDOW,
                "plain": float(np.mean(theirs[:, window])),
                **{kind: _statistics(each[:, window]) for kind, each in apart.items()},
            }
            for window in range(theirs.shape[1])
        ],
    }


def beside(curves: list[list[float]], reference: list[list[float]]) -> dict[str, float]:
    """Relative differences of smoothed curves: the signed mean, and the largest of one seed."""
    mine, theirs = _smooth(curves), _smooth(reference)
    by_seed = mine.mean(axis=1) / theirs.mean(axis=1) - 1.0
    return {
        "mean": float(np.mean(mine / theirs - 1.0)),
        "largest_seed": float(np.max(np.abs(by_seed))),
    }


def table(found: dict[str, Any]) -> str:
    """``compare``'s windows as text: for each kind of distance root mean square and largest."""
    kinds = list(found["differences"])
    lines = ["nats a token  plain" + "".join(f"{kind:>9} rms / largest" for kind in kinds)]
    rows = [(f"step {each['first_step']}", each["plain"], each) for each in found["windows"]]
    for name, level, distances in [*rows, ("all", None, found["differences"])]:
        pairs = [(distances[kind]["rms"], distances[kind]["largest"]) for kind in kinds]
        figures = [f"{rms:.4f} / {largest:.4f}" for rms, largest in pairs]
        shown = "" if level is None else f"{level:.3f}"
        lines.append(f"{name:<11}{shown:>8}" + "".join(f"{each:>23}" for each in figures))
    return "\n".join(lines)


def _smooth(curves: list[list[float]]) -> np.ndarray:
    array = np.asarray(curves)
    return array.reshape(len(array), -1, WINDOW).mean(axis=2)


def _statistics(distances: np.ndarray) -> dict[str, float]:
    return {
        "largest": float(np.max(distances)),
        "rms": float(np.sqrt(np.mean(np.square(distances)))),
    }


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
