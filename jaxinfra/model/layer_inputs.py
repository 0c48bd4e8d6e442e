"""Inputs that each layer has for itself, beside the stream: Gemma 3n and Gemma 4.

Dims: B batch, T position, D model width, L layer, P width of a layer's input, R repetitions of a
pattern of N blocks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.model import BlockConfig, ModelConfig, Stack
from jaxinfra.model.cache import Cache, updated
from jaxinfra.model.embedding import Embedding
from jaxinfra.model.execution import Execution
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import LayerOutput, Pass, SharedKeys
from jaxinfra.model.projection import Projection
from jaxinfra.ops.activation import activated


class LayerInputs(nnx.Module):
    """Inputs of all layers: of each token rows of a table, and a projection of its embedding."""

    def __init__(self, config: ModelConfig, *, execution: Execution, rngs: nnx.Rngs):
        self.config, self.policy = config, execution.policy
        self.width = config.blocks[0].layer_input_dim
        given = {"std": config.init_std, "execution": execution, "rngs": rngs}
        columns = config.num_layers * self.width
        rows = {"num_rows": config.layer_input_rows, "rows_dim": axes.VOCAB}
        self.table = Embedding(**rows, matmul=False, model_dim=columns, **given)
        shape = (config.model_dim, columns)
        self.projection = Projection("BTD,DP->BTP", shape=shape, dims=(axes.EMBED, None), **given)
        self.norm = Norm(config.final_norm, shape=(self.width,), dims=(None,), execution=execution)

    def __call__(
        self, ids_BT: Int[Array, "B T"], x_BTD: Float[Array, "B T D"]
    ) -> Float[Array, "L B T P"]:
        """Returns each layer's input in the compute dtype.

        Args:
            x_BTD: embedded tokens.
        """
        by_layer = (*ids_BT.shape, self.config.num_layers, self.width)
        known_BT = jnp.where(ids_BT < self.config.layer_input_rows, ids_BT, 0)
        rows = self.policy.scaled(self.table(known_BT), self.width**0.5).reshape(by_layer)
        projected = self.policy.scaled(self.projection(x_BTD), self.config.model_dim**-0.5)
        both = self.policy.added(self.norm(projected.reshape(by_layer)), rows)
        return jnp.moveaxis(self.policy.scaled(both, 2**-0.5), 2, 0)


class LayerInput(nnx.Module):
    """The branch norm(project(activation(gate(x)) * input)) of a layer's own input."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        model_dim: int,
        std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        assert config.feed_forward is not None, "whose activation is the branch's too"
        self.kind, self.policy = config.feed_forward.kind, execution.policy
        given = {"std": std, "execution": execution, "rngs": rngs}
        width = config.layer_input_dim
        into, back = (model_dim, width), (width, model_dim)
        self.gate = Projection("BTD,DP->BTP", shape=into, dims=(axes.EMBED, None), **given)
        self.out = Projection("BTP,PD->BTD", shape=back, dims=(None, axes.EMBED), **given)
        self.norm = Norm(config.norm, shape=(model_dim,), dims=(axes.EMBED,), execution=execution)

    def __call__(self, x_BTD: jax.Array, input_BTP: jax.Array) -> Float[Array, "B T D"]:
        """Computes what the branch adds to the stream, in the compute dtype."""
        accum = self.policy.to_accum
        hidden_BTP = activated(self.kind, accum(input_BTP), accum(self.gate(x_BTD)))
        return self.norm(self.out(self.policy.to_compute(hidden_BTP)))


def by_stack(
    layer_inputs: LayerInputs | None,
    ids_BT: jax.Array,
    x_BTD: jax.Array,
    stacks: Sequence[Stack],
    keys: Sequence[jax.Array | None],
) -> list[tuple[Any, ...]]:
    """Returns each stack's keys of dropout, and inputs [R, N, B, T, P] of its layers if any."""
    if layer_inputs is None:
        return [(each,) for each in keys]
    inputs_LBTP = layer_inputs(ids_BT, x_BTD)
    found, first = [], 0
    for stack, key in zip(stacks, keys, strict=True):
        shape = (stack.repeats, len(stack.pattern))
        mine = inputs_LBTP[first : first + shape[0] * shape[1]]
        found.append((key, mine.reshape(*shape, *inputs_LBTP.shape[1:])))
        first += shape[0] * shape[1]
    return found


def with_shared(
    given: Pass, out: LayerOutput, stack: Stack, before: Sequence[Cache] | None
) -> tuple[Pass, LayerOutput]:
    """Takes keys and values for later layers out of a stack's output, and into the next's ``Pass``.

    Args:
        before: the stack's caches before this pass.
    """
    shared, sums = dict(given.shared), []
    for i, (block, each) in enumerate(zip(stack.pattern, out.sums, strict=True)):
        name = getattr(block.mixer, "gives_keys", None)
        if name is not None:
            cache = None
            if before is not None:
                after = out.cache[i]
                cache = updated(
                    after, after.arrays, layer=np.zeros((), np.int32), is_empty=before[i].is_empty
                )
            k, v = (each.handed[part][0] for part in ("k", "v"))
            shared[name] = SharedKeys(k_BTKH=k, v_BTKH=v, cache=cache)
            each = dataclasses.replace(each, handed={})
        sums.append(each)
    return dataclasses.replace(given, shared=shared), dataclasses.replace(out, sums=tuple(sums))
