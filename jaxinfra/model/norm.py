"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) over x's last dim."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxinfra.axes import Dims
from jaxinfra.config.kinds import NormKind
from jaxinfra.config.model import NormConfig
from jaxinfra.config.parts import find_part
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import labelled
from jaxinfra.ops.exact_rows import kernel_rms_norm, ordered_mean
from jaxinfra.ops.multiply import GATHERED, Deferred, RmsNorm


class Norm(nnx.Module):
    """Normalization (x - mean) / sqrt(variance + epsilon) * (scale + offset) + bias over a width.

    In RMSNorm, mean is 0 and variance the mean square. All is computed in the accum dtype.

    Args:
        shape: shape of the scale, x's last dims.
        dims: logical dims of the scale.
        over: how many of x's last dims are normalized together.
    """

    def __init__(
        self,
        config: NormConfig,
        *,
        shape: tuple[int, ...],
        dims: Dims,
        over: int = 1,
        execution: Execution,
    ):
        self.config = config
        self.label = ""  # its own name in the block, once it has one
        self.policy = execution.policy
        self.gather = execution.gather
        self.dims = dims
        self.over = tuple(range(-over, 0))
        param, start = execution.policy.param, 1.0 - config.scale_offset
        self.scale = nnx.Param(jnp.full(shape, start, param), axes=dims) if config.scale else None
        self.bias = nnx.Param(jnp.zeros(shape, param), axes=dims) if config.bias else None

    def deferred(self, x: Float[Array, "*rows width"]) -> Deferred | None:
        """Returns x as input of a matmul kernel that also normalizes; None if no kernel can."""
        config = self.config
        if config.function is not None or config.kind is not NormKind.RMS or config.bias:
            return None
        if self.scale is None:
            return None
        norm = RmsNorm(scale=self.scale[...], epsilon=config.epsilon, offset=config.scale_offset)
        return Deferred(x=x, norm=norm)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Normalizes each row of x; the result is in the compute dtype."""
        if self.policy.is_exact and self.config.kind is NormKind.RMS and self.scale is not None:
            scale = self._row(self.scale, x).reshape(-1) + self.config.scale_offset
            if len(self.over) == 1 and x.dtype == self.policy.compute and self.bias is None:
                y = kernel_rms_norm(x, scale, epsilon=self.config.epsilon)
                if y is not None:
                    return labelled(y, self.label)
        y = self.policy.to_accum(x)
        if self.config.function is not None:
            y = find_part(self.config.function)(y, self.config.epsilon)
        else:
            if self.config.kind is NormKind.LAYER:
                y = y - self._mean(y)
            square = self._mean(y * y)
            y = y * jax.lax.rsqrt(square + self.config.epsilon)
        if self.scale is not None:
            y = y * (self._row(self.scale, y) + self.config.scale_offset)
        if self.bias is not None:
            y = self.policy.pinned(y) + self._row(self.bias, y)
        return labelled(self.policy.to_compute(y), self.label)

    def _mean(self, y: jax.Array) -> jax.Array:
        if self.policy.is_exact:
            return ordered_mean(self.policy.pinned(y), len(self.over))
        return jnp.mean(y, axis=self.over, keepdims=True)

    def _row(self, param: nnx.Param, like: jax.Array) -> jax.Array:
        vector = param[...]
        if self.gather is not None:
            vector = checkpoint_name(self.gather.whole(vector, self.dims), GATHERED)
        if vector.ndim > 1 and vector.shape[0] != like.shape[-vector.ndim]:
            # Key heads fewer than the devices that shard them are repeated, and so is their scale.
            vector = jnp.repeat(vector, like.shape[-vector.ndim] // vector.shape[0], axis=0)
        return jnp.expand_dims(self.policy.to_accum(vector), range(like.ndim - vector.ndim))
