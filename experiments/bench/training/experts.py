"""A training step of models with experts: tokens/s and MFU of active parameters.

Layers of Qwen3-30B-A3B, of Mixtral-8x7B and of DeepSeek-V2-Lite (latent attention, the dense layer
and five with experts), with bf16 weights and moments or with fp32 masters, on one GPU; with
``--expert 1 N`` also the experts of a layer on N GPUs, each with as many tokens. With ``--torch``
the same step in transformers, in the same process. FLOPs are 6 x the parameters that a token is
multiplied with (no look-up), and causal attention.

    python -m experiments.bench.training.experts --models qwen3 mixtral --torch --out experts.json
    python -m experiments.bench.training.experts --weights master --accumulation 4 --batch 16
    python -m experiments.bench.training.experts --models qwen3 --expert 1 2 --room 1.25
    python -m experiments.bench.training.experts --models small --length 64 --batch 2 \\
        --steps 1 # CPU
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from experiments.bench.environment import clocks, environment
from experiments.bench.training.parallel_contenders import Contender, of_run
from experiments.bench.training.step_programs import LEARNING_RATE, WEIGHT_DECAY, data
from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import LearningRateSchedule, MomentFormat, OptimizerConfig
from jaxinfra.config.precision import (
    PolicyName,
    PrecisionConfig,
    StoredWeights,
    WeightGradients,
)
from jaxinfra.config.presets import mixtures, runs
from jaxinfra.config.run import Remat, RunConfig
from jaxinfra.diagnostics.trace import events_by_device
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.devices import device_peak

TRACED_STEPS = 4


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """A few layers of a model; where there are dense ones first, the first is kept."""
    *first, last = config.stacks
    stacks = (*first, dataclasses.replace(last, repeats=layers))
    return dataclasses.replace(config, stacks=stacks, vocab_size=32_768)


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "qwen3": lambda: cut(mixtures.qwen3_30b_a3b(), 4),
    "mixtral": lambda: cut(mixtures.mixtral_8x7b(), 2),
    "v2_lite": lambda: cut(mixtures.deepseek_v2_lite(), 5),
    "small": lambda: mixtures.tiny_moe().with_layers(2),
}


def run_of(config: ModelConfig, expert: int, args: argparse.Namespace) -> RunConfig:
    """The run whose step is timed, on ``expert`` devices."""
    run = runs.pretraining(config)
    masters = args.weights == "master"
    moments = MomentFormat.FP32 if masters else MomentFormat.BF16
    return dataclasses.replace(
        run,
        training=dataclasses.replace(
            run.training,
            batch_size=args.batch * expert,
            sequence_length=args.length,
            accumulation=args.accumulation,
            remat=Remat(args.remat),
            unroll=args.unroll,
            z_loss=0.0,
        ),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            schedule=LearningRateSchedule.CONSTANT,
            weight_decay=WEIGHT_DECAY,
            clip_norm=None,
            first_moment=moments,
            second_moment=moments,
        ),
        precision=PrecisionConfig(
            policy=PolicyName.BF16,
            weights=StoredWeights.FP32 if masters else StoredWeights.BF16,
            weight_gradients=WeightGradients.COMPUTE if masters else WeightGradients.FP32,
        ),
        mesh=MeshConfig(fsdp=expert, expert=expert),
        exchange=ExchangeConfig(form=ExchangeForm(args.form), room_factor=args.room),
    )


class Ours:
    """A contender with a state of its own."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self.losses: list[float] = []
        self._advance = contender.start()

    def time_steps(self, count: int) -> float:
        """Seconds per step over ``count`` steps, the queue drained before and after."""
        float(self._advance())
        start = time.perf_counter()
        pending = [self._advance() for _ in range(count)]
        self.losses += [float(loss) for loss in pending]
        return (time.perf_counter() - start) / count

    def communication(self) -> dict[str, Any]:
        """Waterfall of some traced steps, and the share of their communication that computation
        hides."""
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                jax.block_until_ready([self._advance() for _ in range(TRACED_STEPS)])
            waterfall = explain(events_by_device(pathlib.Path(directory))[0], steps=TRACED_STEPS)
        found = waterfall.as_json(top=25)
        exposed = found["by_kind_ms"].get("collective", 0.0)
        hidden = found["hidden_ms"].get("collective", 0.0)
        share = hidden / (hidden + exposed) if hidden + exposed else None
        return {"waterfall": found, "hidden_communication": share}


def contenders_of(
    name: str, config: ModelConfig, args: argparse.Namespace
) -> dict[str, tuple[int, Any]]:
    """Devices and contender by name."""
    found: dict[str, tuple[int, Any]] = {}
    for expert in args.expert:
        title = f"{name} {args.weights} weights, expert={expert}"
        run = run_of(config, expert, args)
        found[title] = expert, Ours(of_run(title, run, jax.devices()[:expert], {}))
    if args.torch:
        # Only where PyTorch and transformers are: no dependency of this package.
        module = importlib.import_module("experiments.bench.training.experts_torch")
        batch = data(config, batch=args.batch, length=args.length)
        found[f"{name} torch"] = 1, module.TorchStep(config, *batch)
    return found


def measured(
    contenders: dict[str, tuple[int, Any]], config: ModelConfig, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Medians over rounds in which contenders alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, (_, contender) in contenders.items():
            seconds[name].append(contender.time_steps(args.steps))
    flops = training_flops_per_token(define_model(config, execution_on()), args.length)
    peak = device_peak(jax.devices()[0].device_kind)
    rows = []
    for name, (devices, contender) in contenders.items():
        step_s = statistics.median(seconds[name])
        tokens_per_s = args.batch * args.length / step_s  # per device
        row = {
            "name": name,
            "devices": devices,
            "ms": 1e3 * step_s,
            "tokens_per_s_per_gpu": tokens_per_s,
            "mfu": tokens_per_s * flops / peak.bf16_flops if peak else None,
            "rounds_ms": [1e3 * each for each in seconds[name]],
            "losses": contender.losses[:3] + contender.losses[-1:],
        }
        print(json.dumps(row), flush=True)
        if args.trace and isinstance(contender, Ours):
            row |= contender.communication()
        rows.append(row)
    return rows


def main() -> None:
    """Prints each measurement as it is made, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["qwen3", "mixtral"])
    parser.add_argument("--weights", choices=("bf16", "master"), default="bf16")
    parser.add_argument("--batch", type=int, default=4, help="sequences per GPU")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--unroll", type=int, default=4)
    parser.add_argument(
        "--expert", nargs="+", type=int, default=[1], help="numbers of GPUs that share the experts"
    )
    parser.add_argument("--form", default="per_device", help="of the exchange between experts")
    parser.add_argument("--room", type=float, help="room_factor of the exchange; room for all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", action="store_true", help="trace each, for its communication")
    parser.add_argument("--torch", action="store_true", help="beside transformers")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    for name in args.models:
        config = MODELS[name]()
        contenders = contenders_of(name, config, args)
        rows = measured(contenders, config, args)
        result["rows"] += [{"model": name, "layers": config.num_layers, **row} for row in rows]
        result["clocks_after"] = clocks()
        del contenders
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
