"""One transformer block.

Dims: B batch, T position, D model width.
"""

import functools

import jax
from flax import nnx

from jaxinfra.config.model import BlockConfig, NormPlacement
from jaxinfra.core import axes
from jaxinfra.layers.attention import Attention
from jaxinfra.layers.cache import LayerCache
from jaxinfra.layers.dropout import dropout
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.mlp import Mlp
from jaxinfra.layers.norm import Norm
from jaxinfra.layers.rope import RopeTable

_STREAM = (axes.BATCH, axes.STREAM_SEQUENCE, axes.STREAM)
_NORMED = (axes.BATCH, axes.SEQUENCE, axes.STREAM)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); sandwich placement norms the branch too.

    Args:
        std, out_std: of initial weights, inward and back into the residual stream.
        dropout_rate: on both residual branches, where a key is given.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        dropout_rate: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.execution = execution
        self.dropout_rate = dropout_rate
        norm = functools.partial(
            Norm, config.norm, width=model_dim, dims=(axes.EMBED,), execution=execution
        )
        sizes = {"model_dim": model_dim, "std": std, "out_std": out_std}
        self.attention_norm = norm()
        self.attention = Attention(config.attention, **sizes, execution=execution, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = Mlp(config.mlp, **sizes, execution=execution, rngs=rngs)
        sandwich = config.norm_placement is NormPlacement.SANDWICH
        self.attention_post_norm = norm() if sandwich else None
        self.mlp_post_norm = norm() if sandwich else None

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        rope: RopeTable | None,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None = None,
        cache: LayerCache | None = None,
        prefill: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Arguments and result as ``Attention``; dropout only where a key is given."""
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        with jax.named_scope("attention"):
            branch_BTD, cache = self.attention(
                self._inward(self.attention_norm(x_BTD)),
                rope=rope,
                positions_BT=positions_BT,
                segment_ids_BT=segment_ids_BT,
                cache=cache,
                prefill=prefill,
            )
            x_BTD = self._add(x_BTD, branch_BTD, self.attention_post_norm, keys[0])
        with jax.named_scope("mlp"):
            branch_BTD = self.mlp(self._inward(self.mlp_norm(x_BTD)))
            x_BTD = self._add(x_BTD, branch_BTD, self.mlp_post_norm, keys[1])
        return x_BTD, cache

    def _inward(self, x_BTD: jax.Array) -> jax.Array:
        # One gather for all the projections that read it, where the stream is split by sequence.
        return self.execution.constrain(x_BTD, _NORMED)

    def _add(
        self, x_BTD: jax.Array, branch_BTD: jax.Array, norm: Norm | None, key: jax.Array | None
    ) -> jax.Array:
        branch_BTD = self.execution.constrain(branch_BTD, _STREAM)
        if norm is not None:
            branch_BTD = norm(branch_BTD)
        branch_BTD = dropout(
            branch_BTD,
            rate=self.dropout_rate,
            key=key,
            constrain=self.execution.constrain,
        )
        return self.execution.constrain(x_BTD + branch_BTD, _STREAM)
