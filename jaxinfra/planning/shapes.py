"""What planning needs of a model: every weight with its logical dims, and the widths of attention.

A ``ModelShape`` says less than a ``ModelConfig`` (no activation, no rotary) and covers more: top-k
experts, shared experts, dense first layers and latent attention, so that models are planned that
this code base does not run yet.
"""

import dataclasses
import math
from collections.abc import Iterator

from jaxinfra.core import axes
from jaxinfra.core.errors import ConfigError

EXPERT = "expert"  # logical dim: routed experts, sharded over the expert axis
LATENT = "latent"  # logical dim: compressed query or key/value width, whole on every device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One kind of parameter tensor, ``copies`` of it in the model (one a layer).

    ``active`` is the share of it that a token is multiplied with: top_k / num_experts for a routed
    expert, 1 elsewhere.
    """

    name: str
    dims: tuple[tuple[str | None, int], ...]  # logical dim and size
    copies: int = 1
    active: float = 1.0
    matmul: bool = True  # False: a lookup, a norm scale, a bias

    @property
    def elements(self) -> int:
        """Elements of one copy."""
        return math.prod(size for _, size in self.dims)

    @property
    def total(self) -> int:
        """Elements of all copies."""
        return self.elements * self.copies

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to one of the routed experts."""
        return any(dim == EXPERT for dim, _ in self.dims)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """MHA, GQA or MQA, by the number of key/value heads (Ainslie et al. 2023)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads={self.num_q_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}; query heads share key/value heads in equal groups"
            )

    @property
    def kv_elements(self) -> int:
        """Cached elements a token and layer: a key and a value of every key/value head."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def score_width(self) -> int:
        """Query width over all heads, of q k^T."""
        return self.num_q_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Value width over all query heads, of p v."""
        return self.num_q_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    num_q_heads: int
    query_rank: int | None  # None: queries are not compressed
    kv_rank: int
    nope_dim: int  # of a head, without position
    rope_dim: int  # of a head, rotated; the key's is shared by all heads
    value_dim: int
    window: int | None = None

    @property
    def num_kv_heads(self) -> int:
        """Keys of every head are rebuilt from the latent."""
        return self.num_q_heads

    @property
    def head_dim(self) -> int:
        """Query and key width of a head."""
        return self.nope_dim + self.rope_dim

    @property
    def kv_elements(self) -> int:
        """Cached elements a token and layer: the latent and the shared rotated key."""
        return self.kv_rank + self.rope_dim

    @property
    def score_width(self) -> int:
        """Query width over all heads, of q k^T."""
        return self.num_q_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Value width over all heads, of p v."""
        return self.num_q_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A feed-forward layer."""

    hidden_dim: int
    gated: bool = True
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Routed experts, and shared ones that every token passes (DeepSeekMoE, arXiv 2401.06066)."""

    num_experts: int
    top_k: int
    hidden_dim: int
    shared_hidden_dim: int = 0  # of all shared experts together
    router_bias: bool = False  # the auxiliary-loss-free balance term
    shared_gate: bool = False  # Qwen2-MoE scales the shared expert by a learned gate
    gated: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} must lie between 1 and num_experts={self.num_experts}"
            )


type Attention = Heads | Latent
type FeedForward = Dense | Experts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """One block, and how many of the model's layers are built so."""

    attention: Attention
    feed_forward: FeedForward
    count: int
    norms: int = 2  # over the model width
    norm_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder as a list of weights."""

    name: str
    vocab_size: int
    model_dim: int
    layers: tuple[LayerShape, ...]
    tie_embeddings: bool
    max_positions: int
    learned_positions: bool = False
    final_norm_bias: bool = False

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(layer.count for layer in self.layers)

    def weights(self) -> Iterator[Weight]:
        """Every parameter of the model, layers first."""
        for layer in self.layers:
            yield from layer_weights(layer, self.model_dim)
        table = ((axes.VOCAB, self.vocab_size), (axes.EMBED, self.model_dim))
        # A tied table is looked up and multiplied: it counts as a matmul once.
        yield Weight(name="embedding", dims=table, matmul=self.tie_embeddings)
        if self.learned_positions:
            rows = ((axes.POSITION, self.max_positions), (axes.EMBED, self.model_dim))
            yield Weight(name="positions", dims=rows, matmul=False)
        yield from _vectors("final_norm", ((axes.EMBED, self.model_dim),), self.final_norm_bias)
        if not self.tie_embeddings:
            yield Weight(name="unembedding", dims=table)

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes."""
        return any(isinstance(layer.feed_forward, Experts) for layer in self.layers)


