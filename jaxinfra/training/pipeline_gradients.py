"""Loss and gradients of a batch through a pipeline: another form of ``GradientFunction``.

Dims: B sequence of a micro-batch, T position, D model width, m micro-batch.
"""

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from jaxinfra.config.pipeline import PipelineConfig
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.definition import ModelDefinition, Parameters, merged
from jaxinfra.model.gradients import Gradients
from jaxinfra.model.passes import Pass, Sums
from jaxinfra.model.recomputation import kept_by, rematerialized
from jaxinfra.model.rope import RopeTable
from jaxinfra.parallel.mesh import STAGES
from jaxinfra.parallel.pipeline.executor import (
    Arrays,
    HeadSums,
    PipelineResult,
    run_pipeline,
)
from jaxinfra.parallel.pipeline.schedule import Schedule, make_schedule
from jaxinfra.parallel.pipeline.slices import (
    LayerResult,
    pad_layers,
    padded_layer_indices,
    to_natural_order,
    to_stage_order,
    unpad_layers,
)
from jaxinfra.parallel.pipeline.tick_program import TickProgram, make_tick_program
from jaxinfra.parallel.place import Placement
from jaxinfra.training.gradients import (
    GradientFunction,
    count_targets,
    count_tokens,
    hidden_loss,
    split_batch,
)
from jaxinfra.training.policy import policy_sums
from jaxinfra.training.preferences import target_values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Micro:
    """One micro-batch, or with a leading m dim all of them."""

    batch: Batch
    key: Key[Array, ""] | None  # of dropout
    scale: Float[Array, ""]  # of the objective
    layer_scale: Float[Array, ""]  # of the losses that layers add to it
    weight: Float[Array, ""]  # of the loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Context:
    """Inputs of one micro-batch's layers besides their weights and activations."""

    ropes: list[RopeTable | None]
    positions: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"] | None
    keys: jax.Array | None  # [repetitions, blocks]; [blocks] for one layer
    scale: Float[Array, ""]  # of the losses that layers add to the objective


def make_pipeline_gradient(
    model: ModelDefinition,
    *,
    training: TrainingConfig,
    pipeline: PipelineConfig,
    placement: Placement,
    rl: RlConfig | None = None,
) -> "PipelineGradient":
    """Makes the pipeline's schedule of stages and the gradient function that runs it."""
    schedule = make_schedule(
        pipeline.schedule,
        stages=placement.mesh.shape[STAGES],
        micro_batches=training.accumulation,
        chunks=pipeline.chunks_per_stage,
        backward_ticks=pipeline.backward_ticks,
    )
    (repeats,) = (stack.repeats for stack in model.config.stacks)  # validate: one stack
    return PipelineGradient(
        model,
        training=training,
        placement=placement,
        rl=rl,
        schedule=schedule,
        program=make_tick_program(schedule),
        layer_indices=padded_layer_indices(repeats, schedule.num_positions),
    )


