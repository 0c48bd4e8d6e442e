"""The lightning indexer's choice of keys (DeepSeek-V3.2, arXiv 2512.02556, section 2.1), in XLA.

Dims: B batch, T query, S key, I index head, J width of an index head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfra.numerics.recipe import Recipe
from jaxinfra.ops.multiply import multiply
from jaxinfra.ops.query_blocks import in_query_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyIndex:
    """The indexer's queries, their heads' weights and the keys of the same tokens."""

    q_BTIJ: Float[Array, "B T I J"]
    weight_BTI: Float[Array, "B T I"]  # fp32, with all constant factors of a score
    key_BTJ: Float[Array, "B T J"]


def best_keys(
    index: KeyIndex,
    key_BSJ: Float[Array, "B S J"],
    visible_BTS: Bool[Array, "B T S"],
    *,
    top_k: int,
) -> Int[Array, "B T K"]:
    """Returns the ``top_k`` best keys of each query, best first; where fewer are visible, others
    behind them.

    A key's score is the sum over heads of weight * relu(q k), in fp32. Of equal scores the earlier
    key is better.
    """
    fp32 = jnp.dtype("float32")
    recipe = Recipe(compute=index.q_BTIJ.dtype, accum=fp32)
    dots_BTIS = multiply("BTIJ,BSJ->BTIS", index.q_BTIJ, key_BSJ, recipe=recipe, out=fp32)
    # Not a matmul, which might round its fp32 operands.
    scores_BTS = jnp.sum(index.weight_BTI[..., None] * jax.nn.relu(dots_BTIS), axis=2)
    scores_BTS = jnp.where(scores_BTS == 0.0, 0.0, scores_BTS)  # -0.0 would be below 0.0
    return jax.lax.top_k(jnp.where(visible_BTS, scores_BTS, -jnp.inf), top_k)[1]


def chosen_keys(
    index: KeyIndex,
    key_BSJ: Float[Array, "B S J"],
    visible_BTS: Bool[Array, "B T S"],
    *,
    top_k: int,
) -> Bool[Array, "B T S"]:
    """Returns which keys each query attends to: the best of those that it sees, or all of them if
    they are no more than ``top_k``.
    """
    if top_k >= key_BSJ.shape[1]:
        return visible_BTS
    best_BTK = best_keys(index, key_BSJ, visible_BTS, top_k=top_k)
    best_BTS = jnp.zeros(visible_BTS.shape, bool)
    best_BTS = jnp.put_along_axis(best_BTS, best_BTK, True, axis=-1, inplace=False)
    return best_BTS & visible_BTS


def choice_bias(
    index: KeyIndex, segment_ids_BT: Int[Array, "B T"] | None, *, top_k: int, dtype: jnp.dtype
) -> Float[Array, "B 1 T T"] | None:
    """Computes the bias that hides keys which were not chosen: 0 or -inf, without a gradient.

    Returns None where ``top_k`` keys are all that there are.
    """
    length = index.key_BTJ.shape[1]
    if top_k >= length:
        return None
    index = jax.lax.stop_gradient(index)
    place_T = jnp.arange(length, dtype=jnp.int32)
    place_BT = jnp.broadcast_to(place_T, index.key_BTJ.shape[:2])
    ids_BT = jnp.zeros_like(place_BT) if segment_ids_BT is None else segment_ids_BT

    def block(queries: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_BtIJ, weight_BtI, place_Bt, id_Bt = queries
        visible_BtS = place_Bt[:, :, None] >= place_T[None, None, :]
        visible_BtS &= id_Bt[:, :, None] == ids_BT[:, None, :]
        asked = dataclasses.replace(index, q_BTIJ=q_BtIJ, weight_BTI=weight_BtI)
        chosen_BtS = chosen_keys(asked, index.key_BTJ, visible_BtS, top_k=top_k)
        return jnp.where(chosen_BtS, jnp.zeros((), dtype), jnp.array(-jnp.inf, dtype))

    bias_BTS = in_query_blocks(block, (index.q_BTIJ, index.weight_BTI, place_BT, ids_BT))
    return bias_BTS[:, None]
