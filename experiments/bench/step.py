"""Ours beside the plain-JAX step: same shapes, same initial weights, same data, one process.

    python -m experiments.bench.step                   # Llama-3.2-1B shapes, one GPU
    python -m experiments.bench.step --preset tiny     # a check on a CPU

Variants run first, each alone; then the best of each side alternate, so that clocks and
temperature hit both alike. Figures are medians over alternations.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.bench import plain_step
from experiments.bench.environment import clocks, environment
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import OptimizerConfig, Schedule
from jaxinfra.config.precision import PolicyName, PrecisionConfig, WeightGradients
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import AttentionImplementation, Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.diagnostics.trace import device_events
from jaxinfra.diagnostics.waterfall import explain
from jaxinfra.layers.execution import Execution
from jaxinfra.models.definition import ModelDefinition, define_model
from jaxinfra.numerics.policy import policy_of
from jaxinfra.ops.attention import named_attention
from jaxinfra.optim.optimizer import make_optimizer
from jaxinfra.optim.schedule import learning_rate
from jaxinfra.training.gradients import make_gradient
from jaxinfra.training.state import initial_state
from jaxinfra.training.step import make_train_step
from jaxinfra.training.xla_options import Options

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1


@dataclasses.dataclass
class Contender:
    """A compiled step that carries its own state."""

    name: str
    advance: Callable[[], jax.Array]  # one step; returns its loss, not yet waited for
    temp_bytes: int
    compile_s: float
    losses: list[float] = dataclasses.field(default_factory=list)

    def time_steps(self, count: int) -> float:
        """Seconds a step over ``count`` steps, the queue drained before and after."""
        float(self.advance())
        start = time.perf_counter()
        losses = [self.advance() for _ in range(count)]
        self.losses += [float(loss) for loss in losses]
        return (time.perf_counter() - start) / count


def without_rope_scaling(config: ModelConfig) -> ModelConfig:
    """The same shapes with plain rotary, as the hand-written step has."""

    def plain(block):
        rope = dataclasses.replace(block.attention.rope, scaling=None, theta=500_000.0)
        return dataclasses.replace(block, attention=dataclasses.replace(block.attention, rope=rope))

    return dataclasses.replace(config, blocks=tuple(plain(block) for block in config.blocks))


def data(config: ModelConfig, *, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, uniform over the vocabulary, the same for both sides."""
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length + 1), np.int32)
    return ids[:, :-1], ids[:, 1:]


def ours(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    remat: str,
    attention: str,
    steps: int,
    unroll: int = 1,
    weight_gradients: str = "fp32",
    compiler_options: Options | None = None,
) -> tuple[Contender, ModelDefinition]:
    """This package's step at bf16; recomputation, attention and XLA's options as named."""
    training = TrainingConfig(
        steps=steps,
        batch_size=batch,
        sequence_length=length,
        remat=Remat(remat),
        unroll=unroll,
    )
    optimizer_config = OptimizerConfig(
        learning_rate=LEARNING_RATE,
        schedule=Schedule.CONSTANT,
        weight_decay=WEIGHT_DECAY,
        clip_norm=None,
    )
    precision = PrecisionConfig(
        policy=PolicyName.BF16, weight_gradients=WeightGradients(weight_gradients)
    )
    execution = Execution(
        policy=policy_of(precision),
        attend=named_attention(AttentionImplementation(attention)),
        remat=training.remat,
        unroll=training.unroll,
    )
    model = define_model(config, execution)
    optimizer = make_optimizer(optimizer_config, dims=model.dims, steps=steps)
    step = make_train_step(
        make_gradient(model, training=training),
        optimizer,
        learning_rate=learning_rate(optimizer_config, steps=steps),
        precision=precision,
    )
    state = jax.jit(
        functools.partial(initial_state, model, optimizer, precision=precision, seed=0)
    )()
    tokens, targets = data(config, batch=batch, length=length)
    inputs = jax.device_put(
        Batch(
            tokens=tokens,
            targets=targets,
            segment_ids=None,
            positions=None,
            weights=np.ones(tokens.shape, np.float32),
        )
    )
    start = time.perf_counter()
    step = jax.jit(step, donate_argnums=0, compiler_options=compiler_options)
    compiled = step.lower(state, inputs).compile()
    compile_s = time.perf_counter() - start

    def advance() -> jax.Array:
        nonlocal state
        state, metrics = compiled(state, inputs)
        return metrics.loss

    name = f"ours remat={remat} unroll={unroll} attention={attention}"
    return Contender(name, advance, _temp_bytes(compiled), compile_s), model


