"""Latent attention, and the indexer that chooses the keys of its queries."""

from jaxinfra.config.cache import CachedArray, CacheSpec
from jaxinfra.config.limits import check_cap, check_window, require_positive, require_within
from jaxinfra.config.norm import NormConfig
from jaxinfra.config.record import record
from jaxinfra.config.rope import RopeConfig, RopePairs, check_rope
from jaxinfra.errors import ConfigError

INDEXER_PARAMETERS = (
    "query/weight",
    "key/weight",
    "key_norm/scale",
    "key_norm/bias",
    "head_weight/weight",
)
"""Paths of an indexer's parameters, relative to the indexer."""


@record
class IndexerConfig:
    """A lightning indexer, which chooses the keys that a query attends to (DeepSeek-V3.2, arXiv
    2512.02556, section 2.1).

    Examples:
        >>> indexer = jaxinfra.IndexerConfig(num_heads=64, head_dim=128, top_k=2048)
    """

    num_heads: int  # heads whose scores are summed
    head_dim: int  # width of such a head, and of the key of a token
    top_k: int  # keys that a query attends to
    pairs: RopePairs = RopePairs.HALVES  # which two elements are rotated together

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "head_dim", "top_k")
        require_within(num_q_heads=self.num_heads, head_dim=self.head_dim)


@record
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Examples:
        >>> sizes = dict(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536)
        >>> rope = jaxinfra.RopeConfig(pairs="neighbours")
        >>> jaxinfra.LatentAttentionConfig(num_q_heads=128, rope=rope, **sizes).head_dim
        192
    """

    num_q_heads: int  # query heads
    query_rank: int | None  # None: queries are not compressed
    kv_rank: int  # width of the cached latent
    nope_dim: int  # width of a head's part without RoPE
    rope_dim: int  # width of a head's part with RoPE; all heads share one such key
    value_dim: int  # width of a head's value
    rope: RopeConfig | None  # rotary positions; None: none
    norm: NormConfig = NormConfig()  # norm of the compressed queries, keys and values
    bias: bool = False  # biases of the down projections and of the output projection
    window: int | None = None  # as in grouped attention
    logit_soft_cap: float | None = None  # as in grouped attention
    scale: float | None = None  # multiplies scores; None: (nope_dim + rope_dim)^-0.5
    indexer: IndexerConfig | None = None  # chooses each query's keys; None: all that it may see

    def __post_init__(self) -> None:
        require_positive(self, "num_q_heads", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        require_within(num_q_heads=self.num_q_heads, kv_rank=self.kv_rank, head_dim=self.head_dim)
        if self.query_rank is not None and self.query_rank < 1:
            raise ConfigError(f"query_rank={self.query_rank} must be at least 1, or none")
        if self.rope is not None:
            check_rope(self.rope, head_dim=self.rope_dim)
        check_window(self.window)
        check_cap(self.logit_soft_cap)
        self._check_indexer()

    def _check_indexer(self) -> None:
        indexer = self.indexer
        if indexer is None:
            return
        if self.query_rank is None or self.rope is None or self.window is not None:
            raise ConfigError(
                f"an indexer with query_rank={self.query_rank}, rope={self.rope} and "
                f"window={self.window}: it reads compressed queries, rotates them as attention "
                "does and chooses among all earlier keys; set query_rank and rope, and no window"
            )
        if indexer.head_dim < self.rope_dim:
            raise ConfigError(
                f"indexer.head_dim={indexer.head_dim} is below rope_dim={self.rope_dim}: the first "
                "rope_dim elements of its heads are rotated; widen it"
            )

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads; each is rebuilt from the latent."""
        return self.num_q_heads

    @property
    def head_dim(self) -> int:
        """Query and key width of a head."""
        return self.nope_dim + self.rope_dim

    @property
    def rotated_dim(self) -> int:
        """Width of the part of a head that is rotated (RoPE)."""
        return self.rope_dim

    @property
    def score_width(self) -> int:
        """Query width over all heads in q k^T."""
        return self.num_q_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Value width over all heads in p v."""
        return self.num_q_heads * self.value_dim

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {"num_q_heads": self.num_q_heads}

    @property
    def cache(self) -> CacheSpec:
        """The cache: the latent, the shared rotated key, and the indexer's key if there is one."""
        arrays = [("latent", self.kv_rank), ("rotated_key", self.rope_dim)]
        if self.indexer is not None:
            arrays.append(("index_key", self.indexer.head_dim))
        return CacheSpec(
            arrays=tuple(CachedArray(name=n, shape=(w,), dims=(None,)) for n, w in arrays),
            window=self.window,
        )


def indexer_of(mixer: object) -> IndexerConfig | None:
    """Returns the indexer of a layer's mixer; None if it has none."""
    return mixer.indexer if isinstance(mixer, LatentAttentionConfig) else None
