"""Small decoders, packed batches and built steps, shared by the tests of models, steps and meshes.

Sizes divide by 8 where a mesh may shard them, and differ from each other so that a swapped dim
shows.
"""

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinfra.config.kinds import MlpKind, NormKind, NormPlacement
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    stacked,
)
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.precision import LossScaling, PolicyName, PrecisionConfig
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.config.run import ContextMethod, KeptValues, Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import ModelDefinition, define_model
from jaxinfra.numerics.loss_scale import initial_loss_scale
from jaxinfra.numerics.policy import policy_of
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement, path_name
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.job import batch_in_zigzag
from jaxinfra.training.optim.learning_rate import learning_rate
from jaxinfra.training.optim.optimizer import make_optimizer
from jaxinfra.training.state import TrainState, state_around, state_shardings
from jaxinfra.training.step import make_train_step
from tests.seeds import seeded

# Epsilon near the gradients' size keeps an update a smooth function of its gradient: at 1e-8 the
# first step is lr * sign(g), which turns rounding of a g near 0 into a full step.
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=2, epsilon=1e-2, clip_norm=0.5)
STEPS = 10
# LLVM's optimizations are half of the compile time and none of what is tested here. Where a session
# has said which it wants (conftest, ``make numerics``), its word holds.
_QUICK = {"xla_backend_optimization_level": 0}
COMPILER_OPTIONS = {} if next(iter(_QUICK)) in os.environ.get("XLA_FLAGS", "") else _QUICK
# By XLA's default code generator, which rounds alike whatever is fused: where two programs are the
# same to the last bit. The one that tests use for its speed contracts products with sums.
ALIKE_TO_THE_BIT = _QUICK | {"xla_backend_extra_options": ""}


def llama_like() -> ModelConfig:
    """GQA, rotary, RMSNorm, SwiGLU, tied embeddings."""
    block = BlockConfig(
        mixer=GroupedAttentionConfig(num_q_heads=8, num_kv_heads=4, head_dim=6, rope=RopeConfig()),
        feed_forward=MlpConfig(hidden_dim=40),
    )
    return ModelConfig(
        vocab_size=64,
        model_dim=32,
        max_positions=64,
        stacks=stacked(block, num_layers=2),
        tie_embeddings=True,
        init_std=0.2,
    )


def gpt_like() -> ModelConfig:
    """Learned positions, LayerNorm, GELU, biases everywhere, untied embeddings."""
    norm = NormConfig(kind=NormKind.LAYER, bias=True)
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=4, num_kv_heads=4, head_dim=6, rope=None, qkv_bias=True, out_bias=True
        ),
        feed_forward=MlpConfig(hidden_dim=40, kind=MlpKind.GELU, bias=True),
        norm=norm,
    )
    return dataclasses.replace(
        llama_like(),
        stacks=stacked(block, num_layers=llama_like().num_layers),
        learned_positions=True,
        final_norm=norm,
        tie_embeddings=False,
    )


def gemma_like() -> ModelConfig:
    """A pattern of two blocks, one with a window; soft caps, sandwich norms, qk-norm, scale
    offsets, a scaled embedding.
    """
    norm = NormConfig(scale_offset=1.0)
    attention = GroupedAttentionConfig(
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=6,
        rope=RopeConfig(theta=500.0),
        logit_soft_cap=2.0,
        scale=0.3,
        qk_norm=norm,
    )
    windowed, whole = (
        BlockConfig(
            mixer=dataclasses.replace(attention, window=window),
            feed_forward=MlpConfig(hidden_dim=40, kind=MlpKind.GEGLU_TANH),
            norm=norm,
            norm_placement=NormPlacement.SANDWICH,
        )
        for window in (5, None)
    )
    return dataclasses.replace(
        llama_like(),
        stacks=stacked(windowed, whole, num_layers=4),
        final_norm=norm,
        embedding_scale=5.5,
        logit_soft_cap=3.0,
    )


def mla_like() -> ModelConfig:
    """Latent attention: compressed queries with biases and neighbours rotated, then plain ones."""
    attention = LatentAttentionConfig(
        num_q_heads=8,
        query_rank=20,
        kv_rank=12,
        nope_dim=6,
        rope_dim=4,
        value_dim=7,
        rope=RopeConfig(theta=500.0, pairs=RopePairs.NEIGHBOURS),
        bias=True,
        scale=0.4,
    )
    plain = dataclasses.replace(
        attention, query_rank=None, rope=RopeConfig(), bias=False, scale=None
    )
    pattern = (
        BlockConfig(mixer=mixer, feed_forward=MlpConfig(hidden_dim=40))
        for mixer in (attention, plain)
    )
    return dataclasses.replace(
        llama_like(), stacks=stacked(*pattern, num_layers=2), tie_embeddings=False
    )


