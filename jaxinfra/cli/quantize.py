"""Quantize a model's weights to 4 or 8 bits, in formats that other programs read."""

import argparse
from pathlib import Path

from jaxinfra.checkpoint.finite import ALLOW_HELP, nonfinite_allowed
from jaxinfra.checkpoint.hub import model_path
from jaxinfra.errors import ConfigError
from jaxinfra.quantize.quantize import (
    LayerReport,
    QuantizationReport,
    calibration_ids,
    quantize_model,
    source_model,
)
from jaxinfra.quantize.recipes import (
    DEFAULT_GROUP,
    GROUPS,
    RECIPES,
    quantization_recipe,
)

_MOST_TOKENS = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command-line options of ``jaxinfra quantize``."""
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="a model (directory, or name on the Hub), or a run"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="a new directory")
    parser.add_argument("--recipe", required=True, help=f"one of {', '.join(RECIPES)}")
    parser.add_argument(
        "--calibrate",
        metavar="TEXT",
        type=Path,
        help="text file (no rows) whose activations are used to choose scales and measure errors",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=65536,
        metavar="N",
        help="most tokens of that text (default: 65536)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=DEFAULT_GROUP,
        metavar="N",
        help=f"inputs that share a scale, for 4 bits: {', '.join(map(str, GROUPS))} "
        f"(default: {DEFAULT_GROUP})",
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help=ALLOW_HELP)


def run(args: argparse.Namespace) -> int:
    """Quantizes a model, and prints each layer's error and what was written."""
    recipe = quantization_recipe(args.recipe, group=args.group_size)
    if not 0 < args.calibration_tokens <= _MOST_TOKENS:
        raise ConfigError(
            f"--calibration-tokens={args.calibration_tokens} must be above 0 and at most "
            f"{_MOST_TOKENS}"
        )
    if recipe.needs_text and args.calibrate is None:
        raise ConfigError(f"--recipe {recipe.name} needs a text: add --calibrate FILE")
    args.source = model_path(args.source)
    inside = args.destination.resolve()
    if inside == args.source.resolve() or args.source.resolve() in inside.parents:
        raise ConfigError(
            f"{args.destination} is in {args.source}, which is only read: name another directory"
        )
    with nonfinite_allowed(allowed=args.allow_nonfinite), source_model(args.source) as model:
        ids_BT = None
        if args.calibrate is not None:
            length = min(512, model.definition.config.max_positions, args.calibration_tokens)
            ids_BT = calibration_ids(
                args.calibrate,
                model.tokenizer_directory,
                sequence_length=length,
                num_sequences=max(1, args.calibration_tokens // length),
            )
        num_layers = model.definition.config.num_layers

        def tell(layer: LayerReport) -> None:
            error = "" if layer.error is None else f"  error of output {layer.error:.3%}"
            print(
                f"layer {layer.number + 1}/{num_layers}{error}  {layer.seconds:.1f} s", flush=True
            )

        report = quantize_model(model, args.destination, recipe, ids_BT=ids_BT, report=tell)
    _print_summary(args.destination, report)
    return 0


def _print_summary(destination: Path, report: QuantizationReport) -> None:
    bits = 8 * report.quantized_bytes / report.num_quantized
    written = report.quantized_bytes + report.kept_bytes
    print(f"\n{report.recipe.name}: {report.recipe.what}")
    print(f"{'weights':22s} {'elements':>16s} {'MB':>12s}")
    rows = (
        (f"in {bits:.2f} bits", report.num_quantized, report.quantized_bytes),
        ("kept as they were", report.num_kept, report.kept_bytes),
        ("all", report.num_quantized + report.num_kept, written),
        ("before", report.num_quantized + report.num_kept, report.before_bytes),
    )
    for name, count, size in rows:
        print(f"{name:22s} {count:16,} {size / 1e6:12.2f}")
    print(f"{destination}: {report.before_bytes / written:.2f} times smaller")
