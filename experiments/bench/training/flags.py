"""XLA options on the user's own step: which help, measured against an interleaved control.

    python -m experiments.bench.training.flags                        # Llama-3.2-1B shapes, one GPU
    python -m experiments.bench.training.flags --preset tiny \\
        --options xla_gpu_enable_triton_gemm=false

Each option runs alternately with a control that has none, so that clocks and temperature hit both
alike; those that gain more than the noise are then tried together. Options that this version of
XLA does not know are rows with its message, and the process goes on: they are compile options of
one program, not XLA_FLAGS.
"""

import argparse
import json
import pathlib
import statistics
from typing import Any

from experiments.bench.environment import clocks, environment
from experiments.bench.training.step_programs import Contender, data, ours, without_rope_scaling
from jaxinfra.config.presets import MODELS
from jaxinfra.training.xla_options import Options, describe_options, parse_options

CANDIDATES = (
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_autotune_max_solutions=64",
    "xla_gpu_cudnn_gemm_fusion_level=3",
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_while_loop_double_buffering=true",
    "xla_gpu_enable_command_buffer=",
    "xla_gpu_enable_dynamic_slice_fusion=false",
)
LEAST_GAIN = 1.004
"""Below it an option counts as noise and is not kept."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="jaxinfra bench flags", description=__doc__)
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--unroll", type=int, default=1, help="layers a loop body")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--steps", type=int, default=5, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=3, help="alternations with the control")
    parser.add_argument("--options", nargs="+", default=CANDIDATES, metavar="NAME=VALUE")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    control = compiled(args, {})
    rows = [try_options(args, control, parse_options([option])) for option in args.options]
    helpful = [row["options"] for row in rows if row.get("gain", 0) >= LEAST_GAIN]
    if len(helpful) > 1:
        together = {name: value for options in helpful for name, value in options.items()}
        rows.append(try_options(args, control, together))
    best = max(rows, key=lambda row: row.get("gain", 0))
    kept = best["options"] if best.get("gain", 0) >= LEAST_GAIN else {}
    print(f"keep: {describe_options(kept)}")
    if kept:
        named = json.dumps(describe_options(kept).split(", "))
        print(f"in a run: jaxinfra train ... --set 'training.xla_options={named}'")
    if args.out:
        report = {"environment": environment(), "settings": settings(args), "rows": rows}
        report |= {"kept": kept, "clocks_after": clocks()}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the step, for the record."""
    names = ("preset", "batch", "length", "remat", "unroll", "attention", "steps", "rounds")
    return {name: getattr(args, name) for name in names}


def compiled(args: argparse.Namespace, options: Options) -> Contender:
    """The step with these options, warmed up."""
    config = without_rope_scaling(MODELS[args.preset]())
    sizes = {"batch": args.batch, "length": args.length}
    program = ours(
        config,
        **sizes,
        remat=args.remat,
        unroll=args.unroll,
        attention=args.attention,
        options=options or None,
    )
    contender = Contender.of(program, *data(config, **sizes))
    contender.time_steps(2)
    return contender


def try_options(args: argparse.Namespace, control: Contender, options: Options) -> dict[str, Any]:
    """Milliseconds with and without, and the gain as control over variant."""
    row: dict[str, Any] = {"options": options}
    try:
        variant = compiled(args, options)
    except (RuntimeError, ValueError) as error:  # an unknown option must not end the table
        row["error"] = str(error)[:300]
        print(f"{options}: {row['error'][:120]}", flush=True)
        return row
    times: dict[str, list[float]] = {"control": [], "variant": []}
    for _ in range(args.rounds):
        for side, contender in (("control", control), ("variant", variant)):
            times[side].append(1e3 * contender.time_steps(args.steps))
    control_ms, variant_ms = (statistics.median(times[side]) for side in ("control", "variant"))
    row |= {
        "control_ms": control_ms,
        "variant_ms": variant_ms,
        "gain": control_ms / variant_ms,
        "temp_gib": variant.program.temp_bytes / 2**30,
        "compile_s": variant.program.compile_s,
        "rounds_ms": times,
    }
    print(
        f"{row['gain']:6.3f}x  {control_ms:8.2f} -> {variant_ms:8.2f} ms  temp "
        f"{row['temp_gib']:5.1f} GiB  compile {variant.program.compile_s:5.1f} s  {options}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
