"""A job: the jitted functions and shardings of a run on its mesh, made from the run's config.
Making a job initializes no parameter.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.stages import Wrapped

from jaxinfra.axes import BATCH
from jaxinfra.checkpoint import processes
from jaxinfra.config.exchange import ExchangeImplementation
from jaxinfra.config.finetune import AdapterKind
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.precision import Numerics
from jaxinfra.config.rl import EngineDevices
from jaxinfra.config.run import KeptValues, Remat, RunConfig
from jaxinfra.config.validate import may_keep_gathered, validate
from jaxinfra.data.batch import Batch, Rollout
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged, only
from jaxinfra.model.gradients import Gradients
from jaxinfra.model.quantized_base import base_shapes
from jaxinfra.numerics.policy import policy_of, stored_as_computed
from jaxinfra.parallel.copies import copying_axis
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.place_quantized import base_shardings
from jaxinfra.parallel.zigzag import to_zigzag
from jaxinfra.training.gradients import (
    AccumulatedGradient,
    GradientFunction,
    make_evaluation_step,
    make_target_value_step,
)
from jaxinfra.training.optim.learning_rate import learning_rate
from jaxinfra.training.optim.optimizer import make_optimizer, trained_by
from jaxinfra.training.pipeline_gradients import make_pipeline_gradient
from jaxinfra.training.recompute.budget import (
    Choice,
    GatherChoice,
    agreed_bytes,
    budget_bytes,
    with_keep_gathered,
)
from jaxinfra.training.recompute.optimal import KeptChoice, choose
from jaxinfra.training.state import (
    State,
    TrainState,
    state_around,
    state_shardings,
)
from jaxinfra.training.step import TrainStep, make_gradient_step, make_train_step, pass_over
from jaxinfra.training.xla_options import Options, compiler_options


def batch_in_zigzag(batch: Batch[np.ndarray], num_shards: int) -> Batch[np.ndarray]:
    """Reorders the tokens and positions of every row into the zig-zag order of sequence shards.

    Sums over tokens do not change: attention knows the order, and other layers read positions. A
    batch for one shard is returned unchanged.
    """
    if num_shards == 1:
        return batch
    if batch.positions is None:
        # The decoder would count by index, which is no longer the position.
        rows, length = batch.tokens.shape
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        batch = dataclasses.replace(batch, positions=positions)
    return jax.tree.map(lambda x: to_zigzag(np.asarray(x), num_shards), batch)


def with_frozen_argument[**P, R](
    make: Callable[[ModelDefinition], Callable[P, R]], model: ModelDefinition
) -> Callable[..., R]:
    """Returns ``make(model)`` as a function whose first argument is the frozen parameters, if the
    model has any.

    Captured in a closure, frozen parameters would become constants of the compiled program.
    """
    if not model.frozen:
        return make(model)

    def function(frozen: Parameters, *args: P.args, **kwargs: P.kwargs) -> R:
        return make(model.freeze(frozen))(*args, **kwargs)

    function.__name__ = make(model).__name__  # by which traces know it
    return function


@dataclasses.dataclass(frozen=True, slots=True)
class WithFrozenInputs:
    """A jitted, lowered or compiled function whose first argument, the frozen parameters, is
    already given.
    """

    stage: Any  # jax.stages.Wrapped, Lowered or Compiled
    frozen: Parameters

    def __call__(self, *args: Any) -> Any:
        """Runs the stage on the frozen parameters and these arguments."""
        return self.stage(self.frozen, *args)

    def lower(self, *args: Any) -> "WithFrozenInputs":
        """Lowers the jitted function for the frozen parameters and these arguments."""
        return WithFrozenInputs(self.stage.lower(self.frozen, *args), self.frozen)

    def compile(self) -> "WithFrozenInputs":
        """Compiles the lowered function."""
        return WithFrozenInputs(self.stage.compile(), self.frozen)

    def as_text(self) -> str:
        """Returns the text of the lowered or compiled program."""
        return self.stage.as_text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The jitted functions of a run, with their mesh and shardings."""

    config: RunConfig
    options: Options | None  # XLA's, of the training step
    model: ModelDefinition
    optimizer: optax.GradientTransformation
    placement: Placement
    shardings: TrainState[NamedSharding]
    frozen_shardings: Parameters  # of the frozen parameters; a tree like ``model.frozen``
    gradient: GradientFunction  # not jitted
    train_step: Wrapped  # a TrainStep, jitted; the state is donated
    pass_over: Callable[[State], State]  # jitted; advances the state past an excluded batch
    statistics_step: Wrapped | None  # ``train_step`` with statistics; None: the run has none
    evaluation_step: Wrapped  # (parameters and state, batch) -> (nll, targets), jitted
    # (parameters and state, batch) -> log probabilities of targets [B, T], replicated; jitted.
    target_value_step: Wrapped
    choice: Choice | KeptChoice | None = None  # remat choice, if the config has auto or optimal
    gathers: GatherChoice | None = None  # whether gathered weights are kept, if that was auto

    def initialize(self) -> TrainState[jax.Array]:
        """Initializes the training state of step 0 directly onto the mesh.

        DoRA's magnitudes are computed from the frozen weights, so ``with_frozen`` has to come
        first.
        """
        lora = self.config.lora
        measured = self.model.frozen if lora and lora.kind is AdapterKind.DORA else {}
        return jax.jit(self._initial, out_shardings=self.shardings)(measured)

    def _initial(self, beside: Parameters) -> TrainState[jax.Array]:
        key, _ = jax.random.split(jax.random.key(self.config.training.seed))
        parameters = self.model.initialize(key, beside=beside)
        return self._around(parameters, self.model.initial_state())

    def start_from(self, tree: Parameters) -> TrainState[jax.Array]:
        """Returns the training state of step 0 with the parameters and model state in ``tree``,
        whose buffers it takes over. State that is not in there is initialized.
        """

        def around(tree: Parameters) -> TrainState[jax.Array]:
            state = merged(self.model.initial_state(), only(tree, self.model.state_shapes))
            return self._around(only(tree, self.model.shapes), state)

        return jax.jit(around, out_shardings=self.shardings, donate_argnums=0)(tree)

    @functools.cached_property
    def gradient_step(self) -> Any:
        """Jitted (state, batch) -> ``Gradients``, unscaled; nothing is donated."""
        trained = trained_by(self.config.optimizer, self.model.dims)

        def make(model: ModelDefinition) -> Callable[[State, Batch], Gradients]:
            return make_gradient_step(self.gradient.of(model), trained=trained)

        step = jax.jit(with_frozen_argument(make, self.model))
        return WithFrozenInputs(step, self.model.frozen) if self.model.frozen else step

    def with_frozen(self, frozen: Parameters) -> "Job":
        """Returns the job with these values bound to its frozen parameters."""
        model = self.model.freeze(frozen)
        return dataclasses.replace(
            self,
            model=model,
            gradient=self.gradient.of(model),
            train_step=WithFrozenInputs(self.train_step, frozen),
            statistics_step=self.statistics_step and WithFrozenInputs(self.statistics_step, frozen),
            evaluation_step=WithFrozenInputs(self.evaluation_step, frozen),
            target_value_step=WithFrozenInputs(self.target_value_step, frozen),
        )

    def abstract_state(self) -> TrainState[jax.ShapeDtypeStruct]:
        """Returns the training state as shapes, dtypes and shardings, into which a checkpoint is
        restored.
        """
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self._around, self.model.shapes, self.model.state_shapes),
            self.shardings,
        )

    def _around(self, parameters: Parameters, model_state: Parameters) -> TrainState[jax.Array]:
        return state_around(
            parameters,
            model_state,
            self.optimizer,
            precision=self.config.precision,
            seed=self.config.training.seed,
            averages=self.config.optimizer.average is not None,
        )

    def put(self, batch: Batch) -> Batch:
        """Builds the global batch on the mesh from this process's rows; in zig-zag order if
        sequences are sharded.
        """
        batch = batch_in_zigzag(batch, self.config.mesh.sequence_shards)
        sharding, (part, parts) = self.placement.batch, self.process_share()

        def place(local: np.ndarray) -> jax.Array:
            first = part * len(local)

            def piece(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                start, stop, _ = index[0].indices(parts * len(local))
                return local[(slice(start - first, stop - first), *index[1:])]

            shape = (parts * len(local), *local.shape[1:])
            return jax.make_array_from_callback(shape, sharding, piece)

        return jax.tree.map(place, batch)

    def process_share(self) -> tuple[int, int]:
        """Returns the part of a batch's rows that this process's devices hold, as (index, number of
        equal parts).

        Processes whose devices differ only in mesh axes that do not split the batch hold the same
        part.
        """
        shards = self.placement.batch_shards
        held = self.placement.sharding((BATCH,)).addressable_devices_indices_map((shards,))
        mine = sorted({index[0].indices(shards)[0] for index in held.values() if index})
        first, count = mine[0], len(mine)
        if mine != list(range(first, first + count)) or shards % count or first % count:
            raise ConfigError(
                f"on this mesh process {jax.process_index()} would hold parts {mine} of a batch in "
                f"{shards}, and a process reads one stretch of rows; choose mesh axes whose sizes "
                "divide over the processes"
            )
        return first // count, shards // count


def make_job(
    config: RunConfig, *, traceable: bool = False, devices: Sequence[jax.Device] | None = None
) -> Job:
    """Validates the config and builds its job; raises ConfigError where it cannot run here.

    Settings left at "auto" are chosen first. With remat=auto and remat=optimal, steps are compiled
    until one fits in memory, and the job's config records the choice. ``sharding.keep_gathered``
    stays unset in the config, so that the run may continue on devices with other memory.

    Args:
        config: config of the run.
        traceable: compile the step so that a profiler's trace names every operation, at some cost
            in launches.
        devices: devices to build for, all by default, but for those that sample alone
            (``rl.engine_devices``); a planner passes devices that do not exist here.
    """
    validate(config)
    if devices is None and config.rl and config.rl.engine_devices is EngineDevices.OWN:
        devices = jax.devices()[: config.mesh.num_devices]
    build = functools.partial(_build_job, traceable=traceable, devices=devices)
    gathering_is_open = config.sharding.keep_gathered is None
    chosen = with_keep_gathered(config, gathered=False) if gathering_is_open else config
    if chosen.training.remat.is_open:
        job = _fitting_job(chosen, build, device=(devices or jax.local_devices())[0])
    else:
        job = build(chosen)
    if not gathering_is_open:
        return job
    if devices is None and may_keep_gathered(config):  # of devices elsewhere nobody knows
        job = _gathering_job(job, build, gib=config.training.memory_budget_gib)
    named = with_keep_gathered(job.config, gathered=None)
    return dataclasses.replace(job, config=named)


def _fitting_job(config: RunConfig, build: Callable[[RunConfig], Job], *, device: Any) -> Job:
    """The job with the cheapest recomputation that fits; all processes compile the same steps."""
    training = config.training

    def with_policy(remat: Remat, kept: tuple[KeptValues, ...] = ()) -> Job:
        named = dataclasses.replace(training, remat=remat, kept=kept, memory_budget_gib=None)
        return build(dataclasses.replace(config, training=named))

    def need(remat: Remat, kept: tuple[KeptValues, ...] = ()) -> int:
        return agreed_bytes(lower_step(with_policy(remat, kept)).compile())

    limit = processes.on_first(lambda: budget_bytes(training.memory_budget_gib, device))
    if limit is None:
        raise ConfigError(
            f"remat=auto and optimal: a {device.device_kind} device does not say how much memory "
            "it has; give training.memory_budget_gib, or name a remat"
        )
    full = with_policy(Remat.FULL)
    choice = choose(config, full.model, full.placement, budget_bytes=limit, need=need)
    return dataclasses.replace(with_policy(choice.remat, choice.kept), choice=choice)


def _gathering_job(job: Job, build: Callable[[RunConfig], Job], *, gib: float | None) -> Job:
    """The job that keeps gathered weights, if that fits; else the one given."""
    device = jax.local_devices()[0]
    limit = processes.on_first(lambda: budget_bytes(gib, device))
    if not limit:
        return job
    kept = build(with_keep_gathered(job.config, gathered=True))
    gathers = GatherChoice(needs_bytes=agreed_bytes(lower_step(kept).compile()), budget_bytes=limit)
    taken = kept if gathers.keeps else job
    return dataclasses.replace(taken, choice=job.choice, gathers=gathers)


def _build_job(config: RunConfig, *, traceable: bool, devices: Sequence[jax.Device] | None) -> Job:
    """Builds the job of a config that leaves nothing open."""
    placement = _placement(config, devices)
    model, frozen = _model(config, placement)
    optimizer = make_optimizer(config.optimizer, dims=model.dims, steps=config.training.steps)
    average = config.optimizer.average
    shardings = state_shardings(model, optimizer, placement, averages=average is not None)
    gradient = _gradient(config, model, placement)
    options = _options(config, placement, traceable=traceable)
    whole, rows, base = placement.replicated, placement.batch, (frozen,) if frozen else ()

    def train_step(model: ModelDefinition, dims: Parameters | None = None) -> TrainStep:
        return make_train_step(
            gradient.of(model),
            optimizer,
            learning_rate=learning_rate(config.optimizer, steps=config.training.steps),
            precision=config.precision,
            updates=placement.updates(model),
            average=average,
            dims=dims,
            trained=trained_by(config.optimizer, model.dims),
        )

    def statistics_step(model: ModelDefinition) -> TrainStep:
        execution = dataclasses.replace(model.execution, statistics=True)
        told = define_model(config.model, execution, lora=config.lora).freeze(model.frozen)
        return train_step(told, told.dims)

    def trained(make: Callable[[ModelDefinition], TrainStep]) -> Wrapped:
        return jax.jit(
            with_frozen_argument(make, model),
            in_shardings=(*base, shardings, rows),
            out_shardings=(shardings, whole),
            donate_argnums=len(base),
            compiler_options=options,
        )

    def evaluated(make: Callable[[ModelDefinition], Callable], **out: Any) -> Wrapped:
        return jax.jit(
            with_frozen_argument(make, model), in_shardings=(*base, shardings.tree, rows), **out
        )

    shards = placement.sequence_shards
    target_value_step = functools.partial(make_target_value_step, sequence_shards=shards)
    return Job(
        config=config,
        options=options,
        model=model,
        optimizer=optimizer,
        placement=placement,
        shardings=shardings,
        frozen_shardings=frozen,
        gradient=gradient,
        pass_over=jax.jit(pass_over, out_shardings=shardings, donate_argnums=0),
        train_step=trained(train_step),
        statistics_step=trained(statistics_step) if config.statistics.every is not None else None,
        evaluation_step=evaluated(make_evaluation_step),
        target_value_step=evaluated(target_value_step, out_shardings=whole),
    )


def _options(config: RunConfig, placement: Placement, *, traceable: bool) -> Options | None:
    """XLA's options of the step for the mesh's devices, which may be absent."""
    on_gpu = placement.mesh.devices.flat[0].platform == "gpu"
    copied = copying_axis(placement) is not None
    return compiler_options(config, on_gpu=on_gpu, traceable=traceable, by_copies=copied)


def _placement(config: RunConfig, devices: Sequence[jax.Device] | None) -> Placement:
    placement = Placement(
        mesh=make_mesh(config.mesh, devices=devices),
        rules=state_rules(config.sharding, config.mesh),
    )
    is_ragged = config.exchange.implementation is ExchangeImplementation.RAGGED
    if is_ragged and placement.mesh.devices.flat[0].platform == "cpu":
        raise UnsupportedError(
            "exchange.implementation=ragged: the CPU backend has no ragged_all_to_all; choose equal"
        )
    return placement


def _model(config: RunConfig, placement: Placement) -> tuple[ModelDefinition, Parameters]:
    """The model on the mesh, and shardings of its frozen parameters, which are shapes as yet."""
    training, policy = config.training, policy_of(config.precision)
    if config.lora is not None:
        policy = stored_as_computed(policy)
    execution = execution_on(
        placement,
        policy=policy,
        attention=training.attention,
        context_method=training.context_method,
        keep_gathered=bool(config.sharding.keep_gathered),
        exchange=config.exchange,
        remat=training.remat,
        kept=training.kept,
        unroll=training.unroll,
    )
    model = define_model(config.model, execution, lora=config.lora)
    if config.lora is None:
        return model, {}
    frozen = define_model(config.model, execution)
    shapes = base_shapes(frozen, config.lora.base)
    return model.freeze(shapes), base_shardings(placement, frozen, shapes)


def _gradient(config: RunConfig, model: ModelDefinition, placement: Placement) -> GradientFunction:
    training = config.training
    if config.mesh.num_stages > 1:
        return make_pipeline_gradient(
            model,
            training=training,
            pipeline=config.pipeline,
            placement=placement,
            rl=config.rl,
        )
    return AccumulatedGradient(
        model,
        training=training,
        placement=placement,
        preferences=config.preferences,
        rl=config.rl,
    )


@final
class StepPrograms:
    """A job's two training programs, without and with statistics, and the rule that selects one
    for each step. ``plain``, the program without statistics, may be replaced before its first call.
    """

    def __init__(self, job: Job):
        self.plain: Any = job.train_step
        self._statistics: Any = job.statistics_step
        self._every = job.config.statistics.every
        self._has_run: set[bool] = set()

    def wants_statistics(self, step: int) -> bool:
        """Whether this step runs the program with statistics."""
        return self._every is not None and step % self._every == 0

    def phase(self, step: int) -> str:
        """Returns "compile" if this step's program has not run yet, else "step"."""
        return "step" if self.wants_statistics(step) in self._has_run else "compile"

    def __call__(self, step: int, state: Any, batch: Batch) -> Any:
        """Runs the program that this step needs; ``state`` is donated."""
        self._has_run.add(self.wants_statistics(step))
        return (self._statistics if self.wants_statistics(step) else self.plain)(state, batch)


def marks_padding(config: RunConfig) -> bool:
    """Tells whether rows of sampled completions have segment ids, which tell padding from tokens.

    Experts must not choose by padding, nor balance it. Exact numerics have no segments on GPUs.
    """
    has_experts = any(isinstance(b.feed_forward, ExpertsConfig) for b in config.model.blocks)
    return has_experts and config.precision.numerics is not Numerics.EXACT


def lower_step(job: Job, *, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
    """Lowers the job's training step for packed rows, from shapes alone.

    Args:
        platforms: platforms to lower for; by default those of this machine's devices.
    """
    training = job.config.training
    shape = (training.batch_size, training.sequence_length)

    def rows(dtype: Any) -> Any:  # shapes in the place of arrays
        return jax.ShapeDtypeStruct(shape, dtype, sharding=job.placement.batch)

    ids = rows(jnp.int32)
    number = rows(jnp.dtype("float32"))
    preferences, rl = job.config.preferences, job.config.rl
    has_reference = preferences is not None and preferences.has_reference
    rollout: Any = None
    if rl is not None:
        has_reference = rl.kl > 0.0
        rollout = Rollout(advantages=number, old=number, importance=number, share=number)
    batch: Any = Batch(
        tokens=ids,
        targets=ids,
        segment_ids=ids if rl is None or marks_padding(job.config) else None,
        positions=None if rl is not None else ids,
        weights=number,
        reference=number if has_reference else None,
        rollout=rollout,
    )
    frozen = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        job.model.frozen,
        job.frozen_shardings,
    )
    base = (frozen,) if frozen else ()
    traced = job.train_step.trace(*base, job.abstract_state(), batch)
    return traced.lower() if platforms is None else traced.lower(lowering_platforms=platforms)
