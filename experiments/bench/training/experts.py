"""A training step of models with experts: tokens/s and MFU of active parameters.

Layers of Qwen3-30B-A3B, of Mixtral-8x7B and of DeepSeek-V2-Lite (latent attention, the dense layer
and five with experts), with bf16 weights and AdamW or with fp32 masters, on one GPU; with
``--expert 1 N`` also the experts of a layer on N GPUs, each with as many tokens. With ``--torch``
the same step in transformers, in turns. FLOPs are 6 x the parameters that a token is multiplied
with (no look-up), and causal attention.

    python -m experiments.bench.training.experts --models qwen3 mixtral --torch --out experts.json
    python -m experiments.bench.training.experts --weights master --accumulation 4 --batch 16
    python -m experiments.bench.training.experts --models qwen3 --expert 1 2 --room 1.25
    python -m experiments.bench.training.experts --models small --length 64 --batch 2 \\
        --steps 1 # CPU
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.training.step_programs import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Contender,
    Program,
    data,
    temp_bytes,
)
from jaxinfra.config.exchange import ExchangeConfig, ExchangeForm
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import LearningRateSchedule, OptimizerConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig, WeightGradients
from jaxinfra.config.presets import deepseek, mixtures
from jaxinfra.config.run import Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.trace import device_events
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.model.definition import define_model
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.numerics.policy import held_as_computed, policy_of
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.runtime.devices import device_peak
from jaxinfra.training.gradients import make_gradient
from jaxinfra.training.optim.learning_rate import learning_rate
from jaxinfra.training.optim.optimizer import make_optimizer
from jaxinfra.training.state import initial_state, state_shardings
from jaxinfra.training.step import make_train_step
from jaxinfra.training.xla_options import Options, parse_options

_STEPS = 1_000_000  # of a schedule that is constant
_TRACED_STEPS = 4


def _cut(config: ModelConfig, layers: int) -> ModelConfig:
    """A few layers of a model; where there are dense ones first, the first is kept."""
    *first, last = config.stacks
    stacks = (*first, dataclasses.replace(last, repeats=layers))
    return dataclasses.replace(config, stacks=stacks, vocab_size=32_768)


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "qwen3": lambda: _cut(mixtures.qwen3_30b_a3b(), 4),
    "mixtral": lambda: _cut(mixtures.mixtral_8x7b(), 2),
    "v2_lite": lambda: _cut(deepseek.deepseek_v2_lite(), 5),
    "small": lambda: mixtures.tiny_moe().with_layers(2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How a step runs."""

    batch: int  # sequences, over all devices and micro-batches
    length: int
    masters: bool  # fp32 weights, whose gradients are rounded to bf16
    accumulation: int
    remat: Remat
    unroll: int
    expert: int
    exchange: ExchangeConfig
    options: Options | None

    @property
    def name(self) -> str:
        """A row's."""
        parts = [
            "fp32 masters" if self.masters else "bf16 weights",
            f"batch={self.batch}x{self.length}",
            f"accumulation={self.accumulation}",
            f"remat={self.remat.value}",
            f"unroll={self.unroll}",
        ]
        if self.expert > 1:
            room = self.exchange.room_factor or "all"
            parts.append(f"expert={self.expert} {self.exchange.form.value} room={room}")
        return " ".join(parts)


def narrow_moments(state: Any) -> Any:
    """A state whose moments are bf16, as PyTorch's AdamW has them of bf16 weights."""
    moments = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 and x.ndim else x,
        state.optimizer,
    )
    return dataclasses.replace(state, optimizer=moments)


class Traced(NamedTuple):
    """The step of this package, not lowered yet."""

    step: Any  # jax.stages.Traced
    start: Callable[[int], Any]  # a seed to the first state
    placement: Placement


