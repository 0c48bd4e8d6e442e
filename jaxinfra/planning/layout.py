"""The layout of a training step over devices and micro-batches: the input of a plan."""

import dataclasses
from typing import Any

from jaxinfra.axes import MESH_AXES
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.mesh import EXPERT, NODES, MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.config.run import AttentionImplementation, Remat, RunConfig
from jaxinfra.config.validate import check_divides, validate
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.planning.formats import RECIPES, TrainingRecipe, recipe_of
from jaxinfra.planning.model import PlannedModel

BY_STRENGTH = (Remat.NONE, Remat.DOTS, Remat.MLP, Remat.NAMED, Remat.FULL)
"""Forms of recomputation, those that keep most first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Implementation choices in which training stacks differ; the defaults are jaxinfra's."""

    fused_attention: bool = True  # attention scores are not stored (Dao et al. 2022)
    dropout: bool = False  # on attention scores and residual branches
    overlap: bool = True  # collectives of the fsdp and replica axes overlap with compute
    casts_weights: bool = True  # fp32 masters are the model, cast to the compute dtype at use
    fused_loss: bool = True  # logits in chunks, their gradient formed in the forward pass
    loss_kernel: bool = True  # a kernel stores bf16 exponentials, not logits, where it is faster
    scans_layers: bool = True  # saved activations are copied into a stack over layers
    saves_fp32: bool = True  # without recomputation, elementwise intermediates are saved in fp32
    overlaps_tensor: bool = False  # tensor collectives overlap with the matmuls that use them
    recomputes_scores: bool = False  # stored attention scores are recomputed under any policy
    sums_apart: bool = True  # a separate memory pass adds each micro-batch's gradients to the sum


