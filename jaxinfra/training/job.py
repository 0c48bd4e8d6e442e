"""From a run's config to what the loop needs: placed, jitted, abstract; no parameter is drawn."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxinfra.config.run import RunConfig, validate
from jaxinfra.data.batch import Batch
from jaxinfra.layers.execution import Execution
from jaxinfra.models.definition import ModelDefinition, Parameters, define_model
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.ops.attention import named_attention
from jaxinfra.optim.optimizer import make_optimizer
from jaxinfra.optim.schedule import learning_rate
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.training.gradients import make_evaluation_step, make_gradient
from jaxinfra.training.state import TrainState, initial_state, state_shardings
from jaxinfra.training.step import TrainStep, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run's functions on its mesh."""

    config: RunConfig
    model: ModelDefinition
    optimizer: optax.GradientTransformation
    placement: Placement
    shardings: TrainState[NamedSharding]
    train_step: TrainStep  # jitted; the state is donated
    evaluation_step: Callable[[Parameters, Batch], tuple[jax.Array, jax.Array]]  # jitted

    def initialize(self) -> TrainState[jax.Array]:
        """Draws the initial state directly onto the mesh."""
        return jax.jit(self._initial, out_shardings=self.shardings)()

    def abstract_state(self) -> TrainState[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(self._initial),
            self.shardings,
        )

    def _initial(self) -> TrainState[jax.Array]:
        return initial_state(
            self.model,
            self.optimizer,
            precision=self.config.precision,
            seed=self.config.training.seed,
        )

    def put(self, batch: Batch) -> Batch:
        """This process's rows, as part of a global batch on the mesh."""
        sharding = self.placement.batch
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch
        )


def keep_compiled_programs(cache_dir: Path) -> None:
    """A second start of the same program on the same devices reads it instead of compiling it."""
    directory = cache_dir / "xla"
    directory.mkdir(parents=True, exist_ok=True)  # JAX itself would only warn where it cannot be
    jax.config.update("jax_compilation_cache_dir", str(directory))


# XLA replays whole stretches of a GPU program as CUDA graphs, and a trace then names the graph
# where it would name the operation and its scope.
_TRACEABLE_ON_GPU = {"xla_gpu_enable_command_buffer": ""}


def make_job(config: RunConfig, *, traceable: bool = False) -> Job:
    """Validates the config and builds its job; raises ConfigError where it cannot run here.

    Args:
        traceable: compile the step so that a profiler's trace names every operation, at some cost
            in launches.
    """
    validate(config)
    training = config.training
    placement = Placement(mesh=make_mesh(config.mesh))
    execution = Execution(
        policy=POLICIES[config.precision.policy],
        attend=named_attention(training.attention),
        constrain=placement.constraint(),
        remat=training.remat,
        unroll=training.unroll,
    )
    model = define_model(config.model, execution)
    optimizer = make_optimizer(config.optimizer, dims=model.dims, steps=training.steps)
    shardings = state_shardings(model, optimizer, placement)
    step = make_train_step(
        make_gradient(model, training=training),
        optimizer,
        learning_rate=learning_rate(config.optimizer, steps=training.steps),
        precision=config.precision,
    )
    whole, rows = placement.replicated, placement.batch
    return Job(
        config=config,
        model=model,
        optimizer=optimizer,
        placement=placement,
        shardings=shardings,
        train_step=jax.jit(
            step,
            in_shardings=(shardings, rows),
            out_shardings=(shardings, whole),
            donate_argnums=0,
            compiler_options=(
                _TRACEABLE_ON_GPU if traceable and jax.default_backend() == "gpu" else None
            ),
        ),
        evaluation_step=jax.jit(
            make_evaluation_step(model), in_shardings=(shardings.parameters, rows)
        ),
    )
