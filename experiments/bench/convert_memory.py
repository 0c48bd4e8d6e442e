"""Peak host memory of a conversion both ways.

    python -m experiments.bench.convert_memory                  # Llama-3.2-1B shapes in bfloat16
    python -m experiments.bench.convert_memory --preset tiny    # a check

Question: does ``jaxinfra convert`` keep to pieces of tensors, so that its peak stays under twice
the largest file, and is the way there and back bitwise? A random checkpoint is written, then each
conversion runs in a process of its own, whose peak resident set the kernel reports; a process that
loads the same modules and converts a checkpoint of 3 MB is the baseline.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import environment
from jaxinfra.config.presets import MODELS
from jaxinfra.models.definition import define_model
from jaxinfra.models.hf import to_hf_config, weight_map
from jaxinfra.parallel.execution import execution_on
from jaxinfra.weights.tensor_files import open_tensor_files
from jaxinfra.weights.tensor_writer import write_tensor_files

_ROWS = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--max-shard-gb", type=float, default=0.6)
    parser.add_argument("--work", type=Path, help="where files go; removed afterwards")
    parser.add_argument("--out", type=Path, help="writes the result as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as directory:
        result = measure(Path(directory), preset=args.preset, max_shard_gb=args.max_shard_gb)
    result = {"environment": environment(), **result}
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    good = result["bitwise"] and max(result["peak_over_largest_file"].values()) < 2.0
    return 0 if good else 1


def measure(directory: Path, *, preset: str, max_shard_gb: float) -> dict:
    write_random(directory / "hf", preset=preset, max_shard_bytes=int(max_shard_gb * 1e9))
    write_random(directory / "small", preset="tiny", max_shard_bytes=10**9)
    baseline, _ = convert(directory / "small", directory / "small_ours", max_shard_gb)
    there, there_s = convert(directory / "hf", directory / "ours", max_shard_gb)
    back, back_s = convert(directory / "ours", directory / "back", max_shard_gb)
    files = {name: sizes(directory / name) for name in ("hf", "ours", "back")}
    largest = {"there": max(files["hf"]), "back": max(files["ours"])}
    peaks = {"there": there, "back": back}
    return {
        "preset": preset,
        "model_bytes": sum(files["hf"]),
        "largest_file_bytes": largest,
        "peak_bytes": peaks,
        "baseline_peak_bytes": baseline,
        "peak_over_largest_file": {key: peaks[key] / largest[key] for key in peaks},
        "seconds": {"there": round(there_s, 1), "back": round(back_s, 1)},
        "bitwise": digests(directory / "hf") == digests(directory / "back"),
    }


def write_random(path: Path, *, preset: str, max_shard_bytes: int) -> None:
    """A checkpoint of N(0, 0.02) in bfloat16, in the layout of Hugging Face."""
    config = MODELS[preset]()
    values = to_hf_config(config) | {"torch_dtype": "bfloat16"}
    shapes = define_model(config, execution_on()).shapes
    weights = weight_map(values["model_type"], config, shapes)
    dtype = jnp.dtype("bfloat16")

    def rows(name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        rng = np.random.default_rng(seed)
        for start in range(0, shape[0], _ROWS):
            count = min(_ROWS, shape[0] - start)
            yield (0.02 * rng.standard_normal((count, *shape[1:]), np.float32)).astype(dtype)

    path.mkdir()
    (path / "config.json").write_text(json.dumps(values, indent=2))
    write_tensor_files(
        path,
        {
            name: (tensor.shape, dtype, lambda name=name, shape=tensor.shape: rows(name, shape))
            for name, tensor in weights.tensors.items()
        },
        max_shard_bytes=max_shard_bytes,
    )


def convert(source: Path, destination: Path, max_shard_gb: float) -> tuple[int, float]:
    """Peak resident bytes and seconds of one conversion in its own process."""
    code = "import sys; from jaxinfra.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["convert", source, destination, "--max-shard-gb", max_shard_gb]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    started = time.perf_counter()
    pid = os.posix_spawn(sys.executable, command, os.environ | {"JAX_PLATFORMS": "cpu"})
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return usage.ru_maxrss * 1024, time.perf_counter() - started  # Linux counts in KiB


def sizes(directory: Path) -> list[int]:
    return [file.stat().st_size for file in directory.glob("*.safetensors")]


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every tensor's bytes."""
    files = open_tensor_files(directory)
    result = {}
    for name, tensor in files.tensors.items():
        digest = hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode())
        rest = tuple(slice(0, size) for size in tensor.shape[1:])
        for start in range(0, tensor.shape[0], _ROWS):
            rows = slice(start, min(start + _ROWS, tensor.shape[0]))
            digest.update(np.ascontiguousarray(files.read(name, (rows, *rest))).view(np.uint8))
        result[name] = digest.hexdigest()
    return result


if __name__ == "__main__":
    sys.exit(main())
