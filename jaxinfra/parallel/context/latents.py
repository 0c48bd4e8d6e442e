"""Latent attention over a context axis: devices exchange latents, and each rebuilds from them the
keys and values of its heads for the whole sequence.

A token's latent and rotated key are 576 numbers in DeepSeek-V3, its keys and values 40,960: what is
sent is a seventieth, and what is computed for it is each key's projection once per device instead
of once. That is 2 R (Hk + Hv) FLOPs per key and head beside the attention's (Hk + Hv) t: little
where a device has more tokens than the latent has numbers.

Bytes per device: (P-1) t (R + Hp) b to gather latents, as many to reduce their gradients.

Dims: B batch, t tokens of a device, T of the sequence, N heads, R latent width, H head width,
P rotated width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxinfra import axes
from jaxinfra.axes import MeshAxis
from jaxinfra.config.model import LatentAttentionConfig
from jaxinfra.config.run import LATENT_METHODS, AttentionImplementation, ContextMethod
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.latent_attention import expanded
from jaxinfra.ops.multiply import multiply
from jaxinfra.ops.partial_attention import partial_attention
from jaxinfra.parallel.collectives import all_gather, num_devices
from jaxinfra.parallel.context.methods import causal_attention_to_all
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import chunk_length, chunks_in_sequence

_ROWS = (axes.BATCH, axes.SEQUENCE)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextLatentAttention:
    """Latent attention where the context axis shards sequences, whose order is zig-zag.

    Args:
        placement: the mesh, and which of its axes shard batch, sequence and heads.
        method: one of ``LATENT_METHODS``.
        implementation: kernel for the attention on one device.
    """

    placement: Placement
    method: ContextMethod
    implementation: AttentionImplementation

    def __call__(
        self,
        q_BTNH: jax.Array,
        latent_BTR: jax.Array,
        key_BTP: jax.Array,
        up_RNH: jax.Array,
        *,
        config: LatentAttentionConfig,
        recipe: Recipe,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        """Returns [B, T, N, Hv] in q's dtype, placed as q.

        Raises ConfigError where the sequence does not cut into chunks; UnsupportedError for another
        method, or a window that leaves keys out.
        """
        length, place = q_BTNH.shape[1], self.placement
        chunk_length(length, place.mesh.shape[MeshAxis.CONTEXT])
        if self.method not in LATENT_METHODS:
            raise UnsupportedError(
                f"context_method={self.method.value} with latent attention: devices exchange "
                f"latents, not heads; choose {' or '.join(each.value for each in LATENT_METHODS)}"
            )
        if config.window is not None and config.window < length:
            raise UnsupportedError(
                f"window={config.window} with latent attention over the context axis; leave the "
                "window or the axis out"
            )
        q_spec = place.spec((*_ROWS, axes.Q_HEADS, axes.HEAD))
        latent_spec = place.spec((*_ROWS, None))
        up_spec = place.spec((None, axes.Q_HEADS, None))
        ids_spec = None if segment_ids_BT is None else place.spec(_ROWS)
        return place.on_each_device(
            functools.partial(self._local, config=config, recipe=recipe),
            in_specs=(q_spec, latent_spec, latent_spec, up_spec, ids_spec),
            out_specs=q_spec,
            # A kernel does not say over which axes its results vary; nothing is summed over any.
            check_vma=False,
        )(q_BTNH, latent_BTR, key_BTP, up_RNH, segment_ids_BT)

    def _local(
        self,
        q_BtNH: jax.Array,
        latent_BtR: jax.Array,
        key_BtP: jax.Array,
        up_RNH: jax.Array,
        ids_Bt: jax.Array | None,
        *,
        config: LatentAttentionConfig,
        recipe: Recipe,
    ) -> jax.Array:
        axis = str(MeshAxis.CONTEXT)
        size = num_devices(axis)

        def whole(x_Bt: jax.Array) -> jax.Array:
            return chunks_in_sequence(all_gather(x_Bt, axis, dim=1), size)

        def heads(both: jax.Array) -> tuple[jax.Array, jax.Array]:
            latent, key = jnp.split(both, [config.kv_rank], axis=-1)
            up = multiply("BTR,RNH->BTNH", latent, up_RNH, recipe=recipe)
            return expanded(up, key, config=config)

        # Side by side they travel in one send.
        both_Bt = jnp.concatenate([latent_BtR, key_BtP], axis=-1)
        return causal_attention_to_all(
            partial_attention(config, self.implementation),
            axis,
            q_BtNH,
            heads(both_Bt),
            heads(whole(both_Bt)),
            ids_Bt,
            None if ids_Bt is None else whole(ids_Bt),
        )
