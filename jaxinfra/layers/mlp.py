"""The feed-forward layer.

Dims: B batch, T position, D model width, F hidden width.
"""

import functools

from flax import nnx
from jaxtyping import Array, Float

from jaxinfra.config.model import MlpConfig
from jaxinfra.core import axes
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.passes import LayerOutput, Pass
from jaxinfra.layers.projection import HIDDEN, Projection
from jaxinfra.ops.activation import activated


class Mlp(nnx.Module):
    """down(activation(up(x))), or gated: down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(
        self,
        config: MlpConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.execution = execution
        build = functools.partial(
            Projection, bias_rank=1 if config.bias else 0, execution=execution, rngs=rngs
        )
        inward = functools.partial(
            build,
            "BTD,DF->BTF",
            shape=(model_dim, config.hidden_dim),
            dims=(axes.EMBED, axes.MLP),
            std=std,
            name=HIDDEN,
        )
        self.gate = inward() if config.kind.gated else None
        self.up = inward()
        self.down = build(
            "BTF,FD->BTD",
            shape=(config.hidden_dim, model_dim),
            dims=(axes.MLP, axes.EMBED),
            std=out_std,
        )

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """[B, T, D] to [B, T, D] in the compute dtype."""
        del given  # each position by itself
        policy = self.execution.policy
        given_BTD = x_BTD if self.gate is None else self.up.prepared(x_BTD)
        up_BTF = policy.to_accum(self.up(given_BTD))
        gate_BTF = None if self.gate is None else policy.to_accum(self.gate(given_BTD))
        hidden_BTF = activated(self.config.kind, up_BTF, gate_BTF)
        hidden_BTF = self.execution.place(
            policy.to_compute(hidden_BTF), (axes.BATCH, axes.SEQUENCE, axes.MLP)
        )
        return LayerOutput(x=self.down(hidden_BTF))
