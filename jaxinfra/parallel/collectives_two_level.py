"""Collectives in two levels: within a node over its fast links, then between nodes.

``inner`` is the mesh axis within a node (I devices), ``outer`` the one between nodes (O). Each does
the bulk where links are fast, and of what crosses nodes every device carries an equal share.

Bytes that a device sends, of D that it passes in:

| | inner | outer | outer, in one level |
|---|---|---|---|
| all-reduce | 2 D (I-1)/I | 2 (D/I) (O-1)/O | as much, if the library sees the nodes |
| all-to-all | D (I-1)/I | D (O-1)/O in O-1 messages | D (O-1)/O in I (O-1) messages |
"""

from jaxtyping import Array, Shaped

from jaxinfra.parallel.collectives import (
    Axis,
    all_gather,
    all_reduce,
    all_to_all,
    num_devices,
    reduce_scatter,
)


def two_level_all_reduce(
    x: Shaped[Array, "*dims"], *, inner: Axis, outer: Axis, dim: int = 0
) -> Shaped[Array, "*dims"]:
    """The sum over both axes: reduce-scatter within, all-reduce between, all-gather within.

    ``dim`` must divide by the inner axis.
    """
    part = reduce_scatter(x, inner, dim=dim)
    return all_gather(all_reduce(part, outer), inner, dim=dim)


def two_level_all_to_all(
    x: Shaped[Array, "*dims"], *, inner: Axis, outer: Axis
) -> Shaped[Array, "*dims"]:
    """The result of ``all_to_all(x, (outer, inner))`` along dim 0, which holds O x I equal parts.

    First each device collects, within its node, all that its node sends to devices of its own inner
    number; then one message goes to each other node, I times larger than in one level.
    """
    num_outer, num_inner = num_devices(outer), num_devices(inner)
    x_OIp = x.reshape(num_outer, num_inner, -1, *x.shape[1:])
    # By destination's inner number; what arrives is by the sender's.
    x_OIp = all_to_all(x_OIp, inner, split_dim=1, concat_dim=1)
    # By destination's node; what arrives is by the sender's.
    x_OIp = all_to_all(x_OIp, outer, split_dim=0, concat_dim=0)
    return x_OIp.reshape(x.shape)
