"""Products with 4- and 8-bit weights on a Hopper GPU: what the kernel takes, and its call."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.row_inputs import RmsNorm

from .config import MOST_ROWS, STRIP, ProductShape, QuantizedConfig, config_for
from .fragments import Dequantizer
from .hopper_kernel import QuantizedKernel
from .hopper_sliced import SlicedKernel
from .sliced_config import SlicedConfig
from .weight import Arrangement, QuantizedWeight

DTYPES = ("bfloat16", "float16")
SCALES = ("bfloat16", "float16", "float32")


def unsupported(x_MK: jax.Array, weight: QuantizedWeight, out_dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    facts = device.target()
    if facts.capability != (9, 0):
        return f"it needs a GPU of compute capability 9.0 (Hopper), not {facts.kind}"
    if weight.arrangement is not Arrangement.FRAGMENTS:
        return f"the weight lies in {weight.arrangement}; give it arranged(weight), made once"
    if x_MK.dtype.name not in DTYPES or out_dtype.name not in (*DTYPES, "float32"):
        return f"{x_MK.dtype} to {out_dtype}: it multiplies bfloat16 and float16"
    if jnp.dtype(weight.scales.dtype).name not in SCALES:
        return f"scales of {weight.scales.dtype}: it takes {', '.join(SCALES)}"
    if not x_MK.shape[0]:
        return "there are no rows"
    if config_for(ProductShape.of(min(x_MK.shape[0], MOST_ROWS), weight)) is None:
        return f"no tile divides {weight.matrix_shape}, and fits"
    return None


def quantized_matmul_hopper(
    x_MK: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jnp.dtype,
    config: QuantizedConfig | SlicedConfig | None = None,
    norm: RmsNorm | None = None,
    swiglu_input: bool = False,
    residual_MN: jax.Array | None = None,
) -> jax.Array:
    """[M, N], of at most 256 rows and a call of which ``unsupported`` says nothing.

    Args:
        norm, swiglu_input, residual_MN: in the kernel, of a call that ``fuses``.

    Raises:
        UnsupportedError: tiles that do not fit the call.
    """
    if weight.order is not None:
        x_MK = jnp.take(x_MK, weight.order, axis=1)
        weight = dataclasses.replace(weight, order=None)
    rows = x_MK.shape[0]
    shape = ProductShape.of(rows, weight)
    config = config or config_for(shape)
    assert config is not None, "unsupported"
    is_fused = norm is not None or swiglu_input or residual_MN is not None
    assert not is_fused or fuses(rows, weight, config), "fuses"
    if isinstance(config, QuantizedConfig) and not config.is_resident(shape):
        shape = dataclasses.replace(shape, M=-(-rows // STRIP) * STRIP)
        x_MK = jnp.pad(x_MK, ((0, shape.M - rows), (0, 0)))
    reason = config.unsupported(shape)
    if reason is not None:
        raise UnsupportedError(f"{config} for {shape}: {reason}")
    given = {
        "s": shape,
        "dequantizer": Dequantizer(code=weight.format.code, dtype=jnp.dtype(x_MK.dtype)),
        "scale_dtype": jnp.dtype(weight.scales.dtype),
        "out_dtype": jnp.dtype(out_dtype),
        "norm": norm,
        "gated": swiglu_input,
        "has_residual": residual_MN is not None,
    }
    if isinstance(config, SlicedConfig):
        return SlicedKernel(c=config, **given).result(x_MK, weight, residual_MN)
    kernel = QuantizedKernel(c=config, **given)
    return kernel.result(x_MK, weight, residual_MN)[:rows]


def fuses(rows: int, weight: QuantizedWeight, config: QuantizedConfig | SlicedConfig) -> bool:
    """Whether the kernel also does what comes before and after its product: of rows that stay in
    shared memory as they are, by sums that are read in pairs.
    """
    if isinstance(config, SlicedConfig):
        return weight.order is None
    is_resident = config.is_resident(ProductShape.of(rows, weight))
    return is_resident and weight.order is None and not config.quads
