"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): its parameters.

They are planned, counted and placed; nothing runs them yet.

Dims: D model width, N heads, H head width, R compressed (latent) width.
"""

from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.config.model import LatentAttentionConfig
from jaxinfra.core import axes
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.norm import Norm
from jaxinfra.layers.passes import LayerOutput, Pass
from jaxinfra.layers.projection import Projection


class LatentAttention(nnx.Module):
    """Queries, keys and values rebuilt from compressed ones; a rotated key shared by all heads.

    Args:
        out_std: standard deviation of the output projection's initial weights.
    """

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

        def inward(spec: str, shape: tuple[int, ...], dims: axes.Dims) -> Projection:
            return Projection(spec, shape=shape, dims=dims, std=std, execution=execution, rngs=rngs)

        def latent_norm(width: int) -> Norm:
            return Norm(config.norm, width=width, dims=(axes.LATENT,), execution=execution)

        heads, by_head = config.num_q_heads, (axes.LATENT, axes.Q_HEADS, axes.HEAD)
        if config.query_rank is None:
            shape = (model_dim, heads, config.head_dim)
            self.query = inward("BTD,DNH->BTNH", shape, (axes.EMBED, axes.Q_HEADS, axes.HEAD))
        else:
            rank = config.query_rank
            self.query_down = inward("BTD,DR->BTR", (model_dim, rank), (axes.EMBED, axes.LATENT))
            self.query_norm = latent_norm(rank)
            self.query_up = inward("BTR,RNH->BTNH", (rank, heads, config.head_dim), by_head)
        # The latent and the shared rotated key come out of one matrix.
        width = config.kv_rank + config.rope_dim
        self.kv_down = inward("BTD,DR->BTR", (model_dim, width), (axes.EMBED, axes.LATENT))
        self.kv_norm = latent_norm(config.kv_rank)
        up = (config.kv_rank, heads, config.nope_dim + config.value_dim)
        self.kv_up = inward("BTR,RNH->BTNH", up, by_head)
        self.out = Projection(
            "BTNH,NHD->BTD",
            shape=(heads, config.value_dim, model_dim),
            dims=(axes.Q_HEADS, axes.HEAD, axes.EMBED),
            std=out_std,
            execution=execution,
            rngs=rngs,
        )

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            "latent attention is planned, not run: choose a model with grouped attention, or "
            "jaxinfra plan for this one"
        )
