"""One step on several GPUs beside one GPU and beside plain JAX, in one process.

    python -m experiments.bench.training.parallel_step --part fsdp # 1.2B: one GPU, FSDP, plain FSDP
    python -m experiments.bench.training.parallel_step \\
        --part tensor # 8B shape: tensor parallel, FSDP
    python -m experiments.bench.training.parallel_step --only one fsdp+unroll16 fsdp+unroll16+O1
    python -m experiments.bench.training.parallel_step --preset tiny --batch 1 \\
        --length 32 # on CPU devices

Programs compile at the same time, then run one after the other, in rounds; a row is printed as soon
as it is known, and the JSON is written after each. What does not fit or compile is a row too.
Ratios are of tokens/s per GPU. Where a step's time goes, and how much of it is communication that
nothing hides, is read from a trace of each (``jaxinfra.diagnostics.waterfall``); a mesh here has
one axis of several devices, so that all of it is that axis's.
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

from experiments.bench.environment import clocks, environment
from experiments.bench.training.overlap import covered_by
from experiments.bench.training.parallel_contenders import Contender, Setting, contender
from experiments.bench.training.step_programs import without_rope_scaling
from jaxinfra.config.presets import MODELS
from jaxinfra.diagnostics.trace import events_by_device
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.hlo.program import collectives, compiled_instructions

PARTS = {
    "fsdp": (
        "llama32_1b",
        "one one+unroll16 fsdp fsdp+O1 fsdp+unroll16 fsdp+unroll16+O1 zero1 plain-one plain-fsdp",
    ),
    "tensor": ("llama31_8b", "fsdp fsdp+O1 tensor tensor-sp tensor-sp+O1"),
}
"""The model, and what is compared; the first is what the others are divided by."""


def setting_of(args: argparse.Namespace) -> Setting:
    """Setting that the command line asks for, on this machine's GPUs."""
    config = without_rope_scaling(MODELS[args.preset or PARTS[args.part][0]]())
    layers = args.layers
    if layers is None and args.part == "tensor" and args.preset is None:
        layers = 8  # instead of 32; all layers are alike
    if layers is not None:
        config = config.with_layers(layers)
    return Setting(
        config=config,
        batch=args.batch,
        length=args.length,
        remat=args.remat,
        attention=args.attention,
        devices=jax.devices(),
    )


def main() -> None:
    """Compiles, measures in rounds, prints a line a measurement and writes the JSON."""
    parser = argparse.ArgumentParser(
        prog="parallel_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=sorted(PARTS), default="fsdp")
    parser.add_argument("--preset", choices=sorted(MODELS), help="another model")
    parser.add_argument("--layers", type=int, help="fewer or more of them")
    parser.add_argument("--batch", type=int, default=4, help="sequences a GPU")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--only", nargs="+", help="names of contenders, the reference first")
    parser.add_argument("--trace", action="store_true", help="trace each in the last round")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    setting = setting_of(args)
    result: dict[str, Any] = {
        "environment": environment(),
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "rows": {},
    }
    made = _compile_all(args, setting, result)
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in made}
    for number in range(args.rounds):
        for name in list(made):
            try:
                last = args.trace and number == args.rounds - 1
                measured[name].append(_measure(made[name], args.steps, is_traced=last))
            except (RuntimeError, ValueError) as error:  # does not fit: a row, not the end
                result["rows"][name]["error"] = str(error)[:500]
                print(f"{name}: FAILED {str(error)[:300]}", flush=True)
                del made[name]
            else:
                result["rows"][name] |= _speed(made[name], measured[name])
                _compare(result["rows"])
                _print(name, result["rows"][name])
            _store(args.out, result)
    if args.out is not None:
        _store(args.out, result | {"clocks_after": clocks()})


