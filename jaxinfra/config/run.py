"""A whole run: the configs of its parts, how long it trains, and the checks that span them."""

import enum

from jaxinfra.config.data import DataConfig
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.finetune import InitConfig, LoraConfig
from jaxinfra.config.limits import require_positive, require_within
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    ModelConfig,
)
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.pipeline import PipelineConfig
from jaxinfra.config.precision import PrecisionConfig
from jaxinfra.config.preferences import PreferenceConfig
from jaxinfra.config.record import record
from jaxinfra.config.rl import RlConfig
from jaxinfra.errors import ConfigError


@record
class StatisticsConfig:
    """Statistics of each layer's activations, gradients, weights and updates."""

    every: int | None = None  # steps between statistics; None: no statistics

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"statistics.every={self.every} must be at least 1, or none")


@record
class ReliabilityConfig:
    """Limits and intervals of a run's checks for hardware and numeric faults; None: off."""

    hang_s: float = 600.0  # the longest that a phase of a step may last before the run is aborted
    heartbeat_s: float = 10.0  # the longest time without a process's heartbeat
    hash_every: int | None = 100  # steps between comparisons of replicated state across replicas
    probe_every: int | None = 50  # steps between timings of each rank's own devices
    spike_factor: float | None = None  # a loss this many times the recent median is a bad batch
    spike_window: int = 16  # finite losses in that median; with fewer, no spike is reported
    exclude_steps: tuple[int, ...] = ()  # steps whose batch is skipped

    def __post_init__(self) -> None:
        for name in ("hang_s", "heartbeat_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"reliability.{name}={getattr(self, name)} must be positive")
        for name in ("hash_every", "probe_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"reliability.{name}={value} must be at least 1, or none")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise ConfigError(
                f"reliability.spike_factor={self.spike_factor} must exceed 1, or be none"
            )
        if self.spike_window < 2:
            raise ConfigError(f"reliability.spike_window={self.spike_window} must be at least 2")
        if any(step < 1 for step in self.exclude_steps):
            raise ConfigError(
                f"reliability.exclude_steps={list(self.exclude_steps)}: steps are counted from 1"
            )


class Remat(enum.StrEnum):
    """Choices of what the backward pass recomputes in each block (Chen et al. 2016)."""

    NONE = "none"  # nothing: keep every intermediate
    DOTS = "dots"  # all but matmul and attention outputs
    MLP = "mlp"  # as dots, and also the MLP's hidden layer
    NAMED = "named"  # all but attention's output and logsumexp (Korthikanti et al. 2022: selective)
    FULL = "full"  # everything: keep block inputs only
    AUTO = "auto"  # the first of these, in this order, whose compiled step fits the memory budget
    OPTIMAL = "optimal"  # per layer, the kept values that save the most time within the budget
    CHOSEN = "chosen"  # all but the values in training.kept; an optimal run records its choice so

    @property
    def is_open(self) -> bool:
        """Whether the memory budget decides, so that the choice is made when steps are compiled."""
        return self in (Remat.AUTO, Remat.OPTIMAL)


@record
class KeptValues:
    """Names of the values that a number of consecutive layers keep for the backward pass.

    Examples:
        Eight layers that keep only attention's output, then eight that also keep the gate:

        >>> kept = (
        ...     jaxinfra.KeptValues(layers=8, names=("attention_out",)),
        ...     jaxinfra.KeptValues(layers=8, names=("attention_out", "mlp.gate")),
        ... )
        >>> training = jaxinfra.TrainingConfig(
        ...     steps=1, batch_size=2, sequence_length=64, remat="chosen", kept=kept, unroll=16
        ... )
    """

    layers: int  # number of repetitions of a stack's pattern, after those of the previous entry
    names: tuple[str, ...] = ()  # such as mlp.gate, or attention_out: output and logsumexp

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ConfigError(f"kept layers={self.layers} must be at least 1")


class AttentionImplementation(enum.StrEnum):
    """Attention implementations; ``auto`` chooses, the others refuse what they cannot compute."""

    AUTO = "auto"
    HOPPER = "hopper"
    CUDNN = "cudnn"
    XLA = "xla"
    REFERENCE = "reference"


class ContextMethod(enum.StrEnum):
    """Methods by which devices that share a sequence (context axis) exchange keys and queries."""

    AUTO = "auto"  # the ring; in a pipeline all_gather
    RING = "ring"  # keys pass from device to device while attention computes (Liu et al. 2023)
    ULYSSES = "ulysses"  # all-to-all from sequence shards to head shards (Jacobs et al. 2023)
    ALL_GATHER = "all_gather"  # all keys on every device (Llama 3, section 3.3.2)


LATENT_METHODS = (ContextMethod.AUTO, ContextMethod.ALL_GATHER)
"""Context methods of latent attention. Every device gathers all latents and rebuilds its heads from
them."""


@record
class TrainingConfig:
    """Length, batch size and step of a training run.

    Examples:
        >>> training = jaxinfra.TrainingConfig(steps=500, batch_size=32, sequence_length=1024)
        >>> training.batch_size * training.sequence_length  # tokens per step
        32768
    """

    steps: int  # optimizer steps
    batch_size: int  # sequences per step, over all devices and micro-batches
    sequence_length: int  # tokens per sequence
    accumulation: int = 1  # micro-batches per step
    remat: Remat = Remat.NONE  # what the backward pass computes again
    kept: tuple[KeptValues, ...] = ()  # for remat=chosen: entries that together cover all layers
    # Memory per device for remat=auto and optimal; None: all that the device has.
    memory_budget_gib: float | None = None
    unroll: int = 1  # layers per iteration of the loop over layers; all layers: no loop
    xla_options: tuple[str, ...] = ()  # "name=value", added to the built-in options
    attention: AttentionImplementation = AttentionImplementation.AUTO  # attention kernel
    # Attention over sequences that are sharded over devices.
    context_method: ContextMethod = ContextMethod.AUTO
    # Your own loss by name (jaxinfra.part): (logits, targets, *, weights) -> loss of each token.
    loss: str | None = None
    z_loss: float = 0.0  # weight of logsumexp(logits)^2 (PaLM, section 5)
    label_smoothing: float = 0.0  # target probability spread over all ids; in training only
    seed: int = 0  # random seed of initial weights, data order and dropout
    log_every: int = 1  # steps between progress lines; metrics.jsonl holds every step
    evaluate_every: int | None = None  # steps; None: at the end only
    # Most tokens of a held-out set that evaluations of the run read, whole documents; None: all.
    evaluate_tokens: int | None = 1 << 20
    max_bad_steps: int = 20  # non-finite steps in a row before the run stops

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "accumulation", "unroll", "log_every")
        require_positive(self, *counts)
        require_within(
            steps=self.steps,
            batch_size=self.batch_size,
            accumulation=self.accumulation,
            sequence_length=self.sequence_length,
            tokens_a_step=self.batch_size * self.sequence_length,
        )
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise ConfigError(f"evaluate_every={self.evaluate_every} must be at least 1, or none")
        if self.evaluate_tokens is not None and self.evaluate_tokens < 1:
            raise ConfigError(f"evaluate_tokens={self.evaluate_tokens} must be at least 1, or none")
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"batch_size={self.batch_size} is not a multiple of accumulation="
                f"{self.accumulation}; micro-batches are equal"
            )
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(
                f"seed={self.seed} must be in [0, 2^32): larger ones are not told apart"
            )
        if self.memory_budget_gib is not None and (
            self.memory_budget_gib <= 0 or self.remat not in (Remat.AUTO, Remat.OPTIMAL)
        ):
            raise ConfigError(
                f"memory_budget_gib={self.memory_budget_gib} with remat={self.remat.value}: a "
                "budget is more than 0, and only remat=auto and optimal choose by it"
            )
        if bool(self.kept) != (self.remat == Remat.CHOSEN):
            raise ConfigError(
                f"kept={len(self.kept)} runs of layers with remat={self.remat}: what is kept is "
                "named where remat=chosen, and there only"
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


@record
class CheckpointConfig:
    """Times at which checkpoints are written, and which of them are kept.

    Examples:
        >>> checkpoint = jaxinfra.CheckpointConfig(every=100, keep_last=3)
    """

    every: int | None = None  # steps between checkpoints; None: at the end and on a signal only
    keep_last: int = 2  # number of newest checkpoints to keep
    keep_best: int = 1  # number of checkpoints with the lowest held-out loss to keep

    def __post_init__(self) -> None:
        if (self.every is not None and self.every < 1) or self.keep_last < 1 or self.keep_best < 0:
            raise ConfigError(
                f"checkpoint every={self.every} and keep_last={self.keep_last} must be at least 1 "
                f"and keep_best={self.keep_best} not negative"
            )


@record
class RunConfig:
    """All settings that decide what a run computes.

    Examples:
        >>> config = jaxinfra.preset("tiny")
        >>> isinstance(config, jaxinfra.RunConfig), config.training.batch_size
        (True, 16)
        >>> config = dataclasses.replace(config, mesh=jaxinfra.MeshConfig(fsdp=4))
    """

    model: ModelConfig  # shape of the model
    data: DataConfig  # texts and tokenizer
    optimizer: OptimizerConfig  # optimizer and learning rate
    training: TrainingConfig  # length, batches and recomputation
    precision: PrecisionConfig = PrecisionConfig()  # number formats
    mesh: MeshConfig = MeshConfig()  # devices, by axis
    sharding: ShardingConfig = ShardingConfig()  # what the fsdp and tensor axes shard
    pipeline: PipelineConfig = PipelineConfig()  # pipeline schedule, with mesh.pipe
    exchange: ExchangeConfig = ExchangeConfig()  # sending tokens to experts, with mesh.expert
    checkpoint: CheckpointConfig = CheckpointConfig()  # when checkpoints are written and deleted
    reliability: ReliabilityConfig = ReliabilityConfig()  # checks for faults
    statistics: StatisticsConfig = StatisticsConfig()  # statistics per layer
    init: InitConfig | None = None  # None: random weights
    lora: LoraConfig | None = None  # None: every parameter is trained
    preferences: PreferenceConfig | None = None  # None: a loss on tokens, not on answer pairs
    rl: RlConfig | None = None  # None: the data are given, not sampled by the model

    @property
    def command(self) -> str:
        """Name of the command that trains the run."""
        return "train" if self.rl is None else "rl"