UNROLLED = Traits(scans_layers=False, saves_fp32=False)
"""This code base with ``training.unroll`` of all layers: no stacks, and XLA keeps nothing that it
finds cheap to recompute.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Mesh, batch size and recomputation policy of one training step.

    The ``fsdp`` axis shards nothing at ``zero`` stage 0, optimizer state from stage 1, gradients
    from stage 2 and weights at 3 (Rajbhandari et al. 2020). The ``replica`` axis shards none.
    """

    length: int  # tokens per sequence
    batch: int  # sequences per step, over all devices and micro-batches
    mesh: MeshConfig = MeshConfig()
    zero: int = 3
    chunks: int = 1  # model chunks per stage: interleaved 1F1B
    sequence_parallel: bool = False  # norms and residuals sharded over tensor too
    accumulation: int = 1  # micro-batches per step
    remat: Remat = Remat.DOTS
    recipe: str = "bf16"
    exchange: ExchangeConfig = ExchangeConfig()  # of tokens between experts
    # Whether layers' all-gathered weights stay for the backward pass. None: ``make_plan`` keeps
    # them if they fit; other functions of this package take None as False.
    keep_gathered: bool | None = None
    traits: Traits = Traits()

    @property
    def devices(self) -> int:
        """Number of devices: the product of the mesh axes; experts are sharded over data axes."""
        return self.mesh.num_devices

    @property
    def data(self) -> int:
        """Number of shards that the batch is split into."""
        return self.mesh.num_data_shards

    def data_shards(self, *, experts: bool) -> int:
        """Returns the number of fsdp shards of a weight, or of an expert's weight (``experts``)."""
        return self.mesh.fsdp_beside_experts if experts else self.mesh.fsdp

    @property
    def may_keep_gathered(self) -> bool:
        """Tells whether all-gathered weights exist that a step could keep for its backward pass."""
        is_gathered = self.mesh.fsdp > 1 and self.zero == 3
        return is_gathered and self.mesh.pipe == 1 and self.training_recipe.compute != "fp8"

    @property
    def keeps_gathered_experts(self) -> bool:
        """Tells whether all-gathered expert weights are kept for the backward pass.

        The expert exchange gathers them. They are kept where nothing is recomputed, like other
        results of the forward pass.
        """
        if self.mesh.expert == 1 or self.zero < 3 or self.remat is not Remat.NONE:
            return False
        return self.data_shards(experts=True) > 1

    @property
    def micro_rows(self) -> int:
        """Number of sequences per micro-batch and device."""
        return self.batch // (self.accumulation * self.data)

    @property
    def micro_tokens(self) -> int:
        """Number of tokens per micro-batch and device, after the context axis splits sequences."""
        return self.micro_rows * self.length // self.mesh.context

    @property
    def training_recipe(self) -> TrainingRecipe:
        """The training recipe, which gives bytes per parameter by role."""
        return recipe_of(self.recipe, sums=self.accumulation > 1)

    @property
    def activation_bytes(self) -> float:
        """Bytes per element of an activation in this layout's recipe."""
        return self.training_recipe.activation_bytes

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes by name, slowest link first; the expert axis comes last."""
        return {**self.mesh.sizes(), EXPERT: self.mesh.expert}

    def members(self, axis: str) -> int:
        """Returns the number of devices in a collective over a mesh axis.

        The expert exchange has two: ``EXPERT`` within nodes and ``NODES`` between them.
        """
        num_nodes = self.exchange.num_nodes(self.mesh.expert)
        levels = {EXPERT: self.mesh.expert // num_nodes, NODES: num_nodes}
        return levels[axis] if axis in levels else self.axes[axis]

    @property
    def of_one_layer(self) -> "Layout":
        """Returns a layout of fewer devices with equal costs per layer; serves as a cache key."""
        expert, accumulation = self.mesh.expert, 2 if self.accumulation > 1 else 1
        return dataclasses.replace(
            self,
            batch=self.micro_rows * expert * accumulation,
            mesh=dataclasses.replace(self.mesh, pipe=1, replica=1, fsdp=expert),
            chunks=1,
            zero=0,
            keep_gathered=None,
            accumulation=accumulation,
        )

    def describe(self) -> str:
        """Describes the mesh by its axes of more than one device, such as ``pipe=2 x fsdp=4``."""
        axes = [f"{axis}={size}" for axis, size in self.axes.items() if size > 1]
        return " x ".join(axes) or "one device"


def lay_out(**choices: Any) -> Layout:
    """Returns a layout from mesh axes and other choices: ``lay_out(fsdp=8, length=4096, ...)``."""
    sizes = {axis: choices.pop(axis) for axis in (*MESH_AXES, EXPERT) if axis in choices}
    return Layout(mesh=MeshConfig(**sizes), **choices)


def check(model: PlannedModel, layout: Layout) -> None:
    """Raises ConfigError if the layout breaks a rule, with the rule, the values and the remedy."""
    reason = refusal(model, layout)
    if reason is not None:
        raise ConfigError(f"{layout.describe()}: {reason}")


def refusal(model: PlannedModel, layout: Layout) -> str | None:
    """Returns the reason why the model cannot be trained in this layout, or None if it can."""
    mesh = layout.mesh
    if layout.accumulation < 1:
        return f"accumulation={layout.accumulation} must be at least 1"
    if layout.recipe not in RECIPES:
        return f"unknown recipe {layout.recipe!r}; known: {', '.join(RECIPES)}"
    if not 0 <= layout.zero <= 3:
        return f"zero={layout.zero}: the stages are 0 to 3"
    if layout.keep_gathered and not layout.may_keep_gathered:
        return (
            f"keep_gathered with fsdp={mesh.fsdp}, zero={layout.zero}, pipe={mesh.pipe} and recipe "
            f"{layout.recipe}: weights can stay that were gathered in 16 or 32 bits over fsdp at "
            "stage 3, without a pipeline; leave it out"
        )
    if model.config.num_layers < mesh.pipe * layout.chunks:
        return (
            f"{mesh.pipe} stages of {layout.chunks} chunks for {model.config.num_layers} layers; "
            "a stage needs at least one layer a chunk"
        )
    if mesh.pipe == 1 and layout.chunks > 1:
        return f"chunks={layout.chunks} interleave a pipeline; pipe=1 has none"
    rows = layout.accumulation * layout.data
    if layout.batch % rows:
        return (
            f"a batch of {layout.batch} sequences does not divide over {mesh.data_axes} x "
            f"accumulation={layout.accumulation}; make it a multiple of {rows}"
        )
    # Causal attention is balanced by giving each device one early and one late piece (zig-zag).
    if mesh.context > 1 and layout.length % (2 * mesh.context):
        return f"length={layout.length} does not divide into 2 x context={mesh.context} pieces"
    windows = [layer.mixer.window or layout.length for layer in model.layers]
    if mesh.pipe > 1 and mesh.context > 1 and min(windows) < layout.length:
        return (
            f"pipe={mesh.pipe} x context={mesh.context} with a window of {min(windows)} is "
            "trained by all_gather or ulysses, which are not planned there; use one of the axes"
        )
    try:
        check_divides(model.config, mesh)
        layout.exchange.num_nodes(mesh.expert)
    except ConfigError as error:
        return str(error)
    return None


def run_config(
    model: ModelConfig,
    layout: Layout,
    *,
    policy: PolicyName = PolicyName.BF16,
    attention: AttentionImplementation = AttentionImplementation.AUTO,
) -> RunConfig:
    """Returns the run config whose training step a layout describes."""
    if layout.zero == 0:
        raise UnsupportedError("zero=0: use the replica axis in place of fsdp")
    run = pretraining(model)
    training = dataclasses.replace(
        run.training,
        batch_size=layout.batch,
        sequence_length=layout.length,
        accumulation=layout.accumulation,
        remat=layout.remat,
        attention=attention,
        unroll=1 if layout.traits.scans_layers else model.num_layers,
    )
    pipeline = PipelineConfig()
    if layout.chunks > 1:
        pipeline = PipelineConfig(schedule=PipelineSchedule.INTERLEAVED, chunks=layout.chunks)
    sharding = ShardingConfig(
        zero=layout.zero,
        sequence_parallel=layout.sequence_parallel,
        keep_gathered=bool(layout.keep_gathered),
    )
    return dataclasses.replace(
        run,
        training=training,
        precision=PrecisionConfig(policy=policy),
        pipeline=pipeline,
        exchange=layout.exchange,
        mesh=layout.mesh,
        sharding=sharding,
    )


def untrainable(model: PlannedModel, layout: Layout) -> str | None:
    """Returns the reason why ``jaxinfra train`` would refuse this layout, or None."""
    zero = layout.zero if layout.mesh.fsdp > 1 and layout.zero else 3
    # Whether gathered weights can stay, ``refusal`` says; unrolling is no part of the command.
    asked = dataclasses.replace(layout, zero=zero, keep_gathered=False, traits=Traits())
    try:
        validate(run_config(model.config, asked))
    except ConfigError as error:
        return str(error)
    return None
