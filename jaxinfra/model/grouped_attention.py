"""Self-attention: MHA, GQA and MQA by the number of key/value heads.

Dims: B batch, T position, S cache slot, D model width, N query heads, K key/value heads,
H head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.model.cache import JointCache, StateCache, TokenCache, with_pages
from jaxinfra.model.execution import Execution
from jaxinfra.model.heads import clipped, head_norm, keys_for, positioned, segments
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Abilities, LayerOutput, Pass, Sums
from jaxinfra.model.projection import Projection, from_heads, projected, unpacked
from jaxinfra.ops.cached_attention import append_packed_heads, as_cached
from jaxinfra.ops.multiply import Deferred


class GroupedAttention(nnx.Module):
    """Attention softmax(q k^T / sqrt(H)) v, with N/K query heads per key/value head.

    Args:
        out_std: standard deviation of the output projection's initial weights.
    """

    def __init__(
        self,
        config: GroupedAttentionConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.execution = execution
        width, heads, kv_heads = config.head_dim, config.num_q_heads, config.num_kv_heads

        def inward(num_heads: int, heads_dim: str | None) -> Projection:
            return Projection(
                "BTD,DNH->BTNH",
                shape=(model_dim, num_heads, width),
                dims=(axes.EMBED, heads_dim, axes.HEAD),
                bias_rank=2 if config.qkv_bias else 0,
                std=std,
                execution=execution,
                rngs=rngs,
                repeated=axes.KV_HEADS if heads_dim == axes.KV_HEADS else None,
            )

        form = execution.decode_form
        takes, without_value = config.takes_keys is not None, config.values_are_keys
        is_plain = not (takes or without_value or config.gives_keys)
        is_packed = form is not None and form.packed and is_plain
        gates = heads if config.out_gate else 0
        self.packed = inward(heads + 2 * kv_heads + gates, axes.Q_HEADS) if is_packed else None
        if self.packed is None:
            self.query = inward(heads, axes.Q_HEADS)
            self.key = None if takes else inward(kv_heads, axes.KV_HEADS)
            self.value = None if takes or without_value else inward(kv_heads, axes.KV_HEADS)
        how = {"std": out_std, "execution": execution, "rngs": rngs}
        self.out = from_heads(heads, width, model_dim, bias=config.out_bias, **how)
        zeros = jnp.zeros(heads, execution.policy.param)
        self.sinks = nnx.Param(zeros, axes=(axes.Q_HEADS,)) if config.sinks else None

        norm = functools.partial(head_norm, config, execution=execution)
        self.query_norm = norm(num_heads=heads, heads_dim=axes.Q_HEADS)
        self.key_norm = None if takes else norm(num_heads=kv_heads, heads_dim=axes.KV_HEADS)
        self.value_norm = (
            None
            if takes or config.value_norm is None
            else Norm(config.value_norm, shape=(width,), dims=(axes.HEAD,), execution=execution)
        )
        is_gate_apart = config.out_gate and self.packed is None
        self.out_gate = inward(heads, axes.Q_HEADS) if is_gate_apart else None

    @property
    def abilities(self) -> Abilities:
        """Steps of a block that this layer does itself: norm and residual sum, if packed."""
        fuses = self.packed is not None and self.execution.multiply.few_rows
        return Abilities(fuses=fuses, quantizes=True, gathers=self.packed is None)

    def __call__(self, x_BTD: Float[Array, "B T D"] | Deferred, given: Pass) -> LayerOutput:
        """Attends within x or, where ``given`` has a cache, to the cached tokens and x.

        Returns [B, T, D] in the compute dtype, and the cache with x's keys and values.
        """
        place, cache = self.execution.place, given.cache
        assert not isinstance(cache, StateCache | JointCache), "CacheSpec"
        if self.config.takes_keys is not None:
            return self._attended_to_others(x_BTD, given)
        heads_BTNH, gate_BTNH = self._inward(x_BTD)
        if heads_BTNH is not None and cache is not None and given.segment_ids_BT is None:
            appended = self._appended(heads_BTNH, given, cache)
            if appended is not None:
                return appended
        q_BTNH, k_BTKH, v_BTKH = self._projected(x_BTD, heads_BTNH)
        v_BTKH = clipped(self.config, v_BTKH)
        v_BTKH = v_BTKH if self.value_norm is None else self.value_norm(v_BTKH)
        norms, policy = (self.query_norm, self.key_norm), self.execution.policy
        q_BTNH, k_BTKH = positioned(self.config, q_BTNH, k_BTKH, given, norms, policy=policy)
        q_BTNH = place(q_BTNH, (axes.BATCH, axes.SEQUENCE, axes.Q_HEADS, axes.HEAD))
        kv_dims = (axes.BATCH, axes.SEQUENCE, axes.KV_HEADS, axes.HEAD)
        k_BTKH, v_BTKH = place(k_BTKH, kv_dims), place(v_BTKH, kv_dims)
        if cache is not None:
            cache = cache.append({"k": k_BTKH, "v": v_BTKH}, given.positions_BT)
            # Where tokens attend to each other before they are read back, as they will be read:
            # so a text does not depend on how its prompt was cut.
            k_BTKH, v_BTKH = (as_cached(x, cache.format) for x in (k_BTKH, v_BTKH))
        with jax.named_scope("core"):
            if cache is None or cache.is_empty:
                # Nothing but x to attend to: a mask by index is all that it takes.
                out_BTNH = self.execution.kernels.attend(
                    q_BTNH,
                    k_BTKH,
                    v_BTKH,
                    config=self.config,
                    segment_ids_BT=segments(self.config, given),
                    sinks_N=self._sinks(),
                )
            else:
                out_BTNH = self._decoded(q_BTNH, given, cache)
        if gate_BTNH is not None:
            gate_BTNH = jax.nn.sigmoid(self.execution.policy.to_accum(gate_BTNH))
            out_BTNH = out_BTNH * gate_BTNH.astype(out_BTNH.dtype)
        gives = self.config.gives_keys is not None
        sums = Sums(handed={"k": k_BTKH, "v": v_BTKH}) if gives else Sums()
        out_BTD = self.out(out_BTNH, residual=given.residual_BTD)
        return LayerOutput(x=out_BTD, cache=cache, sums=sums)

    def _inward(self, x_BTD: jax.Array | Deferred) -> tuple[jax.Array | None, jax.Array | None]:
        """The packed queries, keys and values, and the gate; None for what is apart or absent."""
        if self.packed is None:
            assert not isinstance(x_BTD, Deferred), "abilities"
            return None, None if self.out_gate is None else self.out_gate(x_BTD)
        heads_BTNH = self.packed(x_BTD)
        if not self.config.out_gate:
            return heads_BTNH, None
        shards = self.execution.place.shards(axes.Q_HEADS)
        first_gate = (self.config.num_q_heads + 2 * self.config.num_kv_heads) // shards
        heads_BTNH, gate_BTNH = unpacked(heads_BTNH, (first_gate,), shards, axis=2)
        return heads_BTNH, gate_BTNH

    def _appended(
        self, heads_BTNH: jax.Array, given: Pass, cache: TokenCache
    ) -> LayerOutput | None:
        """Output if the packed product is appended to the cache directly; None if its parts are
        apart.
        """
        is_ordered = self.execution.policy.is_exact
        if not (self.execution.multiply.few_rows or is_ordered):
            return None
        found = append_packed_heads(
            heads_BTNH,
            cache.pages(),
            config=self.config,
            positions_BT=given.positions_BT,
            rope=given.rope,
            is_empty=cache.is_empty,
            is_ordered=is_ordered,
        )
        if found is None:
            return None
        q_BTNH, arrays = found
        cache = with_pages(cache, arrays)
        with jax.named_scope("core"):
            out_BTNH = self._decoded(q_BTNH, given, cache)
        return LayerOutput(x=self.out(out_BTNH, residual=given.residual_BTD), cache=cache)

    def _attended_to_others(self, x_BTD: jax.Array | Deferred, given: Pass) -> LayerOutput:
        """Output of queries to an earlier layer's keys and values."""
        assert not isinstance(x_BTD, Deferred), "abilities"
        keys, norms = keys_for(self.config, given), (self.query_norm, self.query_norm)
        (q_BTNH,) = projected(x_BTD, [self.query])
        policy, dims = self.execution.policy, (axes.BATCH, axes.SEQUENCE, axes.Q_HEADS, axes.HEAD)
        q_BTNH, _ = positioned(self.config, q_BTNH, q_BTNH, given, norms, policy=policy)
        q_BTNH = self.execution.place(q_BTNH, dims)
        with jax.named_scope("core"):
            if keys.cache is None or keys.cache.is_empty:
                more = {"segment_ids_BT": segments(self.config, given), "sinks_N": self._sinks()}
                attend = self.execution.kernels.attend
                out_BTNH = attend(q_BTNH, keys.k_BTKH, keys.v_BTKH, config=self.config, **more)
            else:
                assert not isinstance(keys.cache, StateCache | JointCache), "CacheSpec"
                out_BTNH = self._decoded(q_BTNH, given, keys.cache)
        return LayerOutput(x=self.out(out_BTNH, residual=given.residual_BTD), cache=given.cache)

    def _decoded(self, q_BTNH: jax.Array, given: Pass, cache: TokenCache) -> jax.Array:
        """Attention of queries over a cache that already holds their tokens."""
        return self.execution.kernels.decode(
            q_BTNH,
            cache.view(),
            config=self.config,
            positions_BT=given.positions_BT,
            sinks_N=self._sinks(),
        )

    def _sinks(self) -> jax.Array | None:
        """[N], in the dtype of sums."""
        return None if self.sinks is None else self.execution.policy.to_accum(self.sinks[...])

    def _projected(
        self, x_BTD: jax.Array | Deferred, heads_BTNH: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, without position; of a packed product, where there is one."""
        if heads_BTNH is None:
            assert not isinstance(x_BTD, Deferred), "Block"
            assert self.key is not None, "takes_keys"
            values = [] if self.value is None else [self.value]
            k_BTKH, *v_BTKH, q_BTNH = projected(x_BTD, [self.key, *values, self.query])
            return q_BTNH, k_BTKH, v_BTKH[0] if v_BTKH else k_BTKH
        shards = self.execution.place.shards(axes.Q_HEADS)
        first_key = self.config.num_q_heads // shards
        first_value = first_key + self.config.num_kv_heads // shards
        queries, keys, values = unpacked(heads_BTNH, (first_key, first_value), shards, axis=2)
        return queries, keys, values
