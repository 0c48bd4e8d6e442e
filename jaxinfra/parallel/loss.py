"""``Kernels.cross_entropy`` on a mesh, by a kernel on each device's tokens or by the compiler.

The compiler cannot partition the loss kernel. So each device all-gathers the vocabulary table along
its width, in the compute dtype, and computes the loss of its own tokens. The forward pass then sums
two scalars over devices. The backward pass reduce-scatters the table's gradient over the axes that
shard the table, in the gradient's dtype. If the table's rows are sharded too, the devices that
shard them exchange five numbers per token. They also sum their parts of hidden's gradient.

Dims: B batch, T position, D model width, V vocabulary; lower case of one device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxinfra.axes import BATCH, EMBED, SEQUENCE, STREAM, VOCAB
from jaxinfra.model.execution import Place
from jaxinfra.numerics.policy import Policy
from jaxinfra.ops.cross_entropy import (
    CrossEntropySums,
    kernel_on_one_device,
    linear_cross_entropy,
)
from jaxinfra.parallel.collectives import all_gather, all_reduce, reduce_scatter
from jaxinfra.parallel.copies import copying_axis, gather_by_copies, scatter_sum_by_copies
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenLoss:
    """Cross entropy of a batch, by a kernel for each device's tokens or by the compiler."""

    placement: Placement | None

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        table_VD: Float[Array, "V D"],
        targets_BT: Int[Array, "B T"],
        weights_BT: Float[Array, "B T"],
        *,
        policy: Policy,
        **options: Any,
    ) -> CrossEntropySums:
        """Returns the loss and its statistics as sums over all tokens of the batch.

        Args:
            table_VD: rows of the vocabulary, as stored.
            options: z_loss, label_smoothing and logit_soft_cap of ``linear_cross_entropy``.
        """
        placement = self.placement
        operands = hidden_BTD, table_VD, targets_BT, weights_BT
        if placement and shards_by_tokens(placement, hidden_BTD, num_ids=table_VD.shape[0]):
            return cross_entropy_of_token_shards(placement, *operands, policy=policy, **options)
        place = placement.constraint() if placement else Place()
        return linear_cross_entropy(
            hidden_BTD,
            _gathered(table_VD, policy=policy, place=place),
            targets_BT,
            weights_BT,
            **options,
            batch_shards=placement.batch_shards if placement else 1,
            sequence_shards=placement.sequence_shards if placement else 1,
            num_devices=placement.mesh.size if placement else 1,
        )


def _gathered(table_VD: jax.Array, *, policy: Policy, place: Place) -> jax.Array:
    """The table for a loss that goes over it in chunks: gathered before the loop, or each iteration
    would gather it again.

    Gathered in the compute dtype; its values are rounded to that, its gradients are not.
    """

    @jax.custom_vjp
    def gathered(table_VD: jax.Array) -> jax.Array:
        rounded_VD = place(policy.to_compute(table_VD), (VOCAB, STREAM))
        return rounded_VD.astype(table_VD.dtype)

    gathered.defvjp(lambda table_VD: (gathered(table_VD), None), lambda _, d_VD: (d_VD,))
    return gathered(table_VD)


def shards_by_tokens(placement: Placement, hidden_BTD: jax.Array, *, num_ids: int) -> bool:
    """Tells whether "auto" runs the loss kernel on each device's tokens and vocabulary rows."""
    rows = num_ids // math.prod(placement.mesh.shape[axis] for axis in placement.axes(VOCAB))
    return placement.mesh.size > 1 and kernel_on_one_device(hidden_BTD, num_ids=rows)


def _gather_table(
    by_width: tuple[str, ...], policy: Policy, copied_over: str | None
) -> Callable[[jax.Array], jax.Array]:
    """Makes the gathering of a table [V, d] along its width, whose gradient is reduce-scattered."""
    if copied_over is not None:
        gather = functools.partial(gather_by_copies, axis=copied_over)
        scatter_sum = functools.partial(scatter_sum_by_copies, axis=copied_over)
    else:
        gather = functools.partial(all_gather, axis=by_width)
        scatter_sum = functools.partial(reduce_scatter, axis=by_width)

    @jax.custom_vjp
    def gathered(table_Vd: jax.Array) -> jax.Array:
        rounded = table_Vd.astype(policy.compute)
        whole = gather(rounded, dim=1) if by_width else rounded
        return whole.astype(table_Vd.dtype)

    def scattered(_: None, d_VD: jax.Array) -> tuple[jax.Array]:
        handed_on = d_VD if policy.gradient is None else d_VD.astype(policy.gradient)
        if not by_width:
            return (handed_on.astype(d_VD.dtype),)
        d_Vd = scatter_sum(handed_on, dim=1)
        # In the table's layout: else its width comes outermost, and the optimizer would transpose
        # all to match.
        return (with_layout_constraint(d_Vd, Layout((0, 1))).astype(d_VD.dtype),)

    gathered.defvjp(lambda table_Vd: (gathered(table_Vd), None), scattered)
    return gathered


def cross_entropy_of_token_shards(
    placement: Placement,
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    policy: Policy,
    **options: Any,
) -> CrossEntropySums:
    """Computes the whole batch's ``linear_cross_entropy``; each device computes its own tokens.

    Args:
        table_VD: vocabulary projection as stored, sharded by width, by rows, or not at all.
        policy: the table is gathered in its ``compute`` dtype. Gradients are rounded to its
            ``gradient`` dtype, if there is one, before they are summed over devices.
        options: as in ``TokenLoss``.
    """
    tokens, by_width = (BATCH, SEQUENCE), placement.gathered_axes(EMBED)
    by_vocabulary = placement.axes(VOCAB)
    over = placement.axes(BATCH) + placement.axes(SEQUENCE) + by_vocabulary
    gathered = _gather_table(by_width, policy, copying_axis(placement))

    def local(hidden_btD, table_Vd, targets_bt, weights_bt) -> tuple[jax.Array, ...]:
        sums = linear_cross_entropy(
            hidden_btD,
            gathered(table_Vd),
            targets_bt,
            weights_bt,
            **options,
            vocabulary_axes=by_vocabulary,
        )
        return tuple(all_reduce(x, over) if over else x for x in sums)

    sums = placement.on_each_device(
        local,
        in_specs=(
            placement.spec((*tokens, None)),
            placement.spec((VOCAB, EMBED)),
            placement.spec(tokens),
            placement.spec(tokens),
        ),
        out_specs=(PartitionSpec(), PartitionSpec()),
        # A kernel does not say over which axes its results vary; the table's gradient is summed
        # over those that do not split it as it leaves.
        check_vma=False,
    )(hidden_BTD, table_VD, targets_BT, weights_BT)
    return CrossEntropySums(*sums)
