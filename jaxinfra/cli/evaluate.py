"""Loss, perplexity and bits per byte of a run on held-out text."""

import argparse
import json
from pathlib import Path

from jaxinfra.cli.train import user_cache
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.training.evaluate_run import evaluate_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--data", help="text to use instead of the run's own held-out documents")
    parser.add_argument("--step", type=int, help="checkpoint; the newest good one by default")
    parser.add_argument("--mesh", default="", metavar="AXES", help="such as fsdp=4,tensor=2")
    parser.add_argument(
        "--cache", type=Path, help="corpora and compiled programs (default: user cache)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints a table, or JSON."""
    result = evaluate_run(
        args.run,
        mesh=parse_mesh(args.mesh),
        cache_dir=args.cache or user_cache(),
        source=args.data,
        step=args.step,
    )
    evaluation, baseline = result.evaluation, result.baseline
    values = {
        "step": result.step,
        "heldout_loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.num_tokens,
        "bytes": evaluation.num_bytes,
        "gzip_bits_per_byte": baseline.gzip_each,
        "xz_bits_per_byte": baseline.xz_all,
    }
    if args.json:
        print(json.dumps(values))
        return 0
    for name, value in values.items():
        print(f"{name:20s} {value:,.4f}" if isinstance(value, float) else f"{name:20s} {value:,}")
    return 0