def plain(config: ModelConfig, *, batch: int, length: int, remat: str, steps: int) -> Contender:
    """The hand-written step, from the same initial weights."""
    block = config.blocks[0]
    shape = plain_step.Shape(
        layers=config.num_layers,
        width=config.model_dim,
        heads=block.attention.num_q_heads,
        kv_heads=block.attention.num_kv_heads,
        hidden=block.mlp.hidden_dim,
        vocab=config.vocab_size,
        batch=batch,
        length=length,
    )
    del steps
    optimizer, step = plain_step.make_step(
        shape, remat=remat, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY
    )
    params = jax.jit(functools.partial(_plain_weights, config))()
    opt_state = jax.jit(optimizer.init)(params)
    tokens, targets = (jax.device_put(x) for x in data(config, batch=batch, length=length))
    start = time.perf_counter()
    compiled = step.lower(params, opt_state, tokens, targets).compile()
    compile_s = time.perf_counter() - start

    def advance() -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = compiled(params, opt_state, tokens, targets)
        return loss

    return Contender(f"plain remat={remat}", advance, _temp_bytes(compiled), compile_s)


def _plain_weights(config: ModelConfig) -> dict[str, Any]:
    """Our initial weights in the hand-written step's layout."""
    model = define_model(config, Execution())
    init_key, _ = jax.random.split(jax.random.key(0))
    params = model.initialize(init_key)
    layers = params["blocks"][0]
    attention, mlp = layers["attention"], layers["mlp"]
    n, d = config.num_layers, config.model_dim
    return {
        "embed": params["embedding"]["table"],
        "norm": params["final_norm"]["scale"],
        "layers": {
            "q": attention["query"]["weight"].reshape(n, d, -1),
            "k": attention["key"]["weight"].reshape(n, d, -1),
            "v": attention["value"]["weight"].reshape(n, d, -1),
            "o": attention["out"]["weight"].reshape(n, -1, d),
            "gate": mlp["gate"]["weight"],
            "up": mlp["up"]["weight"],
            "down": mlp["down"]["weight"],
            "norm1": layers["attention_norm"]["scale"],
            "norm2": layers["mlp_norm"]["scale"],
        },
    }


def _temp_bytes(compiled: Any) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


def step_flops(config: ModelConfig, num_parameters: int, *, batch: int, length: int) -> float:
    """6 N FLOPs a token and 12 H T a causal token pair's half, per layer, forward + backward."""
    attention = config.blocks[0].attention
    width = attention.num_q_heads * attention.head_dim
    core = 3 * 0.5 * 4 * batch * length**2 * width * config.num_layers
    return 6.0 * num_parameters * batch * length + core


