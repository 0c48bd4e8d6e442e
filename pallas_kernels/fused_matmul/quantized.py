"""Calls whose weight is in few bits: by the kernel of ``quantized_matmul``."""

import jax

from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.choice import measured_config
from pallas_kernels.quantized_matmul.config import ProductShape, QuantizedConfig, config_for
from pallas_kernels.quantized_matmul.hopper import fuses, quantized_matmul_hopper
from pallas_kernels.quantized_matmul.hopper import unsupported as unsupported_product

from .reference import FusedCall


def unsupported(call: FusedCall) -> str | None:
    """Why the kernel cannot compute this call; None if it can."""
    weight = call.weight
    assert isinstance(weight, QuantizedWeight), "16-bit weights have a kernel of their own"
    reason = unsupported_product(call.x, weight, call.x.dtype)
    if reason is not None:
        return reason
    if call.swiglu:
        return "gates and ups are columns of different blocks; give them as the next one's input"
    if weight.format.activations is not None:
        return f"{weight.format.name} rounds activations"
    config = measured(call) or config_for(ProductShape.of(call.M, weight))
    if config is None or not fuses(call.M, weight, config):
        return f"{call.M} rows do not stay in shared memory in their order"
    return None


def measured(call: FusedCall) -> QuantizedConfig | None:
    """Tiles of the product; None where no table takes the kernel."""
    assert isinstance(call.weight, QuantizedWeight)
    return measured_config(ProductShape.of(call.M, call.weight))


def fused(call: FusedCall, config: QuantizedConfig | None) -> jax.Array:
    """As the reference, of a call of which ``unsupported`` says nothing."""
    assert isinstance(call.weight, QuantizedWeight)
    return quantized_matmul_hopper(
        call.x,
        call.weight,
        out_dtype=call.x.dtype,
        config=config,
        norm=call.norm,
        swiglu_input=call.swiglu_input,
        residual_MN=call.residual,
    )
