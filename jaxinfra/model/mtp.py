"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a module after the layers.

From the hidden state at a position and the token after it, the module computes a hidden state whose
logits are those of the token after that one. Embedding and vocabulary are the model's.

Dims: B batch, T position, D model width, E the same width of a result.
"""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.model import ModelConfig
from jaxinfra.model.block import Block
from jaxinfra.model.execution import Execution
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import LayerOutput, Pass
from jaxinfra.model.projection import Projection
from jaxinfra.model.repetition import KVCache, graphdefs_of, run_unrolled
from jaxinfra.model.rope import RopeTable, rope_table
from jaxinfra.model.whole_step import whole_step
from jaxinfra.numerics.policy import unquantized


def without_extras(execution: Execution) -> Execution:
    """Returns the execution of the module: its matmuls are never in 8 bits, its layer keeps no
    statistics.
    """
    policy = unquantized(execution.policy)
    return dataclasses.replace(execution, policy=policy, statistics=False)


def rotated_by(
    part: ModelConfig, execution: Execution, given: Pass, contexts_B: jax.Array | None
) -> RopeTable | None:
    """Computes the RoPE table of the one layer of ``part``; None without RoPE."""
    mixer = part.blocks[0].mixer
    if mixer.rope is None:
        return None
    return rope_table(
        mixer.rope,
        head_dim=mixer.rotated_dim,
        positions_BT=given.positions_BT,
        contexts_B=contexts_B,
        is_exact=execution.policy.is_exact,
    )


class MultiTokenPrediction(nnx.Module):
    """Norms and projections of hidden state and embedding, one block, and a norm before the logits.

    Args:
        part: ``ModelConfig.mtp_part`` of the model.
        block: the module's block, a stack of one layer.
        execution: of ``without_extras``.
    """

    reads_layers = False  # of the model: the final norm's output is its input
    embedding = None  # it reads the model's

    def __init__(self, part: ModelConfig, block: Block, *, execution: Execution, rngs: nnx.Rngs):
        self.part = part
        self.execution = execution
        width = part.model_dim

        def norm() -> Norm:
            return Norm(
                part.blocks[0].norm, shape=(width,), dims=(axes.EMBED,), execution=execution
            )

        def projection() -> Projection:
            return Projection(
                "BTD,DE->BTE",
                shape=(width, width),
                dims=(axes.EMBED, None),
                std=part.init_std,
                execution=execution,
                rngs=rngs,
                whole=True,
            )

        self.hidden_norm, self.embedding_norm, self.final_norm = norm(), norm(), norm()
        self.hidden_projection, self.embedding_projection = projection(), projection()
        self.block = block

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        embedded_BTD: Float[Array, "B T D"],
        given: Pass,
        *,
        cache: KVCache | None = None,
        contexts_B: Int[Array, "B"] | None = None,
    ) -> LayerOutput:
        """Computes the module's hidden states after its own norm, its cache and its block's sums.

        Args:
            hidden_BTD: output of the model's final norm, or of this module at one position less.
            embedded_BTD: embedding of the token after each position.
            given: positions and documents of the hidden states.
            cache: cache of the module's one layer.
            contexts_B: as in ``Decoder.run``.
        """
        rope = rotated_by(self.part, self.execution, given, contexts_B)
        given = dataclasses.replace(given, rope=rope)
        place, policy = self.execution.place, self.execution.policy
        x_BTD = policy.added(
            self.hidden_projection(self.hidden_norm(hidden_BTD)),
            self.embedding_projection(self.embedding_norm(embedded_BTD)),
        )
        x_BTD = place(x_BTD, (axes.BATCH, axes.STREAM_SEQUENCE, axes.STREAM))
        out = self._block(x_BTD, given, cache)
        return dataclasses.replace(out, x=self.final_norm(out.x))

    def begun(self, out: LayerOutput) -> Float[Array, "B T D"]:
        """Returns the module's input at each position from a pass of the model."""
        return out.x

    def draft_logits(
        self, hidden_BTD: Float[Array, "B T D"], of_model: Callable[[jax.Array], jax.Array]
    ) -> Float[Array, "B T V"]:
        """Computes the logits of the token after next, by the model's vocabulary."""
        return of_model(hidden_BTD)

    def _block(self, x_BTD: jax.Array, given: Pass, cache: KVCache | None) -> LayerOutput:
        if cache is None:
            (graphdef,), (stacked,) = graphdefs_of([self.block], (True,))
            first = jax.tree.map(lambda x: x[0], stacked)
            out = nnx.merge(graphdef, first)(x_BTD, given)
            sums = jax.tree.map(lambda x: x[None], out.sums)
            return dataclasses.replace(out, sums=sums)
        ropes = (given.rope,)
        whole = whole_step(x_BTD, self.part, [self.block], self.execution, given, ropes, cache)
        if whole is not None:
            return whole
        return run_unrolled(x_BTD, [self.block], [(True,)], given, ropes, cache)