@final
@dataclasses.dataclass(frozen=True, eq=False)
class PipelineGradient(GradientFunction):
    """A gradient function that runs micro-batches through a schedule of pipeline stages and sums
    their gradients.

    Every micro-batch is divided by the number of counted targets of the whole batch, and gradients
    are summed in place, as without a pipeline.

    Its methods are the parts of the decoder that stages run (``StageFunctions``). There, "layer"
    means one repetition of the stack's block pattern.
    """

    placement: Placement
    rl: RlConfig | None  # policy loss, if batches have completions that the model sampled
    schedule: Schedule
    program: TickProgram  # of the schedule
    layer_indices: np.ndarray  # of each slot of the stages, from ``padded_layer_indices``

    def __call__(
        self,
        parameters: Parameters,
        state: Parameters,
        batch: Batch,
        *,
        key: Key[Array, ""],
        loss_scale: Float[Array, ""],
    ) -> Gradients:
        """Runs the pipeline's stages, each on its devices, and assembles the gradients."""
        model, placement, layer_indices = self.model, self.placement, self.layer_indices
        blocks, shared = zip(*map(_split, (parameters, state)), strict=True)
        micro = self._micro_batches(batch, key, loss_scale)
        whole: Any = PartitionSpec()  # in the places of arrays
        by_stage: Any = PartitionSpec(STAGES)
        result = jax.shard_map(
            self._stage,
            mesh=placement.mesh,
            in_specs=(by_stage, whole, whole),
            out_specs=PipelineResult(
                reported=whole, d_layers=by_stage, d_shared=whole, sums=by_stage
            ),
            axis_names={STAGES},
            # Every stage has gradients of its own, in branches that others do not take: no sum over
            # stages may be put there, as tracking what differs between them would.
            check_vma=False,
        )(pad_layers(Arrays(*blocks), layer_indices), Arrays(*shared), micro)
        (d_blocks, emitted), sums = result.d_layers, result.sums
        shardings = placement.gradients(model)
        if len(layer_indices) > model.config.repeats[0]:
            # Padding is removed where each device has all layers.
            d_blocks = jax.lax.with_sharding_constraint(d_blocks, shardings["blocks"])
            small = jax.lax.with_sharding_constraint((emitted, sums), placement.replicated)
            d_blocks, (emitted, sums) = unpad_layers((d_blocks, small), layer_indices)
        gradients = {name: result.d_shared.weights.get(name, d_blocks) for name in parameters}
        return Gradients(
            loss=result.reported["loss"],
            gradients=jax.lax.with_sharding_constraint(gradients, shardings),
            sums=sums,
            state=result.d_shared.state | ({"blocks": emitted} if emitted else {}),
            figures=result.reported["figures"],
        )

    def _micro_batches(
        self, batch: Batch, key: Key[Array, ""], loss_scale: Float[Array, ""]
    ) -> _Micro:
        count = self.training.accumulation
        weight = 1.0 / count_targets(batch)
        keys = jax.random.split(key, count) if count > 1 else key[None]
        return _Micro(
            batch=split_batch(batch, count),
            key=keys if self.model.config.dropout_rate > 0.0 else None,
            scale=jnp.full(count, loss_scale * weight),
            layer_scale=jnp.full(count, loss_scale / count_tokens(batch)),
            weight=jnp.full(count, weight),
        )

    def _stage(self, blocks: Arrays, shared: Arrays, micro: _Micro) -> PipelineResult:
        """One stage's part, of its layers; runs on each stage's devices."""
        schedule = self.schedule
        result = run_pipeline(
            self.program,
            self,
            layers=to_stage_order(blocks, schedule, axis=STAGES),
            shared=shared,
            micro_batches=micro,
            axis=STAGES,
        )
        d_layers, sums = to_natural_order((result.d_layers, result.sums), schedule, axis=STAGES)
        return dataclasses.replace(result, d_layers=d_layers, sums=sums)

    def embed(self, shared: Arrays, micro: _Micro) -> jax.Array:
        """Embeds a micro-batch's tokens as x [B, T, D]."""
        positions = _positions(micro.batch)
        key = self._keys(micro)[0]
        return self.model.bind(merged(*shared)).embed(micro.batch.tokens, positions, key)

    def context(self, micro: _Micro) -> _Context:
        """Computes the inputs that all layers share for a micro-batch: RoPE tables, positions,
        segment ids and dropout keys.
        """
        positions = _positions(micro.batch)
        return _Context(
            ropes=self.model.bind({}).rope_tables(positions),
            positions=positions,
            segment_ids=micro.batch.segment_ids,
            keys=self._keys(micro)[1],
            scale=micro.layer_scale,
        )

    def layer_context(self, context: _Context, index: jax.Array) -> _Context:
        """Selects from a micro-batch's context the dropout key and scale of layer ``index``."""
        layer_indices = self.layer_indices
        if len(layer_indices) > self.model.config.repeats[0]:
            # What a layer of zeros says is of no layer.
            is_layer = jnp.asarray(layer_indices >= 0)[index]
            context = dataclasses.replace(
                context, scale=jnp.where(is_layer, context.scale, jnp.zeros_like(context.scale))
            )
        if context.keys is None:
            return context
        return dataclasses.replace(context, keys=context.keys[jnp.asarray(layer_indices)[index]])

    def layer(self, arrays: Arrays, context: _Context, x_BTD: jax.Array) -> LayerResult:
        """Runs one repetition of the block pattern, with the recomputation that the config asks
        for.
        """
        model = self.model

        def repetition(x_BTD: jax.Array, arrays: Arrays) -> tuple[jax.Array, tuple[Sums, ...]]:
            decoder = model.bind({"blocks": merged(*arrays)})
            sums = []
            for i, (block, rope) in enumerate(zip(decoder.blocks, context.ropes, strict=True)):
                given = Pass(
                    positions_BT=context.positions,
                    segment_ids_BT=context.segment_ids,
                    rope=rope,
                    dropout_key=None if context.keys is None else context.keys[i],
                )
                out = block(x_BTD, given)
                x_BTD = out.x
                sums.append(out.sums)
            return x_BTD, tuple(sums)

        with jax.named_scope("layer"):
            kept = kept_by(model.execution.recomputation.remat)
            x_BTD, sums = rematerialized(repetition, kept, in_loop=True)(x_BTD, arrays)
            losses = jax.tree.leaves([each.losses for each in sums])
            objective = sum(losses) * context.scale if losses else None
        return LayerResult(x=x_BTD, objective=objective, sums=sums)

    def head(self, shared: Arrays, x_BTD: jax.Array, micro: _Micro) -> HeadSums:
        """Computes a micro-batch's loss from the last layer's output."""
        tree = merged(*shared)
        model, batch, training = self.model, micro.batch, self.training
        hidden_BTD = model.bind(tree).normalized(x_BTD)
        if self.rl is not None:
            each_BT = target_values(model, tree, hidden_BTD, batch.targets)
            policy = policy_sums(each_BT, batch, self.rl)
            objective, loss, figures = policy.loss, policy.loss, policy.figures
        else:
            options = {"z_loss": training.z_loss, "label_smoothing": training.label_smoothing}
            sums = hidden_loss(model, tree, hidden_BTD, batch, loss=None, **options)
            objective, loss, figures = sums.total, sums.nll, {}
        reported = {"loss": loss * micro.weight, "figures": figures}
        return HeadSums(objective=objective * micro.scale, reported=reported)

    def _keys(self, micro: _Micro) -> tuple[jax.Array | None, jax.Array | None]:
        """Dropout keys as ``Decoder`` derives them, for equal masks."""
        if micro.key is None:
            return None, None
        embed_key, blocks_key = jax.random.split(micro.key)
        config = self.model.config
        return embed_key, jax.random.split(blocks_key, (config.repeats[0], len(config.blocks)))


def _split(tree: Parameters) -> tuple[Parameters, Parameters]:
    """Splits a tree into the layers' part and the rest."""
    rest = {name: value for name, value in tree.items() if name != "blocks"}
    return tree.get("blocks", {}), rest


def _positions(batch: Batch) -> jax.Array:
    if batch.positions is not None:
        return batch.positions
    return jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
