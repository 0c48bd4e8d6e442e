"""A whole run: the configs of its parts, how long it trains, and the checks that span them."""

import dataclasses
import enum

from jaxinfra.config.data import DataConfig
from jaxinfra.config.divides import check_divides
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.finetune import InitConfig, LoraConfig
from jaxinfra.config.limits import require_within
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    GroupedAttentionConfig,
    LatentAttentionConfig,
    ModelConfig,
)
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.own import OwnMixer
from jaxinfra.config.pipeline import PipelineConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig, StoredWeights, WeightGradients
from jaxinfra.config.reliability import ReliabilityConfig
from jaxinfra.core.errors import ConfigError


class Remat(enum.StrEnum):
    """What the backward pass recomputes, per block (Chen et al. 2016)."""

    NONE = "none"  # nothing: keep every intermediate
    DOTS = "dots"  # all but matmul and attention outputs
    MLP = "mlp"  # as dots, and the MLP's hidden layer, its widest, too
    NAMED = "named"  # all but attention's output and logsumexp (Korthikanti et al. 2022: selective)
    FULL = "full"  # everything: keep block inputs only
    AUTO = "auto"  # the first of these, in this order, whose compiled step fits the memory budget


class AttentionImplementation(enum.StrEnum):
    """Which attention runs; a named one refuses what it cannot do."""

    AUTO = "auto"
    HOPPER = "hopper"
    CUDNN = "cudnn"
    XLA = "xla"
    REFERENCE = "reference"


class ContextMethod(enum.StrEnum):
    """How queries meet the keys of other devices on a mesh with a context axis."""

    AUTO = "auto"  # the ring; in a pipeline all_gather
    RING = "ring"  # keys travel round the devices, hidden behind attention (Liu et al. 2023)
    ULYSSES = "ulysses"  # all-to-all: heads instead of tokens on each (Jacobs et al. 2023)
    ALL_GATHER = "all_gather"  # all keys on every device (Llama 3, section 3.3.2)


