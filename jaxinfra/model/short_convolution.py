"""Short convolution between gates, the mixer of LFM2.

Dims: B batch, T position, D model width, N groups of channels, H channels of a group.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.config.recurrent import ShortConvolutionConfig
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import Abilities, LayerOutput, Pass
from jaxinfra.model.projection import Projection, from_heads
from jaxinfra.model.recurrence import HEADS, Inward, convolved


class ShortConvolution(nnx.Module):
    """Mixer out(out_gate(x) * convolution(in_gate(x) * value(x))), linear in each of the four."""

    abilities = Abilities(quantizes=True)

    def __init__(
        self,
        config: ShortConvolutionConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.execution = execution
        make = Inward(model_dim=model_dim, std=std, execution=execution, rngs=rngs)
        sizes = config.num_heads, config.head_dim
        self.in_gate, self.out_gate, self.value = (
            make.heads(*sizes, bias=config.bias) for _ in range(3)
        )
        self.value_conv = make.convolution(
            *sizes, config.conv_width, bias=config.bias, activates=False
        )
        how = {"std": out_std, "execution": execution, "rngs": rngs}
        self.out = from_heads(*sizes, model_dim, bias=config.bias, **how)

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Computes outputs [B, T, D] in the compute dtype, from the cached inputs if there are any.

        Documents of packed rows do not see each other.
        """
        policy = self.execution.policy
        prepared = self.value.prepared(x_BTD)

        def gated(gate: Projection, x_BTNH: jax.Array) -> jax.Array:
            return policy.to_compute(policy.to_accum(gate(prepared)) * policy.to_accum(x_BTNH))

        inputs_BTNH = self.execution.place(gated(self.in_gate, self.value(prepared)), HEADS)
        y_BTNH = self.value_conv(inputs_BTNH, given, name="value")
        out_BTD = self.out(gated(self.out_gate, y_BTNH))
        return LayerOutput(x=out_BTD, cache=convolved({"value": inputs_BTNH}, given))