def traced(config: ModelConfig, setting: Setting, devices: Sequence[Any]) -> Traced:
    """The step for these devices, which need not be there."""
    training = TrainingConfig(
        steps=_STEPS,
        batch_size=setting.batch,
        sequence_length=setting.length,
        accumulation=setting.accumulation,
        remat=setting.remat,
        unroll=setting.unroll,
    )
    optimizer_config = OptimizerConfig(
        learning_rate=LEARNING_RATE,
        schedule=LearningRateSchedule.CONSTANT,
        warmup_steps=0,
        weight_decay=WEIGHT_DECAY,
        clip_norm=None,
    )
    rounded = WeightGradients.COMPUTE if setting.masters else WeightGradients.FP32
    precision = PrecisionConfig(policy=PolicyName.BF16, weight_gradients=rounded)
    policy = policy_of(precision)
    mesh = MeshConfig(fsdp=setting.expert, expert=setting.expert)
    placement = Placement(
        mesh=make_mesh(mesh, devices=list(devices)),
        rules=state_rules(ShardingConfig(), mesh),
    )
    execution = execution_on(
        placement,
        policy=policy if setting.masters else held_as_computed(policy),
        exchange=setting.exchange,
        remat=setting.remat,
        unroll=setting.unroll,
    )
    model = define_model(config, execution)
    optimizer = make_optimizer(optimizer_config, dims=model.dims, steps=_STEPS)
    shardings = state_shardings(model, optimizer, placement)
    step = make_train_step(
        make_gradient(model, training=training, placement=placement),
        optimizer,
        learning_rate=learning_rate(optimizer_config, steps=_STEPS),
        precision=precision,
        next_model_state=model.next_state,
        updates=placement.updates(model),
    )

    def in_place(state: Any, batch: Batch) -> tuple[Any, Any]:
        """Keeps moments in their format, though updates are computed in fp32."""
        after, metrics = step(state, batch)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), after, state), metrics

    def initial(seed: int) -> Any:
        state = initial_state(model, optimizer, precision=precision, seed=seed)
        return state if setting.masters else narrow_moments(state)

    def nothing() -> Batch[jax.Array]:
        tokens = jnp.zeros((setting.batch, setting.length), jnp.int32)
        weights = jnp.ones(tokens.shape, jnp.float32)
        return Batch(
            tokens=tokens, targets=tokens, segment_ids=None, positions=None, weights=weights
        )

    step_of_shapes = jax.jit(
        in_place,
        in_shardings=(shardings, placement.batch),
        out_shardings=(shardings, placement.replicated),
        donate_argnums=0,
        compiler_options=setting.options,
    ).trace(jax.eval_shape(functools.partial(initial, seed=0)), jax.eval_shape(nothing))
    return Traced(
        step=step_of_shapes,
        start=lambda seed: jax.jit(
            functools.partial(initial, seed=seed), out_shardings=shardings
        )(),
        placement=placement,
    )


def compiled(config: ModelConfig, setting: Setting) -> tuple[Program, list[jax.Array]]:
    """The compiled step, and the choices that each step will have left out."""
    form = traced(config, setting, jax.devices()[: setting.expert])
    began = time.perf_counter()
    program = form.step.lower().compile()
    compile_s = time.perf_counter() - began

    def put(tokens: np.ndarray, targets: np.ndarray) -> Batch:
        weights = np.ones(tokens.shape, np.float32)
        whole = Batch(
            tokens=tokens, targets=targets, segment_ids=None, positions=None, weights=weights
        )
        return jax.device_put(whole, form.placement.batch)

    def advance(state: Any, inputs: Any) -> tuple[Any, jax.Array]:
        state, metrics = program(state, inputs)
        lost.append(
            sum(
                (each.added.get("overflowed", jnp.zeros(())).sum() for each in metrics.sums),
                jnp.zeros(()),
            )
        )
        return state, metrics.loss

    lost: list[jax.Array] = []
    return Program(
        name=setting.name,
        start=form.start,
        put=put,
        advance=advance,
        temp_bytes=temp_bytes(program),
        need_bytes=step_bytes(program),
        compile_s=compile_s,
    ), lost