LATENT_METHODS = (ContextMethod.AUTO, ContextMethod.ALL_GATHER)
"""Those of latent attention: all latents on every device, which rebuilds its heads from them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Length, batch and step of a training run.

    Examples:
        >>> training = jaxinfra.TrainingConfig(steps=500, batch_size=32, sequence_length=1024)
        >>> training.batch_size * training.sequence_length  # tokens per step
        32768
    """

    steps: int  # optimizer steps
    batch_size: int  # sequences a step, over all devices and accumulation
    sequence_length: int  # tokens
    accumulation: int = 1  # micro-batches per step
    remat: Remat = Remat.NONE  # what the backward pass computes again
    memory_budget_gib: float | None = None  # of a device, for remat=auto; None: what it has
    unroll: int = 1  # layers in one body of the loop over layers; all of them: no loop
    xla_options: tuple[str, ...] = ()  # "name=value", on top of what is known to be good here
    attention: AttentionImplementation = AttentionImplementation.AUTO  # who computes attention
    # How a sequence over several devices attends.
    context_method: ContextMethod = ContextMethod.AUTO
    loss: str | None = None  # your own: a part, (logits, targets, *, weights) -> loss of each token
    z_loss: float = 0.0  # weight of logsumexp(logits)^2 (PaLM, section 5)
    label_smoothing: float = 0.0  # of the target's probability, spread over all ids; not evaluated
    seed: int = 0  # of initial weights, data order and dropout
    log_every: int = 1  # steps between progress lines; metrics.jsonl holds every step
    evaluate_every: int | None = None  # steps; None: at the end only
    max_bad_steps: int = 20  # non-finite steps in a row before the run stops

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "sequence_length",
            "accumulation",
            "unroll",
            "log_every",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        require_within(
            steps=self.steps,
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            sequence_length=self.sequence_length,
            tokens_a_step=self.batch_size * self.sequence_length,
        )
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise ConfigError(f"evaluate_every={self.evaluate_every} must be at least 1, or none")
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"batch_size={self.batch_size} is not a multiple of accumulation="
                f"{self.accumulation}; micro-batches are equal"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(
                f"seed={self.seed} must lie in [0, 2^32): larger ones are not told apart"
            )
        if self.memory_budget_gib is not None and (
            self.memory_budget_gib <= 0 or self.remat != Remat.AUTO
        ):
            raise ConfigError(
                f"memory_budget_gib={self.memory_budget_gib} with remat={self.remat.value}: a "
                "budget is more than 0, and only remat=auto chooses by it"
            )
        if self.loss is not None and (self.z_loss or self.label_smoothing):
            raise ConfigError(
                f"loss={self.loss!r} with z_loss={self.z_loss} and label_smoothing="
                f"{self.label_smoothing}: these are of the cross entropy; add them to your own loss"
            )
        if self.z_loss < 0:
            raise ConfigError(f"z_loss={self.z_loss} must not be negative")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept.

    Examples:
        >>> checkpoint = jaxinfra.CheckpointConfig(every=100, keep_last=3)
    """

    every: int | None = None  # steps; None: at the end and on a signal only
    keep_last: int = 2  # newest checkpoints that stay
    keep_best: int = 1  # by held-out loss

    def __post_init__(self) -> None:
        if (self.every is not None and self.every < 1) or self.keep_last < 1 or self.keep_best < 0:
            raise ConfigError(
                f"checkpoint every={self.every} and keep_last={self.keep_last} must be at least 1 "
                f"and keep_best={self.keep_best} not negative"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides what a run computes.

    Examples:
        >>> config = jaxinfra.preset("tiny")
        >>> isinstance(config, jaxinfra.RunConfig), config.training.batch_size
        (True, 16)
        >>> config = dataclasses.replace(config, mesh=jaxinfra.MeshConfig(fsdp=4))
    """

    model: ModelConfig  # what is trained
    data: DataConfig  # what it reads
    optimizer: OptimizerConfig  # how it learns
    training: TrainingConfig  # how long, in which batches
    precision: PrecisionConfig = PrecisionConfig()  # number formats
    mesh: MeshConfig = MeshConfig()  # devices, by axis
    sharding: ShardingConfig = ShardingConfig()  # what lies where, where there is a choice
    pipeline: PipelineConfig = PipelineConfig()  # of stages, with mesh.pipe
    exchange: ExchangeConfig = ExchangeConfig()  # of tokens between experts, with mesh.expert
    checkpoint: CheckpointConfig = CheckpointConfig()  # when states are saved
    reliability: ReliabilityConfig = ReliabilityConfig()  # what is watched
    init: InitConfig | None = None  # None: random weights
    lora: LoraConfig | None = None  # None: every parameter is trained


def validate(run: RunConfig) -> None:
    """Checks rules that span configs; raises ConfigError naming values, rule and remedy."""
    training, mesh, model = run.training, run.mesh, run.model
    micro_batch = training.batch_size // training.accumulation
    if micro_batch % mesh.num_data_shards:
        raise ConfigError(
            f"a micro-batch of {micro_batch} sequences (batch_size={training.batch_size} / "
            f"accumulation={training.accumulation}) does not divide over replica={mesh.replica} x "
            f"fsdp={mesh.fsdp}; make it a multiple of {mesh.num_data_shards}"
        )
    if training.sequence_length > model.max_positions:
        raise ConfigError(
            f"sequence_length={training.sequence_length} exceeds the model's max_positions="
            f"{model.max_positions}; shorten the sequence or raise model.max_positions"
        )
    if run.optimizer.warmup_steps > training.steps:
        raise ConfigError(
            f"warmup_steps={run.optimizer.warmup_steps} exceeds steps={training.steps}"
        )
    _validate_own(run)
    _validate_sharding(run)
    _validate_context(run)
    _validate_pipeline(run)
    _validate_lora(run)
    _validate_fp8(run)
    _validate_stored_weights(run)
    check_divides(model, mesh)


