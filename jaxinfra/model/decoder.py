"""The decoder of every architecture; the config alone says how architectures differ.

Dims: B batch, T position, S cache slot, D model width, V vocabulary, P table positions,
L repetitions of the block pattern (the scanned dim).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.config.kinds import Head
from jaxinfra.config.model import BlockConfig, ExpertsConfig, ModelConfig, Stack
from jaxinfra.errors import ConfigError
from jaxinfra.model.block import Block
from jaxinfra.model.cache import after_pass, is_tentative
from jaxinfra.model.dropout import dropout, keys_of_stacks
from jaxinfra.model.embedding import Embedding
from jaxinfra.model.empty_cache import empty_cache
from jaxinfra.model.exactness import check_exact
from jaxinfra.model.execution import Execution
from jaxinfra.model.layer_inputs import LayerInputs, by_stack, with_shared
from jaxinfra.model.layer_loop import one_by_one, take_apart, take_in_place
from jaxinfra.model.mtp import prediction
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import LayerOutput, Pass
from jaxinfra.model.recomputation import check_kept, repeats_in_body, steps_of_stack
from jaxinfra.model.repetition import KVCache as KVCache
from jaxinfra.model.repetition import (
    check_recipes,
    graphdefs_of,
    in_eight_bits,
    repetition_of,
    run_unrolled,
    stacked_layers,
)
from jaxinfra.model.rope import RopeTable, rope_table
from jaxinfra.model.streams import Streams
from jaxinfra.model.whole_step import whole_step
from jaxinfra.numerics.policy import unquantized
from jaxinfra.numerics.recipe import Site


class Decoder(nnx.Module):
    """Decoder: embedding, L repetitions of the block pattern, final norm, vocabulary projection."""

    def __init__(self, config: ModelConfig, *, execution: Execution, rngs: nnx.Rngs):
        check_recipes(config, execution)
        check_exact(config, execution)
        self.config = config
        self.execution = execution
        given = {"execution": execution, "rngs": rngs}
        sizes = {"model_dim": config.model_dim, "std": config.init_std}
        table = functools.partial(Embedding, **sizes, **given)
        is_scored = config.head is Head.SCORE
        tied, rows = config.tie_embeddings and not is_scored, config.vocab_size
        self.embedding = table(num_rows=rows, rows_dim=axes.VOCAB, matmul=tied)
        places = {"num_rows": config.max_positions + config.position_offset, "matmul": False}
        has_places = config.learned_positions
        self.positions = table(**places, rows_dim=axes.POSITION) if has_places else None
        self.blocks = nnx.List(
            [
                self._stack(i, block, repeats, rngs)
                for i, (block, repeats) in enumerate(
                    zip(config.blocks, config.repeats, strict=True)
                )
            ]
        )
        check_kept(config, execution, [label for block in self.blocks for label in block.labels])
        norm = functools.partial(
            Norm, shape=(config.model_dim,), dims=(axes.EMBED,), execution=execution
        )
        self.embedding_norm = norm(config.embedding_norm) if config.embedding_norm else None
        self.layer_inputs = LayerInputs(config, **given) if config.layer_input_rows else None
        self.streams = Streams(config, **given) if config.blocks[0].streams else None
        self.final_norm = norm(config.final_norm)
        head = (1, axes.SCORE) if is_scored else (rows, axes.VOCAB)
        self.unembedding = None if tied else table(num_rows=head[0], rows_dim=head[1], matmul=True)
        has_bias = config.logit_bias and not is_scored
        zeros = jnp.zeros(rows, execution.policy.param)
        self.logit_bias = nnx.Param(zeros, axes=(axes.VOCAB,)) if has_bias else None
        self.mtp = prediction(config, self._stacked, **given) if config.mtp else None

    def _stack(self, i: int, block: BlockConfig, repeats: int, rngs: nnx.Rngs) -> Block:
        config, execution = self.config, self.execution
        if not any(kind for (kind,) in in_eight_bits(config, execution.policy, slice(i, i + 1))):
            # Nothing of 8 bits, their histories neither.
            execution = dataclasses.replace(execution, policy=unquantized(execution.policy))
        return self._stacked(block, repeats, execution, rngs)

    def _stacked(self, block: BlockConfig, repeats: int, how: Execution, rngs: nnx.Rngs) -> Block:
        config = self.config
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        sizes = {"model_dim": config.model_dim, "std": config.init_std, "out_std": out_std}
        rate = config.dropout_rate
        build = functools.partial(Block, block, **sizes, dropout_rate=rate, execution=how)
        return stacked_layers(lambda rngs: build(rngs=rngs), num_layers=repeats, rngs=rngs)

    def __call__(
        self,
        token_ids: Int[Array | np.ndarray, "B T"],
        *,
        segment_ids: Int[Array | np.ndarray, "B T"] | None = None,
        positions: Int[Array | np.ndarray, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Computes the logits of each next token in the accum dtype (fp32); compiled per shape.

        Those of a reward model are one number, V = 1: the score of the text up to each token.

        Raises ConfigError where the rows do not divide over the devices of a mesh, or are longer
        than a learned table of positions.
        """
        length, longest = token_ids.shape[1], self.config.max_positions
        if self.config.learned_positions and positions is None and length > longest:
            raise ConfigError(
                f"rows of {length} tokens, and the model has learned {longest} positions; give at "
                f"most {longest} tokens"
            )
        rows, shards = token_ids.shape[0], self.execution.place.batch_shards
        if rows % shards:
            raise ConfigError(
                f"{rows} rows of tokens do not divide over the {shards} devices of the mesh's data "
                f"axes; give a multiple of {shards} rows"
            )
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
        """Computes the final norm's output in the compute dtype, the input of the loss.

        Args:
            segment_ids: each token's document, -1 for padding; attention never crosses documents.
            positions: each token's position in its document; 0..T-1 by default.
            dropout_key: PRNG key of dropout; no dropout without one.
        """
        return self.run(
            token_ids, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key
        ).x

    def empty_cache(self, *, batch: int, num_slots: int) -> KVCache:
        """Makes a contiguous cache of ``num_slots`` positions per row in the execution's format."""
        return empty_cache(self.config, self.execution, batch=batch, num_slots=num_slots)

    @property
    def vocabulary_table(self) -> Float[Array, "V D"]:
        """Weight of the vocabulary projection; the embedding table if the two are tied."""
        return (self.unembedding or self.embedding).table[...]

    def logits(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Projects hidden states to logits in the accum dtype, soft-capped if configured."""
        if self.config.head is Head.SCORE:
            return self.scores(hidden_BTD)[..., None]
        with jax.named_scope("logits"):
            recipe = self.execution.policy.recipe(Site.LOGITS)
            logits_BTV = self.execution.multiply(
                "BTD,VD->BTV", hidden_BTD, self.vocabulary_table, recipe=recipe, out=recipe.accum,
                dims=(axes.VOCAB, axes.EMBED),
            )  # fmt: skip
            if recipe.is_exact:  # or devices would sum their own parts of the vocabulary first
                logits_BTV = self.execution.place(logits_BTV, (axes.BATCH, None, None))
            if self.logit_bias is not None:
                bias_V = self.execution.policy.to_accum(self.logit_bias[...])
                logits_BTV = logits_BTV + bias_V[None, None]
            cap = self.config.logit_soft_cap
            if cap is not None:
                logits_BTV = self.execution.policy.pinned(cap * jnp.tanh(logits_BTV / cap))
        return logits_BTV

    def scores(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Projects hidden states to a reward model's scores in the accum dtype."""
        with jax.named_scope("scores"):
            accum = self.execution.policy.accum
            weight_D = self.vocabulary_table[0].astype(accum)
            # No matmul: it would round on devices that multiply fp32 in fewer bits.
            return jnp.sum(hidden_BTD.astype(accum) * weight_D[None, None], axis=-1)

    def run(
        self,
        token_ids: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        contexts: Int[Array, "B"] | None = None,
        dropout_key: jax.Array | None = None,
        behind: Any = None,
    ) -> LayerOutput:
        """Computes all layers and the final norm.

        Returns the output of ``hidden`` as x, the cache with the new tokens, and one ``Sums`` per
        distinct block, whose arrays have the block's repetitions as first dim.

        Args:
            positions, segment_ids: as in ``hidden``. With a cache, a row's positions continue after
                its cached tokens, from 0 in an empty cache. Positions below 0 are padding, to the
                right of the row's tokens.
            contexts: each row's final length, which some rotations depend on; None: after these.
            behind: parameters used after the layers, returned unchanged; part of the layers' order.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None], token_ids.shape)
        embed_key, stack_keys = keys_of_stacks(dropout_key, self.config.stacks)
        x_BTD = self.embed(token_ids, positions, embed_key)
        given = Pass(positions_BT=positions, segment_ids_BT=segment_ids)
        ropes = self.rope_tables(positions, contexts)
        blocks = list(self.blocks)
        whole = whole_step(x_BTD, self.config, blocks, self.execution, given, ropes, cache)
        if whole is not None:
            return dataclasses.replace(whole, x=self.normalized(whole.x))
        extras = by_stack(self.layer_inputs, token_ids, x_BTD, self.config.stacks, stack_keys)
        x_BTD = x_BTD if self.streams is None else self.streams.widened(x_BTD)
        caches, sums, after, num_blocks, handed_on = [], [], (), 0, None
        for each, extra in zip(self.config.stacks, extras, strict=True):
            places = slice(num_blocks, num_blocks + len(each.pattern))
            num_blocks = places.stop
            before = None if cache is None else cache[places]
            out = self._run_stack(
                x_BTD,
                each,
                places,
                given,
                ropes=ropes[places],
                extra=extra,
                cache=before,
                behind=behind if num_blocks == len(self.config.blocks) else None,
            )
            x_BTD, handed_on = out.x, out.behind
            given, out = with_shared(given, out, each, before)
            caches += out.cache or ()
            sums += out.sums
            after += out.after
        x_BTD, cache = self.normalized(x_BTD), None if cache is None else tuple(caches)
        return LayerOutput(x=x_BTD, cache=cache, sums=tuple(sums), behind=handed_on, after=after)

    def _run_stack(
        self,
        x_BTD: jax.Array,
        stack: Stack,
        places: slice,
        given: Pass,
        *,
        ropes: Sequence[RopeTable | None],
        extra: tuple[jax.Array | None, ...],
        cache: KVCache | None,
        behind: Any,
    ) -> LayerOutput:
        """Runs one stack of layers, whose pattern has these places among the blocks.

        Args:
            ropes: one for each block of the pattern.
            extra: keys of dropout, and layers' own inputs if any: [repeats, pattern, ...].
        """
        repeats, unroll = stack.repeats, repeats_in_body(stack, self.execution.recomputation.unroll)
        kinds = in_eight_bits(self.config, self.execution.policy, places)
        is_straight = repeats == 1 or self.execution.decode_form is not None
        # A pass that holds its tokens hands on more arrays than it was given.
        is_straight |= any(map(is_tentative, cache or ()))
        is_straight |= self.mtp is not None and self.mtp.reads_layers
        if cache is not None and is_straight:
            blocks = self._blocks_at(places)
            with jax.named_scope("layer"):
                return run_unrolled(x_BTD, blocks, kinds, given, tuple(ropes), cache, extra[1:])
        computed = {
            kind: self.repetition(places, given, ropes=ropes, cache=cache, number=kinds.index(kind))
            for kind in dict.fromkeys(kinds)
        }
        stored = None if cache is None else [each.arrays for each in cache]
        indices = None if cache is None else jnp.arange(repeats)
        with jax.named_scope("layer"):
            steps = steps_of_stack(
                [computed[kind][0] for kind in kinds],
                self.execution,
                self.config,
                places.start,
                in_loop=unroll < repeats,
            )
            start, layers = (x_BTD, stored), (indices, computed[kinds[0]][1], *extra)
            if len(set(steps)) > 1 or (cache is None and 1 < repeats == unroll):
                # Experts have most of the weights: joining their gradients is most of an update.
                kinds_of = {type(block.feed_forward) for block in self.config.blocks[places]}
                take = take_in_place if ExpertsConfig in kinds_of else take_apart
                (x_BTD, stored), sums, behind = one_by_one(
                    steps,
                    start,
                    layers,
                    take=take,
                    in_order=self.execution.gather is not None,
                    behind=behind,
                )
            else:
                (x_BTD, stored), sums = jax.lax.scan(steps[0], start, layers, unroll=unroll)
        if cache is not None and stored is not None:
            cache = tuple(map(after_pass, cache, stored))
        return LayerOutput(x=x_BTD, cache=cache, sums=sums, behind=behind)

    def repetition(
        self,
        places: slice,
        given: Pass,
        *,
        ropes: Sequence[RopeTable | None],
        cache: KVCache | None = None,
        number: int = 0,
    ):
        """Returns one repetition of a stack's pattern as a function, and all parameters.

        Args:
            places: indices of the pattern's blocks among the model's blocks.
            ropes: RoPE table of each block.
            number: index of the repetition, which says which blocks multiply in 8 bits.

        Returns:
            The function of ``repetition_of``; the parameters of each block, [repeats, ...].
        """
        kind = in_eight_bits(self.config, self.execution.policy, places)[number]
        graphdefs, parameters = graphdefs_of(self._blocks_at(places), kind)
        return repetition_of(graphdefs, given, ropes=ropes, cache=cache), parameters

    def _blocks_at(self, places: slice) -> list[Block]:
        return list(self.blocks)[places]

    def normalized(self, x_BTD: jax.Array) -> jax.Array:
        """Applies the final norm, and the scale of logits, to the last block's output."""
        with jax.named_scope("final_norm"):
            x_BTD = x_BTD if self.streams is None else self.streams.merged(x_BTD)
            return self.scaled(self.final_norm(x_BTD))

    def scaled(self, hidden_BTD: jax.Array) -> jax.Array:
        """Multiplies normalized hidden states by the scale of logits, and places them."""
        if self.config.logit_scale != 1.0:
            hidden_BTD = self.execution.policy.scaled(hidden_BTD, self.config.logit_scale)
        return self.execution.place(hidden_BTD, (axes.BATCH, axes.SEQUENCE, axes.STREAM))

    def predict(
        self,
        hidden_BTD: Float[Array, "B T D"],
        next_ids: Int[Array, "B T"],
        *,
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KVCache | None = None,
        contexts: Int[Array, "B"] | None = None,
    ) -> LayerOutput:
        """Computes hidden states whose logits predict the token after each of ``next_ids``, by
        multi-token prediction.

        Args:
            hidden_BTD: x of ``run``, or of this method at the position before.
            next_ids: the token after each position.
            positions, segment_ids, contexts: of ``hidden_BTD``, as in ``run``.
            cache: of the module's one layer.
        """
        assert self.mtp is not None, "ModelConfig.mtp"
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(next_ids.shape[1])[None], next_ids.shape)
        given = Pass(positions_BT=positions, segment_ids_BT=segment_ids)
        with jax.named_scope("mtp"):
            own = self.mtp.embedding
            embedded_BTD = self.embed(next_ids, positions, None) if own is None else own(next_ids)
            out = self.mtp(hidden_BTD, embedded_BTD, given, cache=cache, contexts_B=contexts)
        return dataclasses.replace(out, x=self.scaled(out.x))

    def embed(self, ids_BT: jax.Array, positions_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        """Embeds tokens as the first block's input [B, T, D]; applies dropout if there is a key."""
        with jax.named_scope("embedding"):
            x_BTD, policy = self.embedding(ids_BT), self.execution.policy
            if self.config.embedding_scale != 1.0:
                # Rounded to the compute dtype first, as Gemma does.
                x_BTD = policy.scaled(x_BTD, self.config.embedding_scale)
            if self.positions is not None:
                offset = self.config.position_offset
                positions_BT = positions_BT + offset if offset else positions_BT
                x_BTD = policy.added(x_BTD, self.positions(positions_BT))
            if self.embedding_norm is not None:
                x_BTD = self.embedding_norm(x_BTD)
            place, rate = self.execution.place, self.config.dropout_rate
            x_BTD = dropout(x_BTD, rate=rate, key=key, place=place)
            return place(x_BTD, (axes.BATCH, axes.STREAM_SEQUENCE, axes.STREAM))

    def rope_tables(
        self, positions_BT: jax.Array, contexts_B: jax.Array | None = None
    ) -> list[RopeTable | None]:
        """Computes the RoPE table of each distinct block; None for blocks without RoPE."""
        is_exact = self.execution.policy.is_exact
        given = {"positions_BT": positions_BT, "contexts_B": contexts_B, "is_exact": is_exact}
        kinds = [(block.mixer.rope, block.mixer.rotated_dim) for block in self.config.blocks]
        tables = {
            (rope, head_dim): None if rope is None else rope_table(rope, head_dim=head_dim, **given)
            for rope, head_dim in dict.fromkeys(kinds)
        }
        return [tables[kind] for kind in kinds]


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
