"""The feed-forward layer.

Dims: B batch, T position, D model width, F hidden width.
"""

import functools
import statistics

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import MlpConfig
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import Abilities, LayerOutput, ModelState, Pass, labelled, site_sums
from jaxinfra.model.projection import HIDDEN, Projection, projected, unpacked
from jaxinfra.ops.activation import activated, xielu
from jaxinfra.ops.fp8_operands import Input
from jaxinfra.ops.fp8_swiglu import swiglu_input
from jaxinfra.ops.multiply import Deferred


class Mlp(nnx.Module):
    """Feed-forward layer: down(activation(up(x))), or gated: down(activation(gate(x)) * up(x))."""

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
        self.label = ""  # of its hidden values: their own name in the block, once they have one
        self.execution = execution
        build = functools.partial(
            Projection, bias_rank=1 if config.bias else 0, execution=execution, rngs=rngs
        )

        def inward(width: int) -> Projection:
            return build(
                "BTD,DF->BTF",
                shape=(model_dim, width),
                dims=(axes.EMBED, axes.MLP),
                std=std,
                name=HIDDEN,
            )

        form = execution.decode_form
        is_packed = form is not None and form.packed and config.kind.gated
        self.packed = inward(2 * config.hidden_dim) if is_packed else None
        if self.packed is None:
            self.gate = inward(config.hidden_dim) if config.kind.gated else None
            self.up = inward(config.hidden_dim)
        param = execution.policy.param
        has_slopes = config.kind is MlpKind.XIELU
        self.rise = nnx.Param(jnp.zeros(1, param), axes=(None,)) if has_slopes else None
        self.fall = nnx.Param(jnp.zeros(1, param), axes=(None,)) if has_slopes else None
        self.slope = constant(0.5, execution) if has_slopes else None
        self.edge = constant(-1e-6, execution) if has_slopes else None
        self.down = build(
            "BTF,FD->BTD",
            shape=(config.hidden_dim, model_dim),
            dims=(axes.MLP, axes.EMBED),
            std=out_std,
        )

    @property
    def abilities(self) -> Abilities:
        """Steps of a block that this layer does itself: norm and residual sum, if packed."""
        is_scaled = self.config.out_scale != 1.0
        fuses = self.packed is not None and self.execution.multiply.few_rows and not is_scaled
        return Abilities(fuses=fuses, quantizes=True, gathers=self.packed is None)

    def __call__(self, x_BTD: Float[Array, "B T D"] | Deferred, given: Pass) -> LayerOutput:
        """Computes the layer's output [B, T, D] in the compute dtype."""
        hidden_BTF = self._hidden(x_BTD)
        if not isinstance(hidden_BTF, Deferred | Input):
            hidden_BTF = self.execution.place(hidden_BTF, (axes.BATCH, axes.SEQUENCE, axes.MLP))
        out_BTD = self.down(hidden_BTF, residual=given.residual_BTD)
        if self.config.out_scale != 1.0:
            assert given.residual_BTD is None, "abilities"
            out_BTD = out_BTD * jnp.asarray(self.config.out_scale, out_BTD.dtype)
        if not self.execution.statistics or isinstance(hidden_BTF, Deferred):
            return LayerOutput(x=out_BTD)
        values_BTF = hidden_BTF.x if isinstance(hidden_BTF, Input) else hidden_BTF
        sums = site_sums({"mlp_hidden": values_BTF}, policy=self.execution.policy)
        return LayerOutput(x=out_BTD, sums=sums)

    def _hidden(self, x_BTD: jax.Array | Deferred) -> jax.Array | Deferred | Input:
        """Input of ``down``, in the compute dtype or quantized."""
        policy, multiply = self.execution.policy, self.execution.multiply
        if self.packed is None:
            assert not isinstance(x_BTD, Deferred), "Block"
            given_BTD = self.up.prepared(x_BTD)
            hidden = self._quantized_hidden(given_BTD)
            if hidden is not None:
                return hidden
            layers = [self.up] if self.gate is None else [self.up, self.gate]
            up_BTF, *gates = map(policy.to_accum, projected(given_BTD, layers))
            gate_BTF = gates[0] if gates else None
        elif multiply.few_rows and self._is_plain and not self.config.bias:
            return multiply.swiglu(x_BTD, self.packed.weight.get_value(), recipe=self.packed.recipe)
        else:
            shards = self.execution.place.shards(axes.MLP)
            first_up = self.config.hidden_dim // shards
            both_BTF = policy.to_accum(self.packed(x_BTD))
            gate_BTF, up_BTF = unpacked(both_BTF, (first_up,), shards, axis=2)
        if gate_BTF is not None and self.config.gate_scale != 1.0:
            gate_BTF = gate_BTF * self.config.gate_scale
        if gate_BTF is not None and self.config.sparsity:
            gate_BTF = _largest(gate_BTF, self.config.sparsity)
        if self.config.kind is MlpKind.XIELU:
            numbers = self.rise, self.fall, self.slope, self.edge
            given = (policy.to_accum(each[...]) for each in numbers if each is not None)
            hidden_BTF = policy.to_compute(xielu(up_BTF, *given))
        else:
            hidden_BTF = policy.to_compute(activated(self.config.kind, up_BTF, gate_BTF))
        return labelled(hidden_BTF, self.label)

    @property
    def _is_plain(self) -> bool:
        """Whether the hidden values are SwiGLU's, of an unscaled gate, which kernels compute."""
        is_scaled = self.config.gate_scale != 1.0 or self.config.sparsity > 0.0
        return self.config.kind is MlpKind.SWIGLU and not is_scaled

    def _quantized_hidden(self, x: jax.Array | Input) -> Input | None:
        """``_hidden`` in 8 bits, of products in 8 bits; None where it is an array first."""
        factors = [None if layer is None else layer.factor for layer in (self.gate, self.up)]
        gate, up = factors
        is_swiglu = self._is_plain and self.down.recipe == self.up.recipe
        if not isinstance(x, Input) or not is_swiglu or gate is None or up is None:
            return None
        devices = self.execution.multiply.devices
        hidden = swiglu_input(x, gate, up, recipe=self.up.recipe, devices=devices)
        return None if hidden is None else hidden._replace(x=labelled(hidden.x, self.label))


def _largest(gate_BTF: jax.Array, sparsity: float) -> jax.Array:
    """Gates above a share of a normal distribution of their mean and deviation, from there on."""
    mean_BT1 = jnp.mean(gate_BTF, axis=-1, keepdims=True)
    deviation_BT1 = jnp.std(gate_BTF, axis=-1, keepdims=True)
    edge_BT1 = mean_BT1 + deviation_BT1 * statistics.NormalDist().inv_cdf(sparsity)
    return jax.nn.relu(gate_BTF - edge_BT1)


def constant(value: float, execution: Execution) -> ModelState:
    """Makes a number that files hold and nothing changes."""
    array = jnp.asarray(value, execution.policy.accum)
    return ModelState(array, axes=(), rule=lambda value, sums, emitted: value)
