"""Calls whose weight is in few bits: by the kernel of ``quantized_matmul``."""

import jax

from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.choice import measured_config
from pallas_kernels.quantized_matmul.config import ProductShape, QuantizedConfig, config_for
from pallas_kernels.quantized_matmul.hopper import fuses, quantized_matmul_hopper
from pallas_kernels.quantized_matmul.hopper import unsupported as unsupported_product
from pallas_kernels.quantized_matmul.sliced_config import SlicedConfig

from .reference import FusedCall


def unsupported(call: FusedCall) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    weight = _weight(call)
    reason = unsupported_product(call.x, weight, call.x.dtype)
    if reason is not None:
        return reason
    if call.swiglu:
        return "gates and ups are columns of different blocks; give them as the next one's input"
    if weight.format.activations is not None:
        return f"{weight.format.name} rounds activations"
    return unsupported_tiles(call, tiles_of_product(call))


def unsupported_tiles(call: FusedCall, config: QuantizedConfig | SlicedConfig | None) -> str | None:
    """Why these tiles cannot compute a call that others may; None if they can."""
    weight = _weight(call)
    if config is None or not fuses(call.M, weight, config):
        return f"{call.M} rows do not stay in shared memory in their order"
    return config.unsupported(ProductShape.of(call.M, weight))


def tiles_of_product(call: FusedCall) -> QuantizedConfig | None:
    """Those of the product by itself."""
    shape = ProductShape.of(call.M, _weight(call))
    return measured_config(shape) or config_for(shape)


def fused(call: FusedCall, *, config: QuantizedConfig | SlicedConfig | None = None) -> jax.Array:
    """As the reference, of a call of which ``unsupported`` says nothing.

    Raises:
        UnsupportedError: tiles that do not fit the call.
    """
    return quantized_matmul_hopper(
        call.x,
        _weight(call),
        out_dtype=call.x.dtype,
        config=config or tiles_of_product(call),
        norm=call.norm,
        swiglu_input=call.swiglu_input,
        residual_MN=call.residual,
    )


def _weight(call: FusedCall) -> QuantizedWeight:
    assert isinstance(call.weight, QuantizedWeight), "16-bit weights have a kernel of their own"
    return call.weight
