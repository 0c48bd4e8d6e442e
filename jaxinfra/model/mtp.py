"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a module after the layers.

From the hidden state at a position and the token after it, the module computes a hidden state whose
logits are those of the token after that one. Embedding and vocabulary are the model's.

Dims: B batch, T position, D width of model or head, E width of a result, U draft vocabulary,
V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.drafted import DraftedConfig
from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, MlpConfig, ModelConfig
from jaxinfra.model.block import Block
from jaxinfra.model.cache import after_pass, in_layer
from jaxinfra.model.embedding import Embedding
from jaxinfra.model.execution import Execution
from jaxinfra.model.grouped_attention import GroupedAttention
from jaxinfra.model.mlp import Mlp
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import LayerOutput, ModelState, Pass
from jaxinfra.model.projection import Projection, from_heads
from jaxinfra.model.repetition import KVCache, graphdefs_of, run_unrolled
from jaxinfra.model.rope import RopeTable, rope_table
from jaxinfra.model.whole_step import whole_step
from jaxinfra.numerics.policy import unquantized
from jaxinfra.numerics.recipe import Site

_STREAM = (axes.BATCH, axes.SEQUENCE, axes.STREAM)


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


class EagleHead(nnx.Module):
    """An EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840), in the place of the module above.

    One layer reads a projection of the model's stream after three layers, and the embedding of the
    token after it. Its vocabulary is the part of the model's that texts use most. Each further
    draft is of the layer's own output and the draft before.
    """

    reads_layers = True

    def __init__(self, config: DraftedConfig, *, execution: Execution, rngs: nnx.Rngs):
        self.config, self.part, self.execution = config, config.eagle.part, execution
        block, width, std = self.part.blocks[0], self.part.model_dim, self.part.init_std
        mixer, mlp = block.mixer, block.feed_forward
        assert isinstance(mixer, GroupedAttentionConfig), "hf/eagle.py"
        assert isinstance(mlp, MlpConfig), "hf/eagle.py"
        how: dict[str, Any] = {"execution": execution, "rngs": rngs}
        table: dict[str, Any] = {"model_dim": width, "std": std, **how}

        def norm() -> Norm:
            return Norm(block.norm, shape=(width,), dims=(axes.EMBED,), execution=execution)

        shape, dims = (3 * config.model_dim, width), (axes.EMBED, None)
        self.fusion = Projection("BTD,DE->BTE", shape=shape, dims=dims, std=std, whole=True, **how)
        self.hidden_norm, self.embedding_norm = norm(), norm()
        self.mlp_norm, self.final_norm = norm(), norm()
        self.attention = GroupedAttention(mixer, **table | {"model_dim": 2 * width}, out_std=std)
        self.attention.out = from_heads(
            mixer.num_q_heads, mixer.head_dim, width, bias=mixer.out_bias, std=std, **how
        )
        self.mlp = Mlp(mlp, **table, out_std=std)
        rows, table = self.part.vocab_size, table | {"rows_dim": axes.VOCAB}
        self.unembedding = Embedding(num_rows=rows, matmul=True, **table)
        own = config.vocab_size if config.eagle.has_embedding else 0
        self.embedding = Embedding(num_rows=own, matmul=False, **table) if own else None
        self.offsets = None  # added to an id of the draft vocabulary, for the model's
        if config.eagle.has_offsets:
            zeros_U = jnp.zeros(rows, jnp.int32)
            self.offsets = nnx.data(ModelState(zeros_U, axes=(None,), rule=lambda x, *_: x))

    def begun(self, out: LayerOutput) -> Float[Array, "B T D"]:
        """Computes the head's input at each position from the model's streams."""
        read = [out.after[at] for at in self.config.read_repetitions]
        return self.fusion(jnp.concatenate(read, axis=-1))

    def __call__(
        self,
        hidden_BTD: Float[Array, "B T D"],
        embedded_BTD: Float[Array, "B T D"],
        given: Pass,
        *,
        cache: KVCache | None = None,
        contexts_B: Int[Array, "B"] | None = None,
    ) -> LayerOutput:
        """Computes the layer's output before the last norm, and its cache.

        Arguments are those of ``MultiTokenPrediction``; hidden states begin as ``begun`` says.
        """
        place, policy = self.execution.place, self.execution.policy
        first = np.zeros((), np.int32)
        seen = None if cache is None else in_layer(cache[0], cache[0].arrays, first)
        rope = rotated_by(self.part, self.execution, given, contexts_B)
        given = dataclasses.replace(given, rope=rope, cache=seen)
        normed_BTD = self.hidden_norm(hidden_BTD)
        x_BTD = normed_BTD if self.config.eagle.norm_before_residual else hidden_BTD
        both_BTE = jnp.concatenate([self.embedding_norm(embedded_BTD), normed_BTD], axis=-1)
        mixed = self.attention(place(both_BTE, _STREAM), given)
        x_BTD = place(policy.added(x_BTD, mixed.x), _STREAM)
        x_BTD = policy.added(x_BTD, self.mlp(self.mlp_norm(x_BTD), given).x)
        if cache is not None and mixed.cache is not None:
            cache = (after_pass(cache[0], mixed.cache.arrays),)
        return LayerOutput(x=place(x_BTD, _STREAM), cache=cache)

    def draft_logits(
        self, hidden_BTD: Float[Array, "B T D"], of_model: Callable[[jax.Array], jax.Array]
    ) -> Float[Array, "B T V"]:
        """Computes the logits of the token after next; ids out of the draft vocabulary have the
        lowest number.
        """
        recipe, normed_BTD = self.execution.policy.recipe(Site.LOGITS), self.final_norm(hidden_BTD)
        logits_BTU = self.execution.multiply(
            "BTD,UD->BTU", normed_BTD, self.unembedding.table[...], recipe=recipe, out=recipe.accum,
            dims=(axes.VOCAB, axes.EMBED),
        )  # fmt: skip
        logits_BTU = self.execution.place(logits_BTU, (axes.BATCH, None, None))
        if self.offsets is None:
            return logits_BTU
        shape = (*hidden_BTD.shape[:2], self.config.vocab_size)
        lowest_BTV = jnp.full(shape, jnp.finfo(logits_BTU.dtype).min, logits_BTU.dtype)
        ids_U = jnp.arange(len(self.offsets[...])) + self.offsets[...]
        return lowest_BTV.at[:, :, ids_U].set(logits_BTU)


def prediction(
    config: ModelConfig,
    stacked: Callable[[BlockConfig, int, Execution, nnx.Rngs], Block],
    *,
    execution: Execution,
    rngs: nnx.Rngs,
) -> MultiTokenPrediction | EagleHead:
    """Makes the module of a model that an engine drafts with.

    Args:
        stacked: makes a stack of a number of equal layers.
    """
    execution = without_extras(execution)
    if isinstance(config, DraftedConfig):
        return EagleHead(config, execution=execution, rngs=rngs)
    part = config.mtp_part
    block = stacked(part.blocks[0], 1, execution, rngs)
    return MultiTokenPrediction(part, block, execution=execution, rngs=rngs)
