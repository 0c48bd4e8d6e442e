"""The two steps that are compared, compiled: ours and the hand-written one, from equal weights."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.bench.training import plain_step
from jaxinfra.config.model import ModelConfig, stacked
from jaxinfra.config.optimizer import LearningRateSchedule, OptimizerConfig
from jaxinfra.config.precision import Fp8Matmuls, PolicyName, PrecisionConfig, WeightGradients
from jaxinfra.config.run import AttentionImplementation, KeptValues, Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.model.definition import define_model
from jaxinfra.numerics.policy import policy_of
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.optim.learning_rate import learning_rate as schedule_of
from jaxinfra.training.optim.optimizer import make_optimizer
from jaxinfra.training.state import state_around
from jaxinfra.training.step import make_train_step
from jaxinfra.training.xla_options import Options

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step, and what it starts from."""

    name: str
    start: Callable[[int], Any]  # a seed to the state
    put: Callable[[np.ndarray, np.ndarray], Any]  # tokens and targets to the step's batch
    advance: Callable[[Any, Any], tuple[Any, jax.Array]]  # state, batch to state, loss
    temp_bytes: int
    need_bytes: int  # per device, with arguments and results
    compile_s: float


@dataclasses.dataclass
class Contender:
    """A program that carries its own state and trains on one batch."""

    program: Program
    state: Any
    batch: Any
    losses: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, program: Program, tokens: np.ndarray, targets: np.ndarray) -> "Contender":
        """Makes the contender's first state from seed 0 and places the batch."""
        return cls(program, program.start(0), program.put(tokens, targets))

    def advance(self) -> jax.Array:
        """One step; returns its loss, not yet waited for."""
        self.state, loss = self.program.advance(self.state, self.batch)
        return loss

    def time_steps(self, count: int) -> float:
        """Seconds per step over ``count`` steps, the queue drained before and after."""
        float(self.advance())
        start = time.perf_counter()
        losses = [self.advance() for _ in range(count)]
        self.losses += [float(loss) for loss in losses]
        return (time.perf_counter() - start) / count


class SharedState:
    """One set of parameters and moments that contenders advance alternately."""

    def __init__(self, programs: dict[str, Program], batch: tuple[Any, Any]):
        self.programs = programs
        shapes = {name: jax.eval_shape(program.start, 0) for name, program in programs.items()}
        self.states = {
            name: jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), each)
            for name, each in ((name, shape.model_state) for name, shape in shapes.items())
        }
        self.batch = next(iter(programs.values())).put(*batch)
        first = next(iter(programs))
        self.state = programs[first].start(0)

    def advance(self, name: str) -> jax.Array:
        """One step of a contender; its loss."""
        given = dataclasses.replace(self.state, model_state=self.states[name])
        self.state, loss = self.programs[name].advance(given, self.batch)
        self.states[name] = self.state.model_state
        return loss

    def time_steps(self, name: str, count: int) -> float:
        """Seconds per step, the queue drained before and after."""
        float(self.advance(name))
        began = time.perf_counter()
        losses = [self.advance(name) for _ in range(count)]
        jax.block_until_ready(losses)
        taken = (time.perf_counter() - began) / count
        last = float(losses[-1])
        print(f"{name}: {1e3 * taken:.1f} ms, loss {last:.4f}", flush=True)
        # Arithmetic on what is not finite draws less power, and so would look fast.
        assert math.isfinite(last), f"{name}: loss {last}"
        return taken


