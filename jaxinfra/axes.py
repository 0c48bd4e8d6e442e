"""The two vocabularies of the code base: mesh axes and logical dims.

An *axis* belongs to the device mesh, a *dim* to a tensor. Layers name the logical dims of every
parameter and activation; a rules table (``jaxinfra.parallel.mesh``) maps dims to mesh axes; one
function (``jaxinfra.parallel.place``) places them. Nothing else knows both vocabularies.

A tensor's name ends in the letters of its dims:

    B batch            T query position     S key position     D model (embed) width
    N query heads      K key/value heads    G query heads per key/value head
    H head width       F mlp width          V vocabulary       L layers
    E experts          R compressed (latent) width

so ``q_BTNH`` has shape [batch, position, query heads, head width]. Inside ``shard_map`` a
lower-case letter is a per-shard size.
"""

import enum

type Dims = tuple[str | None, ...]
"""Logical dims of one tensor, one entry a dimension; None where a dim is never sharded."""


class MeshAxis(enum.StrEnum):
    """Mesh axes, slowest link outermost."""

    PIPE = "pipe"
    REPLICA = "replica"
    FSDP = "fsdp"
    CONTEXT = "context"
    TENSOR = "tensor"


MESH_AXES: tuple[str, ...] = tuple(axis.value for axis in MeshAxis)

# Logical dims of parameters.
EMBED = "embed"  # D: the residual stream
MLP = "mlp"  # F
Q_HEADS = "q_heads"  # N
KV_HEADS = "kv_heads"  # K
HEAD = "head"  # H
VOCAB = "vocab"  # V
POSITION = "position"  # rows of a learned position table
SCORE = "score"  # the one row of a reward model's head
EXPERTS = "experts"  # routed experts
LATENT = "latent"  # compressed width of queries, keys or values
LAYERS = "layers"  # L: the stacked dim of a scanned block

# Logical dims of activations. The residual stream's width has its own name there, because a
# parameter's embed dim may be sharded (FSDP) where an activation's is not.
BATCH = "batch"  # B
SEQUENCE = "sequence"  # T, where a layer mixes or projects positions
STREAM_SEQUENCE = "stream_sequence"  # T, of the residual stream between projections
STREAM = "stream"  # D, of an activation