def packed_batch(
    *, rows: int = 8, length: int = 16, vocab_size: int = 64, seed: int = 0
) -> Batch[jax.Array]:
    """Rows of random documents, restarting positions, some padding; padding and the last target of
    a document do not count.
    """
    rng = np.random.default_rng(seeded(seed))
    tokens = rng.integers(0, vocab_size, (rows, length + 1), dtype=np.int32)
    segment_ids = np.full((rows, length), -1, np.int32)
    positions = np.zeros((rows, length), np.int32)
    weights = np.zeros((rows, length), np.float32)
    for row in range(rows):
        start = 0
        for document, size in enumerate(rng.integers(3, length // 2, size=length)):
            end = min(start + size, length - row * row % 7)
            segment_ids[row, start:end] = document
            positions[row, start:end] = np.arange(end - start)
            weights[row, start : max(end - 1, start)] = 1.0
            start = end
    return Batch(
        tokens=jnp.asarray(tokens[:, :-1]),
        targets=jnp.asarray(tokens[:, 1:]),
        segment_ids=jnp.asarray(segment_ids),
        positions=jnp.asarray(positions),
        weights=jnp.asarray(weights),
    )


def precision_of(policy: PolicyName) -> PrecisionConfig:
    scaling = LossScaling.DYNAMIC if policy is PolicyName.FP16 else LossScaling.NONE
    return PrecisionConfig(policy=policy, loss_scaling=scaling)


@functools.cache
def drawn(config: ModelConfig) -> Any:
    """Parameters that scatter as initial ones do, on the host. ``ModelDefinition.initialize``
    would be a program that takes longer to compile than a step.
    """
    rng = np.random.default_rng(seeded(1))  # batches are drawn by 0
    into_stream = config.init_std / math.sqrt(2 * config.num_layers)
    constant = {"scale": 1.0 - config.final_norm.scale_offset, "bias": 0.0}

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        *_, owner, name = path_name(path).split("/")
        if name in constant:
            return np.full(leaf.shape, constant[name], leaf.dtype)
        std = into_stream if owner in ("out", "down") else config.init_std
        return rng.normal(0.0, std, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, define_model(config, execution_on()).shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A step, jitted for a mesh as a training loop jits it."""

    model: ModelDefinition
    optimizer: optax.GradientTransformation
    placement: Placement
    shardings: TrainState
    precision: PrecisionConfig
    step: Any  # jitted, the state donated

    def initialize(self) -> TrainState:
        """To be jitted."""
        key, _ = jax.random.split(jax.random.key(0))
        return state_around(
            self.model.initialize(key),
            self.model.initial_state(),
            self.optimizer,
            precision=self.precision,
            seed=0,
        )

    @property
    def shapes(self) -> TrainState:
        """Of the state."""
        around = functools.partial(
            state_around, optimizer=self.optimizer, precision=self.precision, seed=0
        )
        return jax.eval_shape(around, self.model.shapes, self.model.state_shapes)

    def put(self, batch: Batch) -> Batch:
        """The batch in the order in which the mesh's devices hold it."""
        return batch_in_zigzag(jax.device_get(batch), self.placement.mesh.shape["context"])

    def state(self) -> TrainState:
        """The initial state, drawn once a model: drawing compiles longer than a step."""
        parameters = drawn(self.model.config)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.shapes)
        scale = dataclasses.replace(
            zeros.loss_scale, value=initial_loss_scale(self.precision).value
        )
        state = dataclasses.replace(zeros, parameters=parameters, loss_scale=scale)
        return jax.device_put(state, self.shardings)


def build(
    config: ModelConfig,
    *,
    mesh: MeshConfig | None = None,
    sharding: ShardingConfig | None = None,
    policy: PolicyName = PolicyName.FP32,
    precision: PrecisionConfig | None = None,
    optimizer_config: OptimizerConfig = OPTIMIZER,
    remat: Remat = Remat.NONE,
    kept: tuple[KeptValues, ...] = (),
    unroll: int = 1,
    accumulation: int = 1,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    batch_size: int = 8,
    sequence_length: int = 16,
    context_method: ContextMethod = ContextMethod.AUTO,
    compiler_options: dict[str, Any] = COMPILER_OPTIONS,
) -> Built:
    mesh = mesh or MeshConfig()
    precision = precision or precision_of(policy)
    devices = jax.devices()[: mesh.num_devices]
    placement = Placement(
        mesh=make_mesh(mesh, devices=devices), rules=state_rules(sharding or ShardingConfig())
    )
    execution = execution_on(
        placement,
        policy=policy_of(precision),
        context_method=context_method,
        keep_gathered=bool(sharding and sharding.keep_gathered),
        remat=remat,
        kept=kept,
        unroll=unroll,
    )
    model = define_model(config, execution)
    optimizer = make_optimizer(optimizer_config, dims=model.dims, steps=STEPS)
    training = TrainingConfig(
        steps=STEPS,
        batch_size=batch_size,
        sequence_length=sequence_length,
        accumulation=accumulation,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
    )
    step = make_train_step(
        AccumulatedGradient(model, training=training, placement=placement),
        optimizer,
        learning_rate=learning_rate(optimizer_config, steps=STEPS),
        precision=precision,
        updates=placement.updates(model),
    )
    shardings = state_shardings(model, optimizer, placement)
    return Built(
        model=model,
        optimizer=optimizer,
        placement=placement,
        shardings=shardings,
        precision=precision,
        step=jax.jit(
            step,
            in_shardings=(shardings, placement.batch),
            out_shardings=(shardings, placement.replicated),
            donate_argnums=0,
            compiler_options=compiler_options,
        ),
    )


def gradients_of(state: TrainState) -> Any:
    """The (clipped) gradient of a first step, read from AdamW's first moment (1 - beta1) g."""
    return optax.tree_utils.tree_get(state.optimizer, "mu")
