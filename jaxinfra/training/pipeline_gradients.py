"""Loss and gradients of a batch through a pipeline: another form of ``GradientFunction``.

Dims: B sequence of a micro-batch, T position, D model width, m micro-batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfra.config.pipeline import PipelineConfig
from jaxinfra.config.run import TrainingConfig
from jaxinfra.core.axes import MeshAxis
from jaxinfra.data.batch import Batch
from jaxinfra.layers.passes import Pass
from jaxinfra.layers.rope import RopeTable
from jaxinfra.models.definition import ModelDefinition, Parameters
from jaxinfra.models.gradients import Gradients
from jaxinfra.parallel.pipeline.executor import HeadSums, StageFunctions, run_pipeline
from jaxinfra.parallel.pipeline.layer_order import (
    layer_places,
    pad_layers,
    to_natural_order,
    to_stage_order,
    unpad_layers,
)
from jaxinfra.parallel.pipeline.schedule_generator import make_schedule
from jaxinfra.parallel.pipeline.tick_program import make_tick_program
from jaxinfra.parallel.place import Placement
from jaxinfra.training.gradients import GradientFunction, count_targets, hidden_loss, split_batch

_PIPE = MeshAxis.PIPE.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Micro:
    """One micro-batch, or with a leading m dim all of them."""

    batch: Batch
    key: jax.Array | None  # of dropout
    scale: jax.Array  # fp32 []: of the objective
    weight: jax.Array  # fp32 []: of the loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Context:
    """What the layers of one micro-batch read besides their weights and input."""

    ropes: list[RopeTable | None]
    positions: jax.Array  # [B, T]
    segment_ids: jax.Array | None  # [B, T]
    keys: jax.Array | None  # [repetitions, blocks]; [blocks] for one layer


def make_pipeline_gradient(
    model: ModelDefinition,
    *,
    training: TrainingConfig,
    pipeline: PipelineConfig,
    placement: Placement,
) -> GradientFunction:
    """The gradient of the whole batch by the configured schedule, micro-batches by accumulation.

    Every micro-batch is divided by the number of counted targets of the whole batch, and gradients
    are summed in place, as without a pipeline.
    """
    stages, micro_batches = placement.mesh.shape[_PIPE], training.accumulation
    schedule = make_schedule(
        pipeline.schedule,
        stages=stages,
        micro_batches=micro_batches,
        chunks=pipeline.chunks_a_stage,
        backward_ticks=pipeline.backward_ticks,
    )
    program = make_tick_program(schedule)
    (repeats,) = (stack.repeats for stack in model.config.stacks)  # validate: one stack
    places = layer_places(repeats, schedule.num_positions)
    functions = stage_functions(
        model,
        z_loss=training.z_loss,
        label_smoothing=training.label_smoothing,
        places=places,
    )
    drops_out = model.config.dropout_rate > 0.0

    def of_stage(blocks: Any, shared: Any, micro: _Micro) -> tuple[jax.Array, Any, Any]:
        weights = to_stage_order(blocks, schedule, axis=_PIPE)
        loss, d_weights, d_shared = run_pipeline(
            program, functions, weights=weights, shared=shared, micro_batches=micro, axis=_PIPE
        )
        return loss, to_natural_order(d_weights, schedule, axis=_PIPE), d_shared

    def of_batch(
        parameters: Parameters,
        state: Parameters,
        batch: Batch,
        *,
        key: jax.Array,
        loss_scale: jax.Array,
    ) -> Gradients:
        assert not state, "stages hand out gradients only"
        weight = 1.0 / count_targets(batch)
        key = jax.random.split(key, micro_batches) if micro_batches > 1 else key[None]
        micro = _Micro(
            batch=split_batch(batch, micro_batches),
            key=key if drops_out else None,
            scale=jnp.full(micro_batches, loss_scale * weight),
            weight=jnp.full(micro_batches, weight),
        )
        shared = {name: value for name, value in parameters.items() if name != "blocks"}
        whole, by_stage = PartitionSpec(), PartitionSpec(_PIPE)
        loss, d_blocks, d_shared = jax.shard_map(
            of_stage,
            mesh=placement.mesh,
            in_specs=(by_stage, whole, whole),
            out_specs=(whole, by_stage, whole),
            axis_names={_PIPE},
            # Every stage has gradients of its own, in branches that others do not take: no sum over
            # stages may be put there, as tracking what differs between them would.
            check_vma=False,
        )(pad_layers(parameters["blocks"], places), shared, micro)
        shardings = placement.gradients(model)
        if len(places) > repeats:  # what pads is left out where each device has all
            d_blocks = jax.lax.with_sharding_constraint(d_blocks, shardings["blocks"])
            d_blocks = unpad_layers(d_blocks, places)
        gradients = {name: d_shared.get(name, d_blocks) for name in parameters}
        gradients = jax.lax.with_sharding_constraint(gradients, shardings)
        return Gradients(loss=loss, gradients=gradients, sums=(), state={})

    return of_batch


def stage_functions(
    model: ModelDefinition,
    *,
    z_loss: float,
    label_smoothing: float,
    places: np.ndarray,
) -> StageFunctions:
    """A decoder in the pieces that stages run; a layer is one repetition of its block pattern.

    Args:
        places: of ``layer_places``.
    """
    config = model.config

    def positions_of(batch: Batch) -> jax.Array:
        if batch.positions is not None:
            return batch.positions
        return jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)

    def keys_of(micro: _Micro) -> tuple[jax.Array | None, jax.Array | None]:
        """As ``Decoder`` derives them, for equal masks."""
        if micro.key is None:
            return None, None
        embed_key, blocks_key = jax.random.split(micro.key)
        return embed_key, jax.random.split(blocks_key, (config.repeats[0], len(config.blocks)))

    def embed(shared: Any, micro: _Micro) -> jax.Array:
        positions = positions_of(micro.batch)
        return model.bind(shared).embed(micro.batch.tokens, positions, keys_of(micro)[0])

    def context(micro: _Micro) -> _Context:
        positions = positions_of(micro.batch)
        return _Context(
            ropes=model.bind({}).rope_tables(positions),
            positions=positions,
            segment_ids=micro.batch.segment_ids,
            keys=keys_of(micro)[1],
        )

    def layer_context(context: _Context, index: jax.Array) -> _Context:
        if context.keys is None:
            return context
        return dataclasses.replace(context, keys=context.keys[jnp.asarray(places)[index]])

    def layer(weights: Any, context: _Context, x_BTD: jax.Array) -> jax.Array:
        def repetition(x_BTD: jax.Array, weights: Any) -> jax.Array:
            decoder = model.bind({"blocks": weights})
            for i, (block, rope) in enumerate(zip(decoder.blocks, context.ropes, strict=True)):
                given = Pass(
                    positions_BT=context.positions,
                    segment_ids_BT=context.segment_ids,
                    rope=rope,
                    dropout_key=None if context.keys is None else context.keys[i],
                )
                x_BTD = block(x_BTD, given).x
            return x_BTD

        with jax.named_scope("layer"):
            return model.bind({}).rematerialized(repetition, in_loop=True)(x_BTD, weights)

    def head(shared: Any, x_BTD: jax.Array, micro: _Micro) -> HeadSums:
        hidden_BTD = model.bind(shared).normalized(x_BTD)
        sums = hidden_loss(
            model,
            shared,
            hidden_BTD,
            micro.batch,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
        return HeadSums(objective=sums.total * micro.scale, loss=sums.nll * micro.weight)

    return StageFunctions(
        embed=embed, context=context, layer_context=layer_context, layer=layer, head=head
    )
