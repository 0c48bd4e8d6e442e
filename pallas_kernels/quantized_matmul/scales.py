"""Scales that are themselves kept in 8 bits (Dettmers et al. 2023, QLoRA, section 3: double
quantization).

Dims: G groups of rows, C blocks of columns, S blocks of scales.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common.rounding import keep_rounded

_BLOCK = 256  # scales that share a constant
_LARGEST = 448.0  # of e4m3
_LEAST = 2.0**-100  # of a block's largest deviation: no constant is 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoubleQuantizedScales:
    """Scales less their mean, in 8-bit floats; blocks of 256, row by row, share a constant.

    An element costs 8 / 64 + 32 / (64 * 256) = 0.127 bits where groups have 64 rows, in place of
    0.5 with scales in fp32.
    """

    codes: jax.Array  # e4m3 [*, G, C]
    constants: jax.Array  # fp32 [*, S]
    mean: jax.Array  # fp32 [*]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scales that these stand for."""
        return tuple(self.codes.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the scales that these stand for."""
        return jnp.dtype(jnp.float32)

    def values(self) -> jax.Array:
        """The scales, fp32 [*, G, C]."""
        *lead, groups, columns = self.codes.shape
        each = jnp.repeat(self.constants, _BLOCK, axis=-1)[..., : groups * columns]
        scaled = self.codes.astype(jnp.float32) * each.reshape(*lead, groups, columns)
        return scaled + self.mean[..., None, None]


def double_quantized(scales: jax.Array) -> DoubleQuantizedScales:
    """Rounds scales [*, G, C], each block of 256 by its own largest deviation from the mean."""
    *lead, groups, columns = scales.shape
    flat = scales.astype(jnp.float32).reshape(*lead, groups * columns)
    mean = jnp.mean(flat, axis=-1)
    apart = flat - mean[..., None]
    padded = jnp.pad(apart, [(0, 0)] * len(lead) + [(0, -apart.shape[-1] % _BLOCK)])
    largest = jnp.max(jnp.abs(padded.reshape(*lead, -1, _BLOCK)), axis=-1)
    # The factor is spelled out: compilers differ in whether they divide by a constant.
    constants = jnp.maximum(largest, _LEAST) * jnp.float32(1.0 / _LARGEST)
    scaled = apart / jnp.repeat(constants, _BLOCK, axis=-1)[..., : apart.shape[-1]]
    codes = keep_rounded(jnp.clip(scaled, -_LARGEST, _LARGEST).astype(jnp.float8_e4m3fn))
    return DoubleQuantizedScales(
        codes=codes.reshape(*lead, groups, columns), constants=constants, mean=mean
    )
