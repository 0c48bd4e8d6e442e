"""Measures the quality that quantization costs: perplexity, KL divergence and agreement by recipe.

    python -m experiments.bench.serving.quantized_quality RUN --text heldout.txt \\
        --calibrate text.txt

Every recipe of ``jaxinfra quantize`` quantizes the run into a temporary directory. Weights are read
back packed, so inputs are rounded too where the recipe says so. The original is in float32; in
bfloat16 it is a row of the table. Caches in fewer bits are the original's.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.definition import Parameters
from jaxinfra.quantize.quantize import calibration_ids, quantize_model, source_model
from jaxinfra.quantize.recipes import RECIPES, quantization_recipe
from jaxinfra.serving.load import LoadedModel, load

_ROWS = 8


def log_probabilities(model: LoadedModel, ids_BT: np.ndarray) -> np.ndarray:
    """Log probabilities of each next token, float32 [B, T, V]."""

    @jax.jit
    def one(parameters: Parameters, ids_BT: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(model.definition.bind(parameters)(ids_BT))

    return _by_rows(one, model, ids_BT)


def cached_log_probabilities(
    model: LoadedModel, ids_BT: np.ndarray, form: CacheFormat
) -> np.ndarray:
    """Log probabilities with keys and values rounded as a cache of this format stores them."""
    definition = model.with_cache(form).definition

    @jax.jit
    def one(parameters: Parameters, ids_BT: jax.Array) -> jax.Array:
        decoder = definition.bind(parameters)
        cache = decoder.empty_cache(batch=len(ids_BT), num_slots=ids_BT.shape[1])
        return jax.nn.log_softmax(decoder.logits(decoder.run(ids_BT, cache=cache).x))

    return _by_rows(one, model, ids_BT)


def _by_rows(one: Any, model: LoadedModel, ids_BT: np.ndarray) -> np.ndarray:
    rows = [ids_BT[i : i + _ROWS] for i in range(0, len(ids_BT), _ROWS)]
    found = [one(model.parameters, jnp.asarray(each)) for each in rows]
    return np.concatenate([np.asarray(each, np.float32) for each in found])


def compared(want: np.ndarray, got: np.ndarray, ids_BT: np.ndarray) -> dict[str, float]:
    """Perplexity of the text, KL(original || quantized) and how often the likeliest token is the
    same.
    """
    targets = ids_BT[:, 1:, None]
    nll = -np.take_along_axis(got[:, :-1], targets, axis=-1).astype(np.float64)
    divergence = np.sum(np.exp(want[:, :-1]) * (want[:, :-1] - got[:, :-1]), axis=-1)
    agreement = want[:, :-1].argmax(-1) == got[:, :-1].argmax(-1)
    return {
        "perplexity": float(np.exp(nll.mean())),
        "kl_nats": float(divergence.mean(dtype=np.float64)),
        "top1_agreement": float(agreement.mean()),
    }


def main() -> None:
    """Prints a table and writes JSON, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--calibrate", type=Path, required=True, help="another text")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--model", required=True, help="what the model is, in words")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    original = load(args.run, policy=PolicyName.FP32)
    sizes = {"sequence_length": args.length, "num_sequences": args.sequences}
    rows: dict[str, dict[str, Any]] = {}
    result = {
        "command": shlex.join(
            ["python", "-m", "experiments.bench.serving.quantized_quality", *sys.argv[1:]]
        ),
        "model": args.model,
        "device": jax.devices()[0].device_kind,
        "tokens": args.sequences * args.length,
        "rows": rows,
    }

    def add(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        row["perplexity_change"] = row["perplexity"] / rows["fp32"]["perplexity"] - 1
        print(
            f"{name:12s} {row['perplexity']:9.3f} {row['perplexity_change']:+8.3%} "
            f"KL {row['kl_nats']:.2e}  top-1 {row['top1_agreement']:.2%}",
            flush=True,
        )
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as made, source_model(args.run) as source:
        ids_BT = calibration_ids(args.text, source.tokenizer_directory, **sizes)
        calibration = calibration_ids(args.calibrate, source.tokenizer_directory, **sizes)
        want = log_probabilities(original, ids_BT)
        add("fp32", compared(want, want, ids_BT))
        in_bf16 = load(args.run, policy=PolicyName.BF16)
        add("bf16", compared(want, log_probabilities(in_bf16, ids_BT), ids_BT))
        for form in CacheFormat:
            got = cached_log_probabilities(original, ids_BT, form)
            add(f"cache-{form}", compared(want, got, ids_BT))
        for name in RECIPES:
            recipe = quantization_recipe(name, group=args.group_size)
            report = quantize_model(source, Path(made) / name, recipe, ids_BT=calibration)
            got = log_probabilities(load(Path(made) / name), ids_BT)
            bits = 8 * report.quantized_bytes / report.num_quantized
            errors = [layer.error for layer in report.layers if layer.error is not None]
            row = {"bits_per_weight": bits, "layer_errors": errors}
            add(name, compared(want, got, ids_BT) | row)


if __name__ == "__main__":
    main()