def main() -> None:
    """Runs the comparison, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(prog="jaxinfra bench step", description=__doc__)
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="alternations of the two best")
    parser.add_argument("--remat", nargs="+", default=["dots", "named"], help="ours")
    parser.add_argument("--unroll", nargs="+", type=int, default=[1], help="layers a loop body")
    parser.add_argument("--plain-remat", nargs="*", default=["dots"])
    parser.add_argument("--attention", nargs="+", default=["auto"])
    parser.add_argument("--trace", type=pathlib.Path, help="where to trace the two best")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="JSON file")
    args = parser.parse_args()
    config = without_rope_scaling(MODELS[args.preset]())
    sizes = {"batch": args.batch, "length": args.length}
    total = args.steps * (args.rounds + 1) + args.rounds + 10

    rows: list[dict[str, Any]] = []
    best: dict[str, tuple[float, Callable[[], Contender]]] = {}
    num_parameters = define_model(config, Execution()).num_parameters
    flops = step_flops(config, num_parameters, **sizes)
    makers: list[tuple[str, Callable[[], Contender]]] = [
        ("plain", functools.partial(plain, config, **sizes, remat=remat, steps=total))
        for remat in args.plain_remat
    ]
    for attention in args.attention:
        for remat, unroll in itertools.product(args.remat, args.unroll):
            make = functools.partial(
                ours,
                config,
                **sizes,
                remat=remat,
                unroll=unroll,
                attention=attention,
                steps=total,
            )
            makers.append(("ours", lambda make=make: make()[0]))
    for side, make in makers:
        try:
            contender = make()
            seconds = contender.time_steps(args.steps)
        except (RuntimeError, ValueError) as error:  # one variant's failure is a row, not the end
            rows.append({"side": side, "error": str(error)[:300]})
            print(f"{side}: FAILED {str(error)[:300]}", flush=True)
            continue
        rows.append(_row(side, contender, seconds, flops, sizes))
        if side not in best or seconds < best[side][0]:
            best[side] = (seconds, make)
        del contender
    result = {"environment": environment(), "shapes": {"preset": args.preset, **sizes}}
    result |= {"num_parameters": num_parameters, "variants": rows}
    if len(best) == 2:
        result["alternating"] = _alternate(best, args, flops, sizes)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def _row(side: str, contender: Contender, seconds: float, flops: float, sizes: dict[str, int]):
    row = {
        "side": side,
        "name": contender.name,
        "ms": seconds * 1e3,
        "tflops": flops / seconds / 1e12,
        "tokens_per_s": sizes["batch"] * sizes["length"] / seconds,
        "temp_gib": contender.temp_bytes / 2**30,
        "compile_s": contender.compile_s,
        "first_loss": contender.losses[0],
        "last_loss": contender.losses[-1],
    }
    print(
        f"{row['name']:40s} {row['ms']:9.2f} ms {row['tflops']:7.1f} TFLOP/s "
        f"{row['tokens_per_s']:9.0f} tokens/s temp {row['temp_gib']:5.1f} GiB "
        f"compile {row['compile_s']:5.1f} s loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}",
        flush=True,
    )
    return row


def _alternate(best: dict[str, tuple[float, Callable[[], Contender]]], args, flops, sizes):
    contenders = {side: make() for side, (_, make) in best.items()}
    seconds: dict[str, list[float]] = {side: [] for side in contenders}
    for _ in range(args.rounds):
        for side, contender in contenders.items():
            seconds[side].append(contender.time_steps(args.steps))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    rows = {s: _row(s, contenders[s], medians[s], flops, sizes) for s in contenders}
    losses = [np.asarray(contenders[side].losses) for side in ("plain", "ours")]
    difference = float(np.max(np.abs(losses[0] - losses[1]) / losses[0]))
    ratio = medians["plain"] / medians["ours"]
    traces = {}
    if args.trace is not None:
        traces = {side: _trace(contenders[side], args.trace / side) for side in contenders}
    print(f"ours / plain: {ratio:.3f}x; losses differ by at most {difference:.2e} relative")
    return {
        "rows": rows,
        "rounds_ms": {side: [1e3 * s for s in values] for side, values in seconds.items()},
        "speed_ratio": ratio,
        "max_relative_loss_difference": difference,
        "losses": {side: contenders[side].losses for side in contenders},
        "clocks_after": clocks(),
        "traces": traces,
    }


def _trace(contender: Contender, directory: pathlib.Path) -> dict[str, Any]:
    """Milliseconds a step by scope, and the longest kernels."""
    steps = 3
    with jax.profiler.trace(str(directory)):
        for _ in range(steps):
            jax.block_until_ready(contender.advance())
    found = explain(device_events(directory), steps=steps)
    print(contender.name, {k: round(ms, 2) for k, ms in found.by_scope().items()}, flush=True)
    return found.as_json(top=60)


if __name__ == "__main__":
    main()