def layer_weights(layer: LayerShape, model_dim: int) -> Iterator[Weight]:
    """Weights of one kind of layer, ``layer.count`` copies of each."""
    for weight in (
        *_attention_weights(layer.attention, model_dim),
        *_feed_forward_weights(layer.feed_forward, model_dim),
    ):
        yield dataclasses.replace(weight, copies=layer.count)
    for i in range(layer.norms):
        for weight in _vectors(f"norm{i}", ((axes.EMBED, model_dim),), layer.norm_bias):
            yield dataclasses.replace(weight, copies=layer.count)


def _vectors(name: str, dims: tuple[tuple[str | None, int], ...], bias: bool) -> Iterator[Weight]:
    yield Weight(name=f"{name}/scale", dims=dims, matmul=False)
    if bias:
        yield Weight(name=f"{name}/bias", dims=dims, matmul=False)


def _attention_weights(attention: Attention, model_dim: int) -> Iterator[Weight]:
    embed = (axes.EMBED, model_dim)
    if isinstance(attention, Latent):
        yield from _latent_weights(attention, model_dim)
        return
    head = (axes.HEAD, attention.head_dim)
    query = (axes.Q_HEADS, attention.num_q_heads)
    key = (axes.KV_HEADS, attention.num_kv_heads)
    for name, heads in (("query", query), ("key", key), ("value", key)):
        yield Weight(name=f"attention/{name}", dims=(embed, heads, head))
        if attention.qkv_bias:
            yield Weight(name=f"attention/{name}/bias", dims=(heads, head), matmul=False)
    yield Weight(name="attention/out", dims=(query, head, embed))
    if attention.out_bias:
        yield Weight(name="attention/out/bias", dims=(embed,), matmul=False)
    if attention.qk_norm:
        for name in ("query_norm", "key_norm"):
            yield Weight(name=f"attention/{name}", dims=(head,), matmul=False)


def _latent_weights(attention: Latent, model_dim: int) -> Iterator[Weight]:
    embed = (axes.EMBED, model_dim)
    heads = (axes.Q_HEADS, attention.num_q_heads)
    query = (axes.HEAD, attention.head_dim)
    if attention.query_rank is None:
        yield Weight(name="attention/query", dims=(embed, heads, query))
    else:
        rank = (LATENT, attention.query_rank)
        yield Weight(name="attention/query_down", dims=(embed, rank))
        yield Weight(name="attention/query_latent_norm", dims=(rank,), matmul=False)
        yield Weight(name="attention/query_up", dims=(rank, heads, query))
    rank = (LATENT, attention.kv_rank)
    down = (LATENT, attention.kv_rank + attention.rope_dim)
    yield Weight(name="attention/kv_down", dims=(embed, down))
    yield Weight(name="attention/kv_latent_norm", dims=(rank,), matmul=False)
    up = (axes.HEAD, attention.nope_dim + attention.value_dim)
    yield Weight(name="attention/kv_up", dims=(rank, heads, up))
    value = (axes.HEAD, attention.value_dim)
    yield Weight(name="attention/out", dims=(heads, value, embed))


def _feed_forward_weights(feed_forward: FeedForward, model_dim: int) -> Iterator[Weight]:
    embed = (axes.EMBED, model_dim)
    if isinstance(feed_forward, Dense):
        yield from _mlp("mlp", model_dim, feed_forward.hidden_dim, feed_forward.gated)
        if feed_forward.bias:
            inward = ((axes.MLP, feed_forward.hidden_dim),)
            for name in ("gate", "up") if feed_forward.gated else ("up",):
                yield Weight(name=f"mlp/{name}/bias", dims=inward, matmul=False)
            yield Weight(name="mlp/down/bias", dims=(embed,), matmul=False)
        return
    experts = feed_forward
    routed = _mlp("expert", model_dim, experts.hidden_dim, experts.gated)
    for weight in routed:
        yield dataclasses.replace(
            weight,
            dims=((EXPERT, experts.num_experts), *weight.dims),
            active=experts.top_k / experts.num_experts,
        )
    yield Weight(name="router", dims=(embed, (None, experts.num_experts)))
    if experts.router_bias:
        yield Weight(name="router/bias", dims=((None, experts.num_experts),), matmul=False)
    if experts.shared_hidden_dim:
        yield from _mlp("shared", model_dim, experts.shared_hidden_dim, experts.gated)
    if experts.shared_gate:
        yield Weight(name="shared_gate", dims=(embed, (None, 1)))


def _mlp(name: str, model_dim: int, hidden_dim: int, gated: bool) -> Iterator[Weight]:
    embed, hidden = (axes.EMBED, model_dim), (axes.MLP, hidden_dim)
    for part in ("gate", "up") if gated else ("up",):
        yield Weight(name=f"{name}/{part}", dims=(embed, hidden))
    yield Weight(name=f"{name}/down", dims=(hidden, embed))
