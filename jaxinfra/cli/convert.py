"""Convert a Hugging Face model to a checkpoint of jaxinfra, or a checkpoint or run back."""

import argparse
import math
from pathlib import Path

from safetensors import safe_open

from jaxinfra.checkpoint.finite import ALLOW_HELP, nonfinite_allowed
from jaxinfra.checkpoint.hub import model_path
from jaxinfra.checkpoint.model_directory import parse_dtype
from jaxinfra.checkpoint.tensor_files import DTYPES
from jaxinfra.errors import ConfigError
from jaxinfra.serving.convert import Target, convert

_MAX_SHARD_GB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra convert``."""
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="a model (directory, or name on the Hub), or a run"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="a new directory")
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help=f"dtype of all weights: {', '.join(DTYPES.values())} (default: unchanged)",
    )
    parser.add_argument(
        "--adapters-only",
        action="store_true",
        help="write only the adapters that a run trained, in PEFT's layout, not merged",
    )
    parser.add_argument(
        "--merge",
        metavar="DIR",
        type=Path,
        help="merge PEFT's adapters of this directory into the Hugging Face model",
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_HELP)
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, metavar="GB", help="per file (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Converts a model or checkpoint, and prints what was written."""
    if not 0 < args.max_shard_gb <= _MAX_SHARD_GB:
        raise ConfigError(
            f"--max-shard-gb={args.max_shard_gb} must be above 0 and at most {_MAX_SHARD_GB}"
        )
    with nonfinite_allowed(allowed=args.allow_nonfinite):
        result = convert(
            model_path(args.source),
            args.destination,
            dtype=None if args.dtype is None else parse_dtype(args.dtype),
            max_shard_bytes=int(args.max_shard_gb * 10**9),
            adapters_only=args.adapters_only,
            merge=args.merge,
        )
    count = result.definition.num_parameters
    if result.target is Target.PEFT:
        count = sum(map(_num_elements, args.destination.glob("*.safetensors")))
    num_bytes = sum(file.stat().st_size for file in args.destination.glob("*.safetensors"))
    print(
        f"{args.destination}: {count:,} parameters in the layout of "
        f"{result.target}, {num_bytes / 1e9:.3f} GB"
    )
    return 0


def _num_elements(file: Path) -> int:
    """Returns the number of elements of all tensors in a file, from its header."""
    with safe_open(file, framework="np") as tensors:
        names = tensors.keys()
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
