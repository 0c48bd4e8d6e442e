"""Whether the step in 8 bits learns as the one in 16 does: 200 steps on real text, seed by seed.

python -m experiments.bench.training.fp8_curve --out experiments/results/fp8-curve-h200.json
python -m experiments.bench.training.fp8_curve --preset tiny --steps 20 --length 64     # on a CPU

For each seed all sides start from the same weights and read the same text in the same order. What
is compared are means over windows of ten steps: each recipe's from bf16's, relative to bf16's. The
control is the hand-written bf16 step against itself with every sum in another order, as in
``step_curve``: what rounding alone does. A recipe passes where its difference is within its limit,
or within the control's where that is more.
"""

import argparse
import hashlib
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.training.step_curve import WINDOW, batches_of, tokens_of, train
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

LIMITS = {"tensor": 0.5e-2, "delayed": 0.5e-2, "blocks": 0.25e-2, "squares": 0.25e-2}
"""Relative differences of the loss that a recipe may come to, of the mean of all windows."""
VOCABULARY = 8192  # ids that the text uses, of the model's


def main() -> None:
    """Trains all sides from each seed; prints and writes the comparison after each seed."""
    args = _arguments()
    config = without_rope_scaling(MODELS[args.preset]())
    config = config.with_layers(args.layers or config.num_layers)
    ids = tokens_of(
        args.data,
        vocab_size=min(VOCABULARY, config.vocab_size),
        needed=args.steps * args.batch * args.length + 1,
    )
    programs = _programs(config, args)
    result: dict[str, Any] = {
        "environment": environment(),
        "settings": vars(args) | {"out": None},
        "ids_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "limits": LIMITS,
    }
    losses: dict[str, list[list[float]]] = {side: [] for side in programs}
    for seed in range(args.seeds):
        batches = batches_of(ids, seed, batch=args.batch, length=args.length)
        for side, program in programs.items():
            losses[side].append(train(program, batches, seed))
        found = compare(losses)
        print("\n".join(lines(found)), flush=True)
        if args.out:
            document = result | {"clocks_after": clocks(), "sides": found, "losses": losses}
            args.out.write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--data", default="stdlib", help="a directory, a file, or stdlib")
    parser.add_argument("--recipes", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200, help=f"a multiple of {WINDOW}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="the highest")
    parser.add_argument("--threads", type=int, default=6, help="that compile")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    if args.steps < WINDOW or args.steps % WINDOW:
        parser.error(f"--steps {args.steps}: must be a multiple of the window, {WINDOW}")
    return args


def _programs(config: ModelConfig, args: argparse.Namespace) -> dict[str, Program]:
    """Plain, its control, bf16 and the recipes, compiled at once."""
    settings: dict[str, Any] = {
        "batch": args.batch,
        "length": args.length,
        "learning_rate": args.learning_rate,
        "warmup": args.steps // 5,
        "clip_norm": 1.0,
    }

    def recipe(name: str) -> Program:
        fp8 = None if name == "bf16" else Fp8Matmuls(scaling=Fp8Scaling(name))
        return ours(config, **settings, remat="none", attention="auto", fp8=fp8)

    with ThreadPoolExecutor(args.threads) as pool:
        reference = pool.submit(plain, config, **settings, remat="dots")
        made = {name: pool.submit(recipe, name) for name in ("bf16", *args.recipes)}
        programs = {"plain": reference.result()}
        sizes = {"batch": args.batch, "length": args.length}
        programs["control"] = plain_reordered(programs["plain"], config, **sizes)
        return programs | {name: each.result() for name, each in made.items()}


def compare(losses: dict[str, list[list[float]]]) -> dict[str, dict[str, Any]]:
    """Relative differences of each side's curves from bf16's, of the control's from plain's.

    Args:
        losses: of each side, each seed and each step.

    Returns:
        Of each side ``mean``, signed, over all windows and seeds; ``each_seed``; ``rms`` and
        ``largest`` of windows; of recipes the ``limit`` that counts, and whether it ``holds``.
    """
    curves = {
        side: np.asarray(each).reshape(len(each), -1, WINDOW).mean(axis=2)
        for side, each in losses.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for side, curve in curves.items():
        if side in ("plain", "bf16"):
            continue
        reference = curves["plain" if side == "control" else "bf16"]
        relative = curve / reference - 1.0  # [seed, window]
        by_seed = curve.mean(axis=1) / reference.mean(axis=1) - 1.0
        found[side] = {
            "mean": float(np.mean(relative)),
            "each_seed": by_seed.tolist(),
            "largest_seed": float(np.max(np.abs(by_seed))),
            "rms": float(np.sqrt(np.mean(relative**2))),
            "largest": float(np.max(np.abs(relative))),
            "last_window": (curve[:, -1] / reference[:, -1] - 1.0).tolist(),
        }
    for side, each in found.items():
        if side != "control":
            each["limit"] = max(LIMITS[side], found["control"]["largest_seed"])
            # NumPy's maximum: a curve that is not finite is within no limit.
            each["holds"] = bool(each["largest_seed"] <= each["limit"])
    return found


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each side."""
    texts = []
    for side, each in found.items():
        text = (
            f"{side:<9}mean {each['mean']:+.3%}, largest of a seed {each['largest_seed']:.3%}, "
            f"of a window {each['largest']:.3%}, rms of windows {each['rms']:.3%}"
        )
        if "limit" in each:
            text += f": {'holds' if each['holds'] else 'FAILS'} at {each['limit']:.3%}"
        texts.append(text)
    return texts


if __name__ == "__main__":
    main()
