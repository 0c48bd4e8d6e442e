"""Runs a decoder's multi-token prediction on hidden states and the tokens after them.

Dims: B batch, T position, D model width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfra.model.decoder import Decoder, KVCache
from jaxinfra.model.passes import LayerOutput, Pass
from jaxinfra.model.rope import rope_table


def predict(
    model: Decoder,
    hidden_BTD: Float[Array, "B T D"],
    next_ids: Int[Array, "B T"],
    *,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    contexts: Int[Array, "B"] | None = None,
) -> LayerOutput:
    """Computes hidden states whose logits predict the token after each of ``next_ids``.

    Args:
        model: a decoder whose config has ``mtp``.
        hidden_BTD: x of ``Decoder.run``, or of this function at the position before.
        next_ids: the token after each position.
        positions, segment_ids, contexts: of ``hidden_BTD``, as in ``Decoder.run``.
        cache: of the module's one layer.
    """
    module = model.mtp
    assert module is not None, "ModelConfig.mtp"
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(next_ids.shape[1])[None], next_ids.shape)
    rope, mixer = None, module.part.blocks[0].mixer
    if mixer.rope is not None:
        rope = rope_table(
            mixer.rope,
            head_dim=mixer.rotated_dim,
            positions_BT=positions,
            contexts_B=contexts,
            is_exact=model.execution.policy.is_exact,
        )
    given = Pass(positions_BT=positions, segment_ids_BT=segment_ids, rope=rope)
    with jax.named_scope("mtp"):
        embedded_BTD = model.embed(next_ids, positions, None)
        out = module(hidden_BTD, embedded_BTD, given, cache)
    return dataclasses.replace(out, x=model.scaled(out.x))