def _compile_all(
    args: argparse.Namespace, setting: Setting, result: dict[str, Any]
) -> dict[str, Contender]:
    names = args.only or PARTS[args.part][1].split()
    made: dict[str, Contender] = {}
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        compiling = {pool.submit(contender, name, setting): name for name in names}
        for future in concurrent.futures.as_completed(compiling):
            name = compiling[future]
            if (error := future.exception()) is not None:
                result["rows"][name] = {"error": str(error)[:500]}
                print(f"{name}: FAILED to compile: {str(error)[:300]}", flush=True)
                continue
            made[name] = future.result()
            result["rows"][name] = row = _program(made[name])
            share = row["sent_share_with_compute_in_schedule"]
            hidden = "" if share is None else f", {share:.0%} beside compute in the schedule"
            print(
                f"{name:28s} compiled in {row['compile_s']:5.1f} s: temporaries "
                f"{row['temp_gib']:5.1f} GiB, arguments {row['argument_gib']:5.1f} GiB, sent "
                f"{row['sent_gb']:6.2f} GB{hidden}",
                flush=True,
            )
            _store(args.out, result)
    result["rows"] = {name: result["rows"][name] for name in names}
    return {name: made[name] for name in names if name in made}


def _program(of: Contender) -> dict[str, Any]:
    """Collectives and memory of the compiled program."""
    found = collectives(of.compiled)
    large = [each for each in found if each.sent_bytes > 2**20]
    sent = sum(each.sent_bytes for each in large)
    instructions, _ = compiled_instructions(of.compiled)
    hidden = sum(e.sent_bytes for e in large if covered_by(instructions, e.instruction))
    memory = of.compiled.memory_analysis()
    return {
        "devices": of.num_devices,
        "compile_s": of.compile_s,
        "temp_gib": memory.temp_size_in_bytes / 2**30,
        "argument_gib": memory.argument_size_in_bytes / 2**30,
        "sent_gb": sum(each.sent_bytes for each in found) / 1e9,
        "sent_share_with_compute_in_schedule": hidden / sent if sent else None,
    }


def _measure(of: Contender, steps: int, *, is_traced: bool) -> dict[str, Any]:
    """Seconds per step, the queue drained before and after; a state exists meanwhile."""
    advance = of.start()
    losses = [float(advance()), float(advance())]
    begin = time.perf_counter()
    pending = [advance() for _ in range(steps)]
    losses += [float(loss) for loss in pending]
    found: dict[str, Any] = {"step_s": (time.perf_counter() - begin) / steps, "losses": losses}
    if is_traced:
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                jax.block_until_ready([advance() for _ in range(3)])
            events = events_by_device(pathlib.Path(directory))[0]
        found["waterfall"] = explain(events, steps=3).as_json(top=25)
    return found


def _speed(of: Contender, measured: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = statistics.median(each["step_s"] for each in measured)
    waterfall = measured[-1].get("waterfall")
    return {
        "ms": seconds * 1e3,
        "rounds_ms": [each["step_s"] * 1e3 for each in measured],
        "tokens_per_s_per_gpu": of.tokens / seconds / of.num_devices,
        "losses": measured[-1]["losses"],
        "exposed_communication_ms": (
            None if waterfall is None else waterfall["by_kind_ms"].get("collective", 0.0)
        ),
        "waterfall": waterfall,
    }


def _compare(rows: dict[str, dict[str, Any]]) -> None:
    """Ratios to the first that ran."""
    ran = [row for row in rows.values() if "tokens_per_s_per_gpu" in row]
    for row in ran:
        row["ratio_to_first"] = row["tokens_per_s_per_gpu"] / ran[0]["tokens_per_s_per_gpu"]


def _print(name: str, row: dict[str, Any]) -> None:
    waterfall, exposed = row["waterfall"], ""
    if waterfall is not None:
        hidden = waterfall["hidden_ms"].get("collective", 0.0)
        exposed = (
            f" communication exposed {row['exposed_communication_ms']:.1f} ms, hidden {hidden:.1f}"
        )
    print(
        f"{name:28s} {row['ms']:9.2f} ms {row['tokens_per_s_per_gpu']:9.0f} tokens/s/GPU "
        f"x{row['ratio_to_first']:.3f} loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
        f"{exposed}",
        flush=True,
    )


def _store(file: pathlib.Path | None, result: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
