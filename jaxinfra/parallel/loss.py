"""The loss of each device's own tokens, where a kernel computes it that runs on one device.

The compiler cannot split a kernel. A device gathers the vocabulary's table along its width, in the
compute dtype, takes the loss of its tokens, and sums over the devices follow: two scalars forward,
and backward the table's gradient, reduce-scattered in its own dtype over the axes that split the
table. Where the table's rows are split too, devices that share the vocabulary exchange five numbers
a token on the way, and sum the parts of hidden's gradient, in its dtype.

Dims: B batch, T position, D model width, V vocabulary; lower case of one device.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfra.core.axes import BATCH, EMBED, SEQUENCE, VOCAB
from jaxinfra.ops.cross_entropy import (
    CrossEntropySums,
    kernel_on_one_device,
    linear_cross_entropy,
)
from jaxinfra.parallel.collectives import all_gather, all_reduce, reduce_scatter
from jaxinfra.parallel.place import Placement


def takes_own_tokens(placement: Placement, hidden_BTD: jax.Array, *, num_ids: int) -> bool:
    """Whether "auto" takes the kernel for a device's tokens and its rows of the table."""
    rows = num_ids // math.prod(placement.mesh.shape[axis] for axis in placement.axes(VOCAB))
    return placement.mesh.size > 1 and kernel_on_one_device(hidden_BTD, num_ids=rows)


def cross_entropy_of_own_tokens(
    placement: Placement,
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    compute: jnp.dtype,
    gradient: jnp.dtype | None,
    z_loss: float,
    logit_soft_cap: float | None,
    label_smoothing: float = 0.0,
) -> CrossEntropySums:
    """``linear_cross_entropy`` over the whole batch, its rows and positions as placed.

    Args:
        table_VD: as stored, split by width or not, by rows or not.
        compute: what it is gathered in; its values are rounded to that, its gradients are not.
        gradient: what its gradient is rounded to before it is summed over devices, if anything.
    """
    tokens, by_width = (BATCH, SEQUENCE), placement.axes(EMBED)
    by_vocabulary = placement.axes(VOCAB)
    over = placement.axes(BATCH) + placement.axes(SEQUENCE) + by_vocabulary

    @jax.custom_vjp
    def gathered(table_Vd: jax.Array) -> jax.Array:
        rounded = table_Vd.astype(compute)
        whole = all_gather(rounded, by_width, dim=1) if by_width else rounded
        return whole.astype(table_Vd.dtype)

    def scattered(_: None, d_VD: jax.Array) -> tuple[jax.Array]:
        handed_on = d_VD if gradient is None else d_VD.astype(gradient)
        d_Vd = reduce_scatter(handed_on, by_width, dim=1) if by_width else handed_on
        return (d_Vd.astype(d_VD.dtype),)

    gathered.defvjp(lambda table_Vd: (gathered(table_Vd), None), scattered)

    def local(hidden_btD, table_Vd, targets_bt, weights_bt) -> tuple[jax.Array, ...]:
        sums = linear_cross_entropy(
            hidden_btD,
            gathered(table_Vd),
            targets_bt,
            weights_bt,
            z_loss=z_loss,
            logit_soft_cap=logit_soft_cap,
            label_smoothing=label_smoothing,
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
