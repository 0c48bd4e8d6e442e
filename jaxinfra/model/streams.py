"""Several residual streams of which layers read one (AltUp, Baykal et al. 2023): Gemma 3n.

Streams are side by side in the model's stream, [B, T, S D].

Dims: B batch, T position, D model width, S stream, P predicted stream, R rank.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.model import BlockConfig, ModelConfig
from jaxinfra.config.streams import StreamsConfig
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.execution import Execution
from jaxinfra.model.norm import Norm
from jaxinfra.model.projection import Projection
from jaxinfra.numerics.policy import Policy
from jaxinfra.numerics.recipe import Site

_LEAST_SQUARE = 1e-5  # of a stream's mean square, as the reference has it


class StreamUpdate(nnx.Module):
    """A block's predictions of all streams, their corrections, and the learned residual."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        model_dim: int,
        std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        assert config.streams is not None, "Block"
        self.config, self.policy = config.streams, execution.policy
        given = {"std": std, "execution": execution, "rngs": rngs}
        count, rank = self.config.num_streams, self.config.residual_rank

        def numbers(spec: str, *shape: int, dim: str | None = None) -> Projection:
            how = {"site": Site.ROUTER, "whole": True}  # as a router's, in the accum dtype
            return Projection(spec, shape=shape, dims=(dim, None), **how, **given)

        def norm() -> Norm:
            shape = {"shape": (model_dim,), "dims": (axes.EMBED,)}
            return Norm(config.norm, **shape, execution=execution)

        self.router_norm, self.residual_norm = norm(), norm()
        self.router = numbers("BTD,DS->BTS", model_dim, count, dim=axes.EMBED)
        self.prediction = numbers("BTS,SP->BTP", count, count**2)
        self.correction = numbers("BTS,SP->BTP", count, count)
        zeros = jnp.zeros(model_dim, execution.policy.param)
        self.out_scale = nnx.Param(zeros, axes=(axes.EMBED,))
        into, back = (model_dim, rank), (rank, model_dim)
        self.down = Projection("BTD,DR->BTR", shape=into, dims=(axes.EMBED, None), **given)
        self.up = Projection("BTR,RD->BTD", shape=back, dims=(None, axes.EMBED), **given)

    def predicted(self, x_BTE: Float[Array, "B T SD"]) -> Float[Array, "B T S D"]:
        """Returns the streams that a block expects, each of all before, in the accum dtype."""
        count = self.config.num_streams
        if x_BTE.shape[-1] != count * self.out_scale.shape[-1]:
            raise UnsupportedError(
                f"streams={count} where layers run apart from the embedding, as in a pipeline: "
                "only one stream is sent along; use fsdp and tensor"
            )
        x_BTSD = self.policy.to_accum(x_BTE).reshape(*x_BTE.shape[:2], count, -1)
        modes_BTS = self._modes(x_BTSD[:, :, self.config.active])
        weights = self.policy.to_accum(self.prediction(modes_BTS))
        weights_BTPS = weights.reshape(*weights.shape[:2], count, count)
        return x_BTSD + jnp.einsum("BTPS,BTSD->BTPD", weights_BTPS, x_BTSD, precision="highest")

    def corrected(
        self, predicted_BTSD: jax.Array, x_BTD: Float[Array, "B T D"]
    ) -> Float[Array, "B T S D"]:
        """Returns the streams after a block whose layers made x of the active one."""
        change_BTD = self.policy.to_accum(x_BTD) - predicted_BTSD[:, :, self.config.active]
        weights_BTS = 1.0 + self.policy.to_accum(self.correction(self._modes(x_BTD)))
        return predicted_BTSD + weights_BTS[..., None] * change_BTD[:, :, None]

    def residual(self, normed_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the learned residual of the mixer's input, in the compute dtype."""
        learned_BTD = self.residual_norm(self.up(self.down(normed_BTD)))
        return self.policy.added(normed_BTD, learned_BTD)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Multiplies the active stream by its learned scale, for the layer's own input."""
        if not self.config.scales_output:
            return x_BTD
        scale_11D = jnp.expand_dims(self.policy.to_accum(self.out_scale[...]), (0, 1))
        return self.policy.to_compute(self.policy.to_accum(x_BTD) * scale_11D)

    def _modes(self, x_BTD: jax.Array) -> jax.Array:
        normed_BTD = self.router_norm(self.policy.to_compute(x_BTD))
        routed_BTS = self.router(self.policy.scaled(normed_BTD, 1.0 / x_BTD.shape[-1]))
        return self.policy.to_compute(jnp.tanh(self.policy.to_accum(routed_BTS)))


class Streams(nnx.Module):
    """All streams made of the embedding, and their mean before the final norm."""

    def __init__(self, config: ModelConfig, *, execution: Execution, rngs: nnx.Rngs):
        streams, width = config.blocks[0].streams, config.model_dim
        assert streams is not None, "Decoder"
        self.config: StreamsConfig = streams
        self.policy = execution.policy
        given = {"std": config.init_std, "execution": execution, "rngs": rngs}

        def others() -> nnx.List[Projection]:
            how = {"shape": (width, width), "dims": (axes.EMBED, None)}
            count = streams.num_streams - 1
            return nnx.List([Projection("BTD,DE->BTE", **how, **given) for _ in range(count)])

        self.into, self.back = others(), others()

    def widened(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T SD"]:
        """Returns the embedding and its projections, all of the embedding's size."""
        made = [_sized(each(x_BTD), x_BTD, self.policy) for each in self.into]
        return jnp.concatenate([x_BTD, *made], axis=-1)

    def merged(self, x_BTE: Float[Array, "B T SD"]) -> Float[Array, "B T D"]:
        """Returns the mean of the first stream and the others' projections, of its size."""
        first_BTD, *others = jnp.split(x_BTE, self.config.num_streams, axis=-1)
        found = [
            _sized(project(x_BTD), first_BTD, self.policy)
            for project, x_BTD in zip(self.back, others, strict=True)
        ]
        accum = self.policy.to_accum
        return self.policy.to_compute(sum(map(accum, found), accum(first_BTD)) / (1 + len(found)))


def _sized(x_BTD: jax.Array, like_BTD: jax.Array, policy: Policy) -> jax.Array:
    """The vectors with the root mean squares of others."""
    x, like = policy.to_accum(x_BTD), policy.to_accum(like_BTD)
    size_BT1, wanted_BT1 = (jnp.mean(each**2, axis=-1, keepdims=True) for each in (x, like))
    ratio_BT1 = jnp.sqrt(wanted_BT1) * jax.lax.rsqrt(jnp.maximum(size_BT1, _LEAST_SQUARE))
    return policy.to_compute(x * ratio_BT1)