def _validate_lora(run: RunConfig) -> None:
    if run.lora is not None and run.init is None:
        raise ConfigError(
            "lora adapts a model that is trained already; name it with --init DIR, or train all "
            "parameters"
        )
    if run.lora is not None and run.mesh.pipe > 1:
        raise ConfigError(
            f"lora with pipe={run.mesh.pipe}: stages train all of their parameters; use fsdp and "
            "tensor instead"
        )


def _validate_stored_weights(run: RunConfig) -> None:
    if run.precision.weights is StoredWeights.BF16 and run.mesh.pipe > 1:
        raise ConfigError(
            f"weights=bf16 with pipe={run.mesh.pipe}: stages sum gradients of micro-batches in the "
            "format of the weights; use fsdp and tensor, or weights=fp32"
        )


def _validate_fp8(run: RunConfig) -> None:
    if run.precision.fp8 is None:
        return
    if run.sharding.keep_gathered:
        raise ConfigError(
            "keep_gathered keeps weights of the policy's format, and fp8 gathers them in 8 bits; "
            "leave one of them out"
        )
    latent = any(isinstance(each.mixer, LatentAttentionConfig) for each in run.model.blocks)
    if latent and run.mesh.context > 1:
        raise ConfigError(
            f"fp8 with latent attention and context={run.mesh.context}: what rebuilds heads of the "
            "latents that devices exchange is not in 8 bits; use fsdp in place of context"
        )


def _validate_sharding(run: RunConfig) -> None:
    sharding, mesh, length = run.sharding, run.mesh, run.training.sequence_length
    if sharding.zero < 3 and mesh.fsdp == 1:
        raise ConfigError(
            f"zero={sharding.zero} shards over the fsdp axis, which has one device here; give it "
            "some, as in --mesh fsdp=8"
        )
    if sharding.keep_gathered:
        _validate_keep_gathered(run)
    if sharding.sequence_parallel:
        if mesh.tensor == 1:
            raise ConfigError(
                "sequence_parallel shards the residual stream over the tensor axis, which has one "
                "device here; give it some, as in --mesh tensor=4"
            )
        if length % (mesh.context * mesh.tensor):
            raise ConfigError(
                f"sequence_length={length} does not divide over context={mesh.context} x tensor="
                f"{mesh.tensor}, which sequence_parallel asks for; make it a multiple of "
                f"{mesh.context * mesh.tensor}"
            )


def _validate_keep_gathered(run: RunConfig) -> None:
    sharding, mesh, precision = run.sharding, run.mesh, run.precision
    if mesh.fsdp == 1 or sharding.zero < 3:
        raise ConfigError(
            f"keep_gathered keeps weights that are gathered, and with fsdp={mesh.fsdp}, zero="
            f"{sharding.zero} none are; leave it out, or give --mesh fsdp=N at stage 3"
        )
    if mesh.pipe > 1:
        raise ConfigError(
            f"keep_gathered would keep a stage's weights of every micro-batch in flight with "
            f"pipe={mesh.pipe}; leave it out"
        )
    rounds = precision.weight_gradients is WeightGradients.COMPUTE
    if precision.policy is not PolicyName.FP32 and not rounds:
        raise ConfigError(
            f"keep_gathered multiplies with weights in {precision.policy}, and their gradients "
            "come back in it; say so with --set precision.weight_gradients=compute"
        )


