"""The lightning indexer of latent attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

Dims: B batch, T position, D model width, R width of compressed queries, I index head, J its width.
"""

import dataclasses
import functools

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.kinds import NormKind
from jaxinfra.config.latent import LatentAttentionConfig
from jaxinfra.config.norm import NormConfig
from jaxinfra.model.execution import Execution
from jaxinfra.model.norm import Norm
from jaxinfra.model.projection import Projection
from jaxinfra.model.rope import RopeTable, apply_rope
from jaxinfra.numerics.policy import unquantized
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.key_choice import KeyIndex

_NORM = NormConfig(kind=NormKind.LAYER, epsilon=1e-6, bias=True)


class Indexer(nnx.Module):
    """Scores of keys: the sum over heads of weight * relu(q k / sqrt(J)) / sqrt(I).

    No gradient passes: DeepSeek trains the indexer by a loss of its own, which is not computed
    here. So its matmuls are never in 8 bits either, whose records are updated by gradients.
    """

    def __init__(
        self,
        config: LatentAttentionConfig,
        *,
        model_dim: int,
        std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        assert config.indexer is not None, "LatentAttention"
        assert config.query_rank is not None, "LatentAttentionConfig"
        self.config = config.indexer
        self.place = execution.place
        policy = unquantized(execution.policy)
        execution = dataclasses.replace(execution, policy=policy)
        heads, width = config.indexer.num_heads, config.indexer.head_dim
        # Every device has all heads: a choice is one for all heads of attention.
        build = functools.partial(Projection, std=std, execution=execution, rngs=rngs, whole=True)
        self.query = build(
            "BTR,RIJ->BTIJ",
            shape=(config.query_rank, heads, width),
            dims=(axes.LATENT, None, axes.HEAD),
        )
        self.key = build("BTD,DJ->BTJ", shape=(model_dim, width), dims=(axes.EMBED, None))
        self.key_norm = Norm(_NORM, shape=(width,), dims=(None,), execution=execution)
        self.head_weight = build(
            "BTD,DI->BTI",
            shape=(model_dim, heads),
            dims=(axes.EMBED, None),
            site=Site.ROUTER,
        )
        self.policy = policy

    def __call__(
        self, x_BTD: Float[Array, "B T D"], query_BTR: Float[Array, "B T R"], rope: RopeTable
    ) -> KeyIndex:
        """Computes queries and keys with positions, and the heads' weights in fp32.

        Args:
            query_BTR: compressed queries of attention, behind their norm.
        """
        x_BTD, query_BTR = jax.lax.stop_gradient((x_BTD, query_BTR))
        rotate = functools.partial(apply_rope, table=rope, pairs=self.config.pairs)
        q_BTIJ = self.place(rotate(self.query(query_BTR)), (axes.BATCH, axes.SEQUENCE, None, None))
        key_BTJ = rotate(self.key_norm(self.key(x_BTD))[:, :, None])[:, :, 0]
        factor = (self.config.num_heads * self.config.head_dim) ** -0.5
        weight_BTI = factor * self.policy.to_accum(self.head_weight(x_BTD))
        return jax.lax.stop_gradient(
            KeyIndex(q_BTIJ=q_BTIJ, weight_BTI=weight_BTI, key_BTJ=key_BTJ)
        )
