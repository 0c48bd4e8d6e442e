"""One decoder for every architecture: what differs between them is the config.

Dims: B batch, T position, S cache slot, D model width, V vocabulary, L repetitions of the block
pattern (the scanned dim).
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra.config.model import BlockConfig, ModelConfig, RopeConfig
from jaxinfra.config.run import Remat
from jaxinfra.core import axes
from jaxinfra.layers.block import Block
from jaxinfra.layers.cache import LayerCache, read_layer, write_layer
from jaxinfra.layers.dropout import dropout
from jaxinfra.layers.embedding import Embedding
from jaxinfra.layers.execution import Execution
from jaxinfra.layers.norm import Norm
from jaxinfra.layers.projection import GATHERED, HIDDEN, PROJECTION
from jaxinfra.layers.rope import RopeTable, rope_table
from jaxinfra.layers.stack import stack
from jaxinfra.ops.attention import ATTENTION_NAMES, is_attention_result

type KVCache = tuple[LayerCache, ...]
"""One entry a block of the pattern, each with a leading L dim: [L, B, S, K, H]."""

_SAVED_NAMES = {
    Remat.DOTS: (GATHERED, PROJECTION, HIDDEN, *ATTENTION_NAMES),
    Remat.MLP: (GATHERED, PROJECTION, *ATTENTION_NAMES),
    Remat.NAMED: (GATHERED, *ATTENTION_NAMES),
    Remat.FULL: (GATHERED,),
}


class Decoder(nnx.Module):
    """Embedding, L repetitions of the block pattern, final norm, projection onto the vocabulary."""

    def __init__(self, config: ModelConfig, *, execution: Execution, rngs: nnx.Rngs):
        self.config = config
        self.execution = execution
        table = functools.partial(
            Embedding,
            model_dim=config.model_dim,
            std=config.init_std,
            execution=execution,
            rngs=rngs,
        )
        self.embedding = table(num_rows=config.vocab_size, rows_dim=axes.VOCAB)
        self.positions = (
            table(num_rows=config.max_positions, rows_dim=axes.POSITION)
            if config.learned_positions
            else None
        )
        self.blocks = nnx.List([self._stack(block, rngs) for block in config.blocks])
        self.final_norm = Norm(
            config.final_norm, width=config.model_dim, dims=(axes.EMBED,), execution=execution
        )
        self.unembedding = (
            None
            if config.tie_embeddings
            else table(num_rows=config.vocab_size, rows_dim=axes.VOCAB)
        )

    def _stack(self, block: BlockConfig, rngs: nnx.Rngs) -> Block:
        config = self.config
        build = functools.partial(
            Block,
            block,
            model_dim=config.model_dim,
            std=config.init_std,
            out_std=config.init_std / math.sqrt(2 * config.num_layers),
            dropout_rate=config.dropout_rate,
            execution=self.execution,
        )
        return stack(lambda rngs: build(rngs=rngs), num_layers=config.num_groups, rngs=rngs)

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, in the accum dtype (fp32). Compiled once a shape."""
        graphdef, parameters = nnx.split(self)
        return _logits(graphdef, parameters, token_ids, segment_ids, positions)

    def hidden(
        self,
        token_ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Float[Array, "B T D"]:
        """The final norm's output, in the compute dtype: what the loss projects.

        Args:
            segment_ids: documents of packed rows, -1 for padding; attention never crosses them.
            positions: within the document; 0..T-1 by default.
            dropout_key: drops out where given.
        """
        hidden_BTD, _ = self._run(
            token_ids, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key
        )
        return hidden_BTD

    def cached(
        self,
        token_ids: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"],
        cache: KVCache,
        prefill: bool,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """``hidden`` of new tokens after those cached, and the cache with them.

        Args:
            positions: of the new tokens; each row counts for itself.
            prefill: the cache is empty and rows start at position 0.
        """
        hidden_BTD, written = self._run(
            token_ids, positions=positions, cache=cache, prefill=prefill
        )
        assert written is not None
        return hidden_BTD, written

    def empty_cache(self, *, batch: int, num_slots: int) -> KVCache:
        """A zero cache of ``num_slots`` positions in the compute dtype."""
        caches = []
        for block in self.config.blocks:
            attention = block.attention
            shape = (
                self.config.num_groups,
                batch,
                num_slots,
                attention.num_kv_heads,
                attention.head_dim,
            )
            # Two buffers: one alone could not be donated for both.
            k_LBSKH, v_LBSKH = (jnp.zeros(shape, self.execution.policy.compute) for _ in range(2))
            caches.append(LayerCache(k_BSKH=k_LBSKH, v_BSKH=v_LBSKH))
        return tuple(caches)

    @property
    def vocabulary_table(self) -> Float[Array, "V D"]:
        """Rows that the final hidden state is projected onto: the embedding's own when tied."""
        return (self.unembedding or self.embedding).table[...]

    @property
    def gathered_table(self) -> Float[Array, "V D"]:
        """``vocabulary_table`` for a loss that goes over it in chunks: as whole as a loop should
        find it, or each of its turns would gather it again.

        Gathered in the compute dtype; its values are rounded to that, its gradients are not.
        """
        compute = self.execution.policy.compute
        place = self.execution.constrain

        @jax.custom_vjp
        def gathered(table_VD: jax.Array) -> jax.Array:
            rounded_VD = place(table_VD.astype(compute), (axes.VOCAB, axes.STREAM))
            return rounded_VD.astype(table_VD.dtype)

        gathered.defvjp(lambda table_VD: (gathered(table_VD), None), lambda _, d_VD: (d_VD,))
        return gathered(self.vocabulary_table)

    def logits(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Projects onto the vocabulary, soft-capped where the config says so, accum dtype."""
        with jax.named_scope("logits"):
            logits_BTV = self.execution.policy.einsum_accum(
                "BTD,VD->BTV", hidden_BTD, self.vocabulary_table
            )
            cap = self.config.logit_soft_cap
            if cap is not None:
                logits_BTV = cap * jnp.tanh(logits_BTV / cap)
        return logits_BTV

    def _run(
        self,
        ids_BT: jax.Array,
        *,
        positions: jax.Array | None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        prefill: bool = False,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(ids_BT.shape[1])[None], ids_BT.shape)
        embed_key, blocks_key = (
            (None, None) if dropout_key is None else jax.random.split(dropout_key)
        )
        x_BTD = self.embed(ids_BT, positions, embed_key)

        # The pattern's blocks differ in structure, its repetitions do not: scan over repetitions.
        graphdefs, parameters = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        ropes = self.rope_tables(positions)
        layer_keys = None
        if blocks_key is not None:
            layer_keys = jax.random.split(
                blocks_key, (self.config.num_groups, len(self.config.blocks))
            )

        # The cache is carried, not scanned over: the loop then works in the one buffer, where a
        # scan would read the whole cache from one and write it to another.
        def repetition(carry: tuple[jax.Array, KVCache | None], layer):
            x_BTD, cache = carry
            index, parameters, keys = layer
            written = []
            for i, (graphdef, rope) in enumerate(zip(graphdefs, ropes, strict=True)):
                block = nnx.merge(graphdef, parameters[i])
                x_BTD, layer_cache = block(
                    x_BTD,
                    rope=rope,
                    positions_BT=positions,
                    segment_ids_BT=segment_ids,
                    cache=None if cache is None else read_layer(cache[i], index),
                    prefill=prefill,
                    dropout_key=None if keys is None else keys[i],
                )
                if cache is not None:
                    written.append(write_layer(cache[i], layer_cache, index))
            return (x_BTD, None if cache is None else tuple(written)), None

        indices = None if cache is None else jnp.arange(self.config.num_groups)
        with jax.named_scope("layer"):
            (x_BTD, cache), _ = jax.lax.scan(
                self.rematerialized(repetition),
                (x_BTD, cache),
                (indices, parameters, layer_keys),
                unroll=self._unroll(),
            )
        return self.normalized(x_BTD), cache

    def normalized(self, x_BTD: jax.Array) -> jax.Array:
        """The last block's output as the vocabulary projection reads it."""
        with jax.named_scope("final_norm"):
            hidden_BTD = self.final_norm(x_BTD)
            return self.execution.constrain(hidden_BTD, (axes.BATCH, axes.SEQUENCE, axes.STREAM))

    def embed(self, ids_BT: jax.Array, positions_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        """The first block's input, [B, T, D] in the compute dtype; a key drops out."""
        with jax.named_scope("embedding"):
            x_BTD = self.embedding(ids_BT)
            if self.config.embedding_scale != 1.0:
                # Rounded to the compute dtype first, as Gemma does.
                x_BTD = x_BTD * jnp.asarray(self.config.embedding_scale, x_BTD.dtype)
            if self.positions is not None:
                x_BTD = x_BTD + self.positions(positions_BT)
            x_BTD = dropout(
                x_BTD,
                rate=self.config.dropout_rate,
                key=key,
                constrain=self.execution.constrain,
            )
            return self.execution.constrain(x_BTD, (axes.BATCH, axes.STREAM_SEQUENCE, axes.STREAM))

    def rope_tables(self, positions_BT: jax.Array) -> list[RopeTable | None]:
        """One entry a block of the pattern, None without rotary."""
        tables: dict[tuple[RopeConfig, int], RopeTable] = {}
        result: list[RopeTable | None] = []
        for block in self.config.blocks:
            rope, head_dim = block.attention.rope, block.attention.head_dim
            if rope is None:
                result.append(None)
                continue
            if (rope, head_dim) not in tables:
                tables[rope, head_dim] = rope_table(
                    rope, head_dim=head_dim, positions_BT=positions_BT
                )
            result.append(tables[rope, head_dim])
        return result

    def rematerialized(self, repetition):
        """A repetition of the block pattern that keeps what ``execution.remat`` says."""
        remat = self.execution.remat
        if remat is Remat.NONE:
            return repetition
        policies = jax.checkpoint_policies
        policy = policies.save_only_these_names(*_SAVED_NAMES[remat])
        if remat is not Remat.FULL:
            policy = policies.save_from_both_policies(policy, is_attention_result)
        # Inside a loop, CSE cannot undo the recomputation; forbidding it would only cost fusions.
        in_loop = self._unroll() < self.config.num_groups
        return jax.checkpoint(repetition, policy=policy, prevent_cse=not in_loop)

    def _unroll(self) -> int:
        """Repetitions of the block pattern in one body of the loop."""
        return min(max(1, self.execution.unroll // len(self.blocks)), self.config.num_groups)


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    graphdef: nnx.GraphDef[Decoder],
    parameters: nnx.State,
    token_ids: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
) -> jax.Array:
    decoder = nnx.merge(graphdef, parameters)
    hidden_BTD = decoder.hidden(token_ids, segment_ids=segment_ids, positions=positions)
    return decoder.logits(hidden_BTD)
