"""Calls of the Hopper kernels for few rows, and the reasons why they refuse a call.

Dims: as in ``config``.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.quantized_weight import Arrangement, QuantizedWeight

from .choice import fuses, product_config
from .config import (
    MOST_RESIDENT,
    MOST_ROWS,
    FusedConfig,
    ProductShape,
    QuantizedConfig,
    SkinnyConfig,
    default_fused,
    default_quantized,
    default_skinny,
)
from .hopper_fused import fused_matmul
from .hopper_quantized import quantized_product
from .hopper_skinny import skinny_matmul
from .reference import FewRowsCall

DTYPES = ("bfloat16", "float16")
SCALES = (*DTYPES, "float32")


def unsupported_product(call: FewRowsCall, out_dtype: jnp.dtype) -> str | None:
    """Returns why no kernel can compute the product alone; None if one can.

    With a quantized weight and over 256 rows, the kernel in question is the dequantizing one.
    """
    reason = _unsupported_operands(call, out_dtype)
    if reason is not None:
        return reason
    s = call.shape
    if s.bits == 16 and not 1 <= s.M <= MOST_ROWS:
        return f"{s.M} rows: it takes 1 to {MOST_ROWS}"
    if not s.M:
        return "there are no rows"
    few = ProductShape.of(min(s.M, MOST_ROWS), call.weight, swiglu=s.swiglu)
    return _no_tile(s) if default_product(few) is None else None


def unsupported_fused(call: FewRowsCall) -> str | None:
    """Returns why no kernel can compute the whole call at once; None if one can."""
    reason = _unsupported_operands(call, call.x.dtype)
    if reason is not None:
        return reason
    s, norm = call.shape, call.norm
    if not 1 <= s.M <= MOST_RESIDENT:
        return f"{s.M} rows: it takes 1 to {MOST_RESIDENT}"
    if norm is not None and norm.scale.dtype.name not in SCALES:
        return f"the norm's scale is {norm.scale.dtype}"
    if not isinstance(call.weight, QuantizedWeight):
        return _no_tile(s) if default_fused(s) is None else None
    if call.swiglu:
        return "gates and ups are columns of different blocks; give them as the next one's input"
    if call.weight.format.activations is not None:
        return f"{call.weight.format.name} rounds activations"
    return fuses(call, _quantized_tiles(s))


def default_product(s: ProductShape) -> SkinnyConfig | QuantizedConfig | None:
    """Returns the default tiles of a product alone; None where none fits."""
    return default_skinny(s) if s.bits == 16 else default_quantized(s)


def fused_hopper(call: FewRowsCall, config: FusedConfig | QuantizedConfig | None) -> jax.Array:
    """Computes the whole call by one kernel; valid only if ``unsupported_fused`` returns None.

    Args:
        config: tiles that fit; None: the default ones.
    """
    if isinstance(call.weight, QuantizedWeight):
        tiles = config or _quantized_tiles(call.shape)
        assert isinstance(tiles, QuantizedConfig), "unsupported_fused"
        assert fuses(call, tiles) is None, f"{tiles}: {fuses(call, tiles)}"
        return quantized_product(call, out_dtype=call.x.dtype, config=tiles)
    config = config or default_fused(call.shape)
    assert isinstance(config, FusedConfig), "unsupported_fused"
    assert config.unsupported(call.shape) is None, f"{config}: {config.unsupported(call.shape)}"
    return fused_matmul(call, config=config)


def product_hopper(
    x_MK: jax.Array,
    weight: jax.Array | QuantizedWeight,
    config: SkinnyConfig | QuantizedConfig | None,
    *,
    out_dtype: jnp.dtype,
    swiglu: bool = False,
) -> jax.Array:
    """Computes the product alone by a kernel; valid only if ``unsupported_product`` returns None.

    Args:
        config: tiles that fit; None: the default ones.
    """
    call = FewRowsCall(x=x_MK, weight=weight, swiglu=swiglu)
    config = config or default_product(call.shape)
    assert config is not None, "unsupported_product"
    assert config.unsupported(call.shape) is None, f"{config}: {config.unsupported(call.shape)}"
    if isinstance(weight, QuantizedWeight):
        assert isinstance(config, QuantizedConfig), "unsupported_product"
        return quantized_product(call, out_dtype=out_dtype, config=config)
    assert isinstance(config, SkinnyConfig), "unsupported_product"
    return skinny_matmul(x_MK, weight, swiglu=swiglu, config=config)


def _quantized_tiles(s: ProductShape) -> SkinnyConfig | QuantizedConfig | None:
    return product_config(s) or default_quantized(s)


def _unsupported_operands(call: FewRowsCall, out_dtype: jnp.dtype) -> str | None:
    weight = call.weight
    if reason := device.why_not_one_hopper():
        return reason
    if call.x.dtype.name not in DTYPES:
        return f"x is {call.x.dtype}: it multiplies bfloat16 and float16"
    if not isinstance(weight, QuantizedWeight):
        return None
    if weight.arrangement is not Arrangement.FRAGMENTS:
        return f"the weight lies in {weight.arrangement}; give it arranged(weight), made once"
    if out_dtype.name not in SCALES:
        return f"the result is {out_dtype}: it writes {', '.join(SCALES)}"
    if jnp.dtype(weight.scales.dtype).name not in SCALES:
        return f"scales of {weight.scales.dtype}: it takes {', '.join(SCALES)}"
    return None


def _no_tile(s: ProductShape) -> str:
    return f"no tile divides K={s.K} and N={s.N}, and fits"
