"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are rebuilt from one latent per token. Position is encoded in a
separate rotated key, which all heads share. The cache has only latents and rotated keys, and the
indexer's keys where an indexer chooses the keys of each query (DeepSeek-V3.2).

Dims: B batch, T position, D model width, N heads, H head width, R compressed (latent) width,
P rotated width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.model import LatentAttentionConfig
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.cache import JointCache, StateCache, TokenCache
from jaxinfra.model.execution import Execution
from jaxinfra.model.indexer import Indexer
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Abilities, LayerOutput, Pass
from jaxinfra.model.projection import Projection, from_heads
from jaxinfra.model.rope import apply_rope
from jaxinfra.ops.attention import expanded
from jaxinfra.ops.cached_attention import Pages, as_cached
from jaxinfra.ops.exact_attention import rebuilt_heads
from jaxinfra.ops.key_choice import KeyIndex

_HEADS = (axes.BATCH, axes.SEQUENCE, axes.Q_HEADS, axes.HEAD)


class LatentAttention(nnx.Module):
    """Attention softmax((q_nope k_nope^T + q_rot k_rot^T) scale) v; latents give k_nope and v.

    Args:
        out_std: standard deviation of the output projection's initial weights.
    """

    abilities = Abilities()

    def __init__(
        self,
        config: LatentAttentionConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.execution = execution

        build = functools.partial(Projection, execution=execution, rngs=rngs)

        def inward(spec: str, shape: tuple[int, ...], dims: axes.Dims) -> Projection:
            return build(spec, shape=shape, dims=dims, std=std)

        def down(width: int) -> Projection:
            return build(
                "BTD,DR->BTR",
                shape=(model_dim, width),
                dims=(axes.EMBED, axes.LATENT),
                bias_rank=1 if config.bias else 0,
                std=std,
                whole=True,
            )

        def latent_norm(width: int) -> Norm:
            return Norm(config.norm, shape=(width,), dims=(axes.LATENT,), execution=execution)

        heads, by_head = config.num_q_heads, (axes.LATENT, axes.Q_HEADS, axes.HEAD)
        if config.query_rank is None:
            shape = (model_dim, heads, config.head_dim)
            self.query = inward("BTD,DNH->BTNH", shape, (axes.EMBED, axes.Q_HEADS, axes.HEAD))
        else:
            rank = config.query_rank
            self.query_down = down(rank)
            self.query_norm = latent_norm(rank)
            self.query_up = inward("BTR,RNH->BTNH", (rank, heads, config.head_dim), by_head)
        # The latent and the shared rotated key come out of one matrix.
        self.kv_down = down(config.kv_rank + config.rope_dim)
        self.kv_norm = latent_norm(config.kv_rank)
        up = (config.kv_rank, heads, config.nope_dim + config.value_dim)
        self.kv_up = inward("BTR,RNH->BTNH", up, by_head)
        given = {"model_dim": model_dim, "std": std, "execution": execution, "rngs": rngs}
        self.indexer = None if config.indexer is None else Indexer(config, **given)
        how = {"std": out_std, "execution": execution, "rngs": rngs}
        self.out = from_heads(heads, config.value_dim, model_dim, bias=config.bias, **how)

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Attends within x or, where ``given`` has a cache, to the cached tokens and x.

        Returns [B, T, D] in the compute dtype, and the cache with x's latents and rotated keys.
        """
        config = self.config
        q_BTNH, index = self._queries(x_BTD, given)
        latent_BTR, key_BTP = jnp.split(self.kv_down(x_BTD), [config.kv_rank], axis=-1)
        latent_BTR = self.kv_norm(latent_BTR)
        if config.rope is not None and given.rope is not None:
            pairs = config.rope.pairs
            nope_BTNH, rot_BTNP = jnp.split(q_BTNH, [config.nope_dim], axis=-1)
            is_exact = self.execution.policy.is_exact
            rot_BTNP = apply_rope(rot_BTNP, given.rope, pairs=pairs, is_exact=is_exact)
            q_BTNH = jnp.concatenate([nope_BTNH, rot_BTNP], axis=-1)
            key_BT1P = key_BTP[:, :, None]
            key_BTP = apply_rope(key_BT1P, given.rope, pairs=pairs, is_exact=is_exact)[:, :, 0]
        q_BTNH = self.execution.place(q_BTNH, _HEADS)
        cache = given.cache
        assert not isinstance(cache, StateCache | JointCache), "CacheSpec"
        if cache is not None:
            new = {"latent": latent_BTR, "rotated_key": key_BTP}
            new |= {} if index is None else {"index_key": index.key_BTJ}
            cache = cache.append(new, given.positions_BT)
            # As in GroupedAttention: read back or not, the same.
            latent_BTR, key_BTP = (as_cached(x, cache.format) for x in (latent_BTR, key_BTP))
            if index is not None:
                key_BTJ = as_cached(index.key_BTJ, cache.format)
                index = dataclasses.replace(index, key_BTJ=key_BTJ)
        with jax.named_scope("core"):
            if cache is None or cache.is_empty:
                out_BTNH = self._attend(q_BTNH, latent_BTR, key_BTP, given, index)
            else:
                out_BTNH = self._decode(q_BTNH, cache, given, index)
        return LayerOutput(x=self.out(out_BTNH), cache=cache)

    def _queries(self, x_BTD: jax.Array, given: Pass) -> tuple[jax.Array, KeyIndex | None]:
        if self.config.query_rank is None:
            return self.query(x_BTD), None
        query_BTR = self.query_norm(self.query_down(x_BTD))
        if self.indexer is None:
            return self.query_up(query_BTR), None
        assert given.rope is not None, "LatentAttentionConfig"
        return self.query_up(query_BTR), self.indexer(x_BTD, query_BTR, given.rope)

    def _attend(
        self,
        q_BTNH: jax.Array,
        latent_BTR: jax.Array,
        key_BTP: jax.Array,
        given: Pass,
        index: KeyIndex | None,
    ) -> jax.Array:
        """Attention to keys and values of all heads, rebuilt from the latents."""
        execution, config = self.execution, self.config
        if execution.kernels.attend_latents is not None:
            if index is not None:
                raise UnsupportedError(
                    "an indexer over the context axis: it chooses among all keys of a sequence, "
                    "and devices have some of them; use fsdp in place of context"
                )
            # Other devices have some of the sequence: latents go to them, not heads.
            return execution.kernels.attend_latents(
                q_BTNH,
                latent_BTR,
                key_BTP,
                self.kv_up.merged_weight,
                config=config,
                recipe=self.kv_up.recipe.unquantized,
                segment_ids_BT=given.segment_ids_BT,
            )
        k_BTNH, v_BTNH = expanded(self.kv_up(latent_BTR), key_BTP, config=config)
        return execution.kernels.attend(
            q_BTNH,
            execution.place(k_BTNH, _HEADS),
            execution.place(v_BTNH, _HEADS),
            config=config,
            segment_ids_BT=given.segment_ids_BT,
            **_more(index),
        )

    def _decode(
        self, q_BTNH: jax.Array, cache: TokenCache, given: Pass, index: KeyIndex | None
    ) -> jax.Array:
        """Attention to the cached latents themselves: what would rebuild keys multiplies queries,
        what would rebuild values multiplies the result (section 2.1.2 there).
        """
        config, recipe = self.config, self.kv_up.recipe.unquantized
        if self.execution.policy.is_exact:
            return self._decode_heads(q_BTNH, cache, given)
        up_RNH = self.kv_up.merged_weight
        nope_BTNH, rot_BTNP = jnp.split(q_BTNH, [config.nope_dim], axis=-1)
        multiply = self.execution.multiply
        q_BTNR = multiply(
            "BTNH,RNH->BTNR", nope_BTNH, up_RNH[..., : config.nope_dim], recipe=recipe
        )
        out_BTNR = self.execution.kernels.decode(
            jnp.concatenate([q_BTNR, rot_BTNP], axis=-1),
            cache.view(),
            config=config,
            positions_BT=given.positions_BT,
            **_more(index),
        )
        return multiply("BTNR,RNH->BTNH", out_BTNR, up_RNH[..., config.nope_dim :], recipe=recipe)

    def _decode_heads(self, q_BTNH: jax.Array, cache: TokenCache, given: Pass) -> jax.Array:
        """Attention to keys and values rebuilt from the cached latents, as in training."""
        execution, config = self.execution, self.config
        rows = cache.view().tokens(q_BTNH.dtype)
        up_BSNH = self.kv_up(rows["latent"])
        k_BSNH, v_BSNH = expanded(up_BSNH, rows["rotated_key"], config=config)
        heads = {"k": execution.place(k_BSNH, _HEADS), "v": execution.place(v_BSNH, _HEADS)}
        return execution.kernels.decode(
            q_BTNH,
            Pages(
                arrays={name: x[None] for name, x in heads.items()},
                layer=np.zeros((), np.int32),
            ),
            config=rebuilt_heads(config),
            positions_BT=given.positions_BT,
        )


def _more(index: KeyIndex | None) -> dict[str, KeyIndex]:
    """The argument that functions of attention without an indexer do not all have."""
    return {} if index is None else {"index": index}