def _validate_own(run: RunConfig) -> None:
    """What parts of the user's own cannot do."""
    mesh, training, mixers = run.mesh, run.training, [b.mixer for b in run.model.blocks]
    functions = [m.function for m in mixers if isinstance(m, GroupedAttentionConfig) and m.function]
    records = [type(mixer).__name__ for mixer in mixers if isinstance(mixer, OwnMixer)]
    if mesh.context > 1 and (functions or records):
        raise ConfigError(
            f"context={mesh.context} with {', '.join([*functions, *records])}: a device would have "
            "a part of the sequence, and your own attention sees all of it; use fsdp and tensor"
        )
    if functions and training.attention is not AttentionImplementation.AUTO:
        raise ConfigError(
            f"attention={training.attention.value} with {functions[0]}, which computes it: leave "
            "training.attention out"
        )
    if mesh.pipe > 1 and training.loss is not None:
        raise ConfigError(
            f"pipe={mesh.pipe} with loss={training.loss}: stages take the loss of a part of the "
            "tokens with the built-in cross entropy; use fsdp and tensor"
        )


def _validate_context(run: RunConfig) -> None:
    mesh, training = run.mesh, run.training
    if mesh.context == 1:
        return
    if training.sequence_length % (2 * mesh.context):
        raise ConfigError(
            f"sequence_length={training.sequence_length} does not divide into 2 x context="
            f"{mesh.context} chunks, two a device; make it a multiple of {2 * mesh.context}"
        )
    _validate_context_of_latents(run)
    mixers = [block.mixer for block in run.model.blocks]
    if any(isinstance(each, GroupedAttentionConfig) and each.sinks for each in mixers):
        raise ConfigError(
            f"context={mesh.context} with attention sinks: parts of a softmax are merged without "
            "them; use fsdp and tensor instead"
        )
    if training.context_method is ContextMethod.ULYSSES:
        for block in run.model.blocks:
            kv_heads = block.mixer.num_kv_heads
            if kv_heads % (mesh.tensor * mesh.context):
                raise ConfigError(
                    f"context_method=ulysses gives each device some of num_kv_heads={kv_heads}, "
                    f"which does not divide over tensor={mesh.tensor} x context={mesh.context}; "
                    "choose context_method=ring"
                )


def _validate_context_of_latents(run: RunConfig) -> None:
    method, length = run.training.context_method, run.training.sequence_length
    for mixer in (block.mixer for block in run.model.blocks):
        if not isinstance(mixer, LatentAttentionConfig):
            continue
        if method not in LATENT_METHODS:
            raise ConfigError(
                f"context_method={method.value} with latent attention: devices exchange latents, "
                f"not heads; choose {' or '.join(each.value for each in LATENT_METHODS)}"
            )
        if mixer.window is not None and mixer.window < length:
            raise ConfigError(
                f"window={mixer.window} with latent attention over context={run.mesh.context}: "
                "windows there are not implemented; leave the window or the context axis out"
            )


def _validate_context_of_stages(run: RunConfig) -> None:
    """Stages do different things at a time, and a permutation would wait for all of them."""
    if run.mesh.context > 1 and run.training.context_method is ContextMethod.RING:
        raise ConfigError(
            f"context_method=ring is not supported with pipe={run.mesh.pipe}: stages would wait "
            "for each other's sends; choose context_method=all_gather or ulysses"
        )


def _validate_pipeline(run: RunConfig) -> None:
    mesh, pipeline = run.mesh, run.pipeline
    if mesh.pipe == 1:
        return
    if len(run.model.stacks) > 1:
        raise ConfigError(
            f"pipe={mesh.pipe} with {len(run.model.stacks)} stacks of layers: stages share out the "
            "repetitions of one; use fsdp and tensor instead"
        )
    groups = run.model.stacks[0].repeats
    runs = mesh.pipe * pipeline.chunks_a_stage
    if groups < runs:
        raise ConfigError(
            f"{groups} repetitions of the block pattern are too few for pipe={mesh.pipe} stages x "
            f"{pipeline.chunks_a_stage} chunks of schedule={pipeline.schedule.value}; each needs "
            f"one: choose a pipe size or schedule of at most {groups}"
        )
    _validate_context_of_stages(run)
    if run.training.unroll > 1:
        raise ConfigError(
            f"unroll={run.training.unroll} with pipe={mesh.pipe}: stages loop over their layers "
            "one by one; set training.unroll=1"
        )