def without_rope_scaling(config: ModelConfig) -> ModelConfig:
    """Gives a model plain rotary embeddings, as the hand-written step has."""

    def plain(block):
        rope = dataclasses.replace(block.mixer.rope, scaling=None, theta=500_000.0)
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, rope=rope))

    pattern = (plain(block) for block in config.blocks)
    return dataclasses.replace(config, stacks=stacked(*pattern, num_layers=config.num_layers))


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
    unroll: int = 1,
    kept: tuple[KeptValues, ...] = (),
    weight_gradients: str = "fp32",
    fp8: Fp8Matmuls | None = None,
    learning_rate: float = LEARNING_RATE,
    warmup: int = 0,
    clip_norm: float | None = None,
    options: Options | None = None,
) -> Program:
    """This package's step at bf16; recomputation, attention and XLA's options as named.

    Args:
        kept: what remat=chosen keeps.
        fp8: of projections; None: none is in 8 bits.
    """
    steps = 1_000_000  # length of a constant schedule, never reached
    training = TrainingConfig(
        steps=steps,
        batch_size=batch,
        sequence_length=length,
        remat=Remat(remat),
        kept=kept,
        unroll=unroll,
    )
    optimizer_config = OptimizerConfig(
        learning_rate=learning_rate,
        schedule=LearningRateSchedule.CONSTANT,
        warmup_steps=warmup,
        weight_decay=WEIGHT_DECAY,
        clip_norm=clip_norm,
    )
    precision = PrecisionConfig(
        policy=PolicyName.BF16, weight_gradients=WeightGradients(weight_gradients), fp8=fp8
    )
    execution = execution_on(
        policy=policy_of(precision),
        attention=AttentionImplementation(attention),
        remat=training.remat,
        kept=kept,
        unroll=training.unroll,
    )
    model = define_model(config, execution)
    optimizer = make_optimizer(optimizer_config, dims=model.dims, steps=steps)
    step = make_train_step(
        AccumulatedGradient(model, training=training),
        optimizer,
        learning_rate=schedule_of(optimizer_config, steps=steps),
        precision=precision,
    )

    @jax.jit
    def start(seed: int) -> Any:
        key, _ = jax.random.split(jax.random.key(seed))
        parameters, model_state = model.initialize(key), model.initial_state()
        return state_around(parameters, model_state, optimizer, precision=precision, seed=seed)

    def put(tokens: np.ndarray, targets: np.ndarray) -> Batch:
        weights = np.ones(tokens.shape, np.float32)
        whole = Batch(
            tokens=tokens, targets=targets, segment_ids=None, positions=None, weights=weights
        )
        return jax.device_put(whole)

    began = time.perf_counter()
    jitted = jax.jit(step, donate_argnums=0, compiler_options=options)
    shapes = jax.eval_shape(lambda: start(0)), put(*data(config, batch=batch, length=length))
    compiled = jitted.lower(*shapes).compile()
    compile_s = time.perf_counter() - began

    def advance(state: Any, inputs: Any) -> tuple[Any, jax.Array]:
        state, metrics = compiled(state, inputs)
        return state, metrics.loss

    name = f"ours remat={remat} unroll={unroll} attention={attention}"
    if weight_gradients != "fp32":
        name += f" weight_gradients={weight_gradients}"
    if fp8 is not None:
        name += f" fp8={fp8.scaling.value}"
    return Program(
        name=name,
        start=start,
        put=put,
        advance=advance,
        temp_bytes=temp_bytes(compiled),
        need_bytes=step_bytes(compiled),
        compile_s=compile_s,
    )


def plain(
    config: ModelConfig,
    *,
    batch: int,
    length: int,
    remat: str,
    learning_rate: float = LEARNING_RATE,
    warmup: int = 0,
    clip_norm: float | None = None,
    options: Options | None = None,
) -> Program:
    """The hand-written step, from our initial weights."""
    optimizer, step = plain_step.make_step(
        _plain_shape(config, batch=batch, length=length),
        remat=remat,
        learning_rate=learning_rate,
        weight_decay=WEIGHT_DECAY,
        warmup=warmup,
        clip_norm=clip_norm,
    )

    @jax.jit
    def start(seed: int) -> Any:
        params = _plain_weights(config, seed)
        return params, optimizer.init(params)

    began = time.perf_counter()
    shapes = jax.eval_shape(lambda: start(0)), data(config, batch=batch, length=length)
    compiled = step.lower(*shapes[0], *shapes[1]).compile(compiler_options=options)
    compile_s = time.perf_counter() - began

    def advance(state: Any, inputs: Any) -> tuple[Any, jax.Array]:
        params, opt_state, loss = compiled(*state, *inputs)
        return (params, opt_state), loss

    return Program(
        name=f"plain remat={remat}",
        start=start,
        put=lambda tokens, targets: jax.device_put((tokens, targets)),
        advance=advance,
        temp_bytes=temp_bytes(compiled),
        need_bytes=step_bytes(compiled),
        compile_s=compile_s,
    )


def plain_reordered(program: Program, config: ModelConfig, *, batch: int, length: int) -> Program:
    """``plain``'s program, not compiled again, with every sum in another order.

    Channels of the initial weights and rows of each batch are permuted: the same function of the
    same weights and text, so that only rounding tells it from ``program``.
    """
    shape = _plain_shape(config, batch=batch, length=length)
    permuted = jax.jit(functools.partial(plain_step.reordered, shape))

    def start(seed: int) -> Any:
        params, zeros = program.start(seed)
        return permuted(params), zeros

    return dataclasses.replace(
        program,
        name=f"{program.name} reordered",
        start=start,
        put=lambda tokens, targets: program.put(tokens[::-1], targets[::-1]),
        compile_s=0.0,
    )


def _plain_shape(config: ModelConfig, *, batch: int, length: int) -> plain_step.Shape:
    block = config.blocks[0]
    assert block.feed_forward is not None, "presets"
    return plain_step.Shape(
        layers=config.num_layers,
        width=config.model_dim,
        heads=block.mixer.num_q_heads,
        kv_heads=block.mixer.num_kv_heads,
        hidden=block.feed_forward.hidden_dim,
        vocab=config.vocab_size,
        batch=batch,
        length=length,
    )


def _plain_weights(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Our initial weights in the hand-written step's layout."""
    model = define_model(config, execution_on())
    init_key, _ = jax.random.split(jax.random.key(seed))
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


def temp_bytes(compiled: Any) -> int:
    """Bytes that a compiled program allocates beside arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)