def measured(
    contenders: dict[str, Any], config: ModelConfig, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Medians over rounds in which each takes its turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, (name, contender) in itertools.product(range(args.rounds), contenders.items()):
        seconds[name].append(contender.time_steps(args.steps))
        print(f"    {name}: {1e3 * seconds[name][-1]:.2f} ms", flush=True)
    model = define_model(config, execution_on())
    flops = training_flops_per_token(model, args.length)
    peak = device_peak(jax.devices()[0].device_kind)
    rows = []
    for name, contender in contenders.items():
        step_s = statistics.median(seconds[name])
        shared = re.search(r" expert=(\d+)", name)
        devices = int(shared[1]) if shared else 1
        tokens_per_s = args.batch * args.length / step_s  # of a device
        row = {
            "name": name,
            "ms": 1e3 * step_s,
            "tokens_per_s_per_gpu": tokens_per_s,
            "tflops_per_gpu": tokens_per_s * flops / 1e12,
            "mfu": tokens_per_s * flops / peak.bf16_flops if peak else None,
            "devices": devices,
            "rounds_ms": [1e3 * each for each in seconds[name]],
            "losses": contender.losses[:3] + contender.losses[-1:],
        }
        if isinstance(contender, Contender):
            row |= {
                "temp_gib": contender.program.temp_bytes / 2**30,
                "compile_s": contender.program.compile_s,
            }
        print(
            f"{name}: {row['ms']:.2f} ms, {tokens_per_s:,.0f} tokens/s per GPU, "
            f"{row['tflops_per_gpu']:.1f} TFLOP/s, MFU {row['mfu'] or 0:.1%}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    """Prints each measurement as it is made, and writes all of them."""
    args = _arguments()
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    for name in args.models:
        config = MODELS[name]()
        contenders = _contenders(name, config, args)
        rows = measured(contenders, config, args) if contenders else []
        if args.trace is not None:
            _trace(contenders, rows, args.trace / name)
        result["rows"] += [{"model": name, "layers": config.num_layers, **row} for row in rows]
        result["clocks_after"] = clocks()
        del contenders
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=2) + "\n")


def _trace(contenders: dict[str, Any], rows: list[dict[str, Any]], directory: pathlib.Path) -> None:
    """A profile of each contender of this package; into its row what of communication is hidden."""
    for i, (contender, row) in enumerate(zip(contenders.values(), rows, strict=True)):
        if not isinstance(contender, Contender):
            continue
        with jax.profiler.trace(str(directory / str(i))):
            contender.time_steps(_TRACED_STEPS - 1)  # after one that it does first
        waterfall = explain(device_events(directory / str(i)), steps=_TRACED_STEPS).as_json(top=25)
        exposed = waterfall["by_kind_ms"].get("collective", 0.0)
        hidden = waterfall["hidden_ms"].get("collective", 0.0)
        row["waterfall"] = waterfall
        row["hidden_communication"] = hidden / (hidden + exposed) if hidden + exposed else None
        print(f"{row['name']}: communication exposed {exposed:.2f} ms, hidden {hidden:.2f}")


def _contenders(name: str, config: ModelConfig, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    forms = [ExchangeForm(form) for form in args.forms]
    for remat, unroll, expert in itertools.product(args.remat, args.unroll, args.expert):
        for form in forms if expert > 1 else forms[:1]:
            setting = Setting(
                batch=args.batch * expert,
                length=args.length,
                masters=args.weights == "master",
                accumulation=args.accumulation,
                remat=Remat(remat),
                unroll=unroll,
                expert=expert,
                exchange=ExchangeConfig(form=form, room_factor=args.room),
                options=parse_options(args.options.split(",")) if args.options else None,
            )
            try:
                program, lost = compiled(config, setting)
                if args.compile_only:
                    print(f"{name} {setting.name}: compile {program.compile_s:.1f} s", flush=True)
                    continue
                batch = data(config, batch=setting.batch, length=setting.length)
                contender = Contender.of(program, *batch)
                seconds = contender.time_steps(1)
            except (RuntimeError, ValueError) as error:  # one variant's failure is not the end
                print(f"{name} {setting.name}: FAILED {str(error)[:400]}", flush=True)
                continue
            print(
                f"{name} {setting.name}: first {1e3 * seconds:.1f} ms, "
                f"temp {program.temp_bytes / 2**30:.2f} GiB, compile {program.compile_s:.1f} s, "
                f"loss {contender.losses[0]:.4f}, left out {max(map(float, lost)):,.0f} choices",
                flush=True,
            )
            found[f"{name} {setting.name}"] = contender
    if args.torch:
        # Only where PyTorch and transformers are: no dependency of this package.
        module = importlib.import_module("experiments.bench.training.experts_torch")
        batch = data(config, batch=args.batch, length=args.length)
        try:
            contender = module.TorchStep(config, *batch)
            contender.time_steps(3)
            found[f"{name} torch"] = contender
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            print(f"{name} torch: FAILED {str(error)[:400]}", flush=True)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["qwen3", "mixtral"])
    parser.add_argument("--weights", choices=("bf16", "master"), default="bf16")
    parser.add_argument("--batch", type=int, default=4, help="sequences per GPU")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--remat", nargs="+", default=["none"])
    parser.add_argument("--unroll", nargs="+", type=int, default=[4])
    parser.add_argument(
        "--expert", nargs="+", type=int, default=[1], help="numbers of GPUs that share the experts"
    )
    parser.add_argument("--forms", nargs="+", default=["per_device"])
    parser.add_argument("--room", type=float, help="room_factor of the exchange; room for all")
    parser.add_argument("--options", help="XLA's, as name=value,name=value")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile-only", action="store_true", help="as for JAX's compile cache")
    parser.add_argument("--trace", type=pathlib.Path, help="where a profile of each is put")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
