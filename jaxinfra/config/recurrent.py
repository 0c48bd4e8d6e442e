"""Mixers that keep a state of fixed size per sequence, in place of keys and values per token."""

import enum
from typing import ClassVar

from jaxinfra import axes
from jaxinfra.config.cache import CacheSpec, StateArray
from jaxinfra.config.limits import require_positive, require_within
from jaxinfra.config.record import record
from jaxinfra.config.rope import RopeConfig
from jaxinfra.errors import ConfigError


class OutputGate(enum.StrEnum):
    """Activations of the gate that multiplies normalized outputs."""

    SILU = "silu"
    SIGMOID = "sigmoid"


@record
class WithoutScores:
    """Properties of mixers that do not compare positions with each other."""

    window: ClassVar[None] = None
    scale: ClassVar[None] = None
    logit_soft_cap: ClassVar[None] = None
    rope: ClassVar[RopeConfig | None] = None
    rotated_dim: ClassVar[int] = 0

    @property
    def num_q_heads(self) -> int:
        """Number of heads; 1 where there is nothing to divide."""
        return 1

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys; 1 where there is nothing to divide."""
        return 1

    @property
    def score_width(self) -> int:
        """Query width over all heads."""
        return 0

    @property
    def value_width(self) -> int:
        """Value width over all heads."""
        return 0

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides; none by default."""
        return {}


@record
class NoMixer(WithoutScores):
    """The absence of a mixer: a layer that has only its feed-forward branch, as in Nemotron-H.

    Examples:
        >>> feed_forward = jaxinfra.MlpConfig(hidden_dim=512, kind="relu_squared")
        >>> block = jaxinfra.BlockConfig(mixer=jaxinfra.NoMixer(), feed_forward=feed_forward)
    """

    @property
    def head_dim(self) -> int:
        """Width of a head: none."""
        return 0

    @property
    def cache(self) -> CacheSpec:
        """The cache: nothing."""
        return CacheSpec(arrays=())


@record
class RecurrentConfig(WithoutScores):
    """Base class of mixers that keep a state of fixed size per sequence."""

    @property
    def token_flops(self) -> float:
        """FLOPs per token of reading and writing the state; none by default."""
        return 0.0


@record
class MatrixStateConfig(RecurrentConfig):
    """Fields and properties of mixers whose state is a matrix per value head."""

    num_key_heads: int  # heads of queries and keys, which groups of value heads share
    num_value_heads: int  # heads of values and of the state; a multiple of num_key_heads
    key_dim: int  # width of a query and of a key
    value_dim: int  # width of a value
    conv_width: int = 4  # taps of the convolutions of queries, keys and values

    @property
    def num_q_heads(self) -> int:
        """Number of heads of the state."""
        return self.num_value_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys."""
        return self.num_key_heads

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.key_dim

    @property
    def score_width(self) -> int:
        """Query width over all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Value width over all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {name: getattr(self, name) for name in ("num_key_heads", "num_value_heads")}

    @property
    def cache(self) -> CacheSpec:
        """The state: a matrix per value head, and the inputs that the convolutions still read."""
        heads = {
            "query": (self.num_key_heads, self.key_dim),
            "key": (self.num_key_heads, self.key_dim),
            "value": (self.num_value_heads, self.value_dim),
        }
        tails = (_tail(name, self.conv_width, *shape) for name, shape in heads.items())
        matrix = StateArray(
            name="state",
            shape=(self.num_value_heads, self.key_dim, self.value_dim),
            dims=(axes.Q_HEADS, axes.HEAD, None),
        )
        return CacheSpec(arrays=(), state=(matrix, *tails))

    def __post_init__(self) -> None:
        require_positive(self, "num_key_heads", "key_dim", "value_dim", "conv_width")
        if self.num_value_heads < 1 or self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"num_value_heads={self.num_value_heads} is not a multiple of num_key_heads="
                f"{self.num_key_heads}; value heads share key heads in equal groups"
            )
        require_within(num_q_heads=self.num_value_heads)


@record
class GatedDeltaConfig(MatrixStateConfig):
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464), also with a decay per channel.

    Examples:
        >>> mixer = jaxinfra.GatedDeltaConfig(
        ...     num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128
        ... )  # Qwen3-Next's
        >>> mixer.cache.state[0].shape
        (32, 128, 128)
    """

    channel_decay: bool = False  # each channel of a key decays by itself: Kimi Linear's KDA
    rank: int | None = None  # width that decays and gates are computed from; None: from x directly
    gate: OutputGate = OutputGate.SILU  # activation of the gate behind the norm
    norm_epsilon: float = 1e-6  # of the norm of each head's output

    def __post_init__(self) -> None:
        MatrixStateConfig.__post_init__(self)
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"rank={self.rank} must be at least 1, or none")

    @property
    def token_flops(self) -> float:
        """FLOPs per token of reading the state at the key and the query, and of writing it."""
        return 6.0 * self.num_value_heads * self.key_dim * self.value_dim


@record
class StateSpaceConfig(MatrixStateConfig):
    """A state space model with a scalar decay per head (Mamba 2, arXiv 2405.21060).

    Its C, B and x are called queries, keys and values.

    Examples:
        >>> mixer = jaxinfra.StateSpaceConfig(
        ...     num_key_heads=1, num_value_heads=24, key_dim=128, value_dim=64, norm_heads=24
        ... )
    """

    conv_bias: bool = True  # a bias per channel of the convolutions
    bias: bool = False  # biases of the projections
    # Heads that are normalized together; their number divides num_value_heads. None: no norm.
    norm_heads: int | None
    norm_epsilon: float = 1e-5  # of that norm, which follows the gate
    norm_before_gate: bool = False  # normalize first, then multiply by the gate
    step_limit: tuple[float, float] | None = None  # bounds of a token's step
    # Multipliers of projections: of gates, values, keys, queries and steps. None: all 1.
    projection_scales: tuple[float, float, float, float, float] | None = None

    def __post_init__(self) -> None:
        MatrixStateConfig.__post_init__(self)
        if self.norm_heads is not None and (
            self.norm_heads < 1 or self.num_value_heads % self.norm_heads
        ):
            raise ConfigError(
                f"norm_heads={self.norm_heads} does not divide num_value_heads="
                f"{self.num_value_heads}; heads are normalized in equal groups, or not (none)"
            )
        if self.norm_before_gate and self.norm_heads is None:
            raise ConfigError("norm_before_gate=true with norm_heads=none: there is no norm")

    @property
    def token_flops(self) -> float:
        """FLOPs per token of reading the state at the query and of writing it."""
        return 4.0 * self.num_value_heads * self.key_dim * self.value_dim


@record
class SelectiveScanConfig(RecurrentConfig):
    """A state space model whose channels have states of their own (Mamba 1, arXiv 2312.00752).

    Its C and B, which all channels share, are called query and key.

    Examples:
        >>> mixer = jaxinfra.SelectiveScanConfig(num_channels=5120, state_dim=16, rank=160)
        >>> mixer.cache.state[0].shape
        (5120, 16, 1)
    """

    num_channels: int  # channels, which tensor parallelism divides
    state_dim: int  # numbers in the state of a channel
    rank: int  # width that a token's steps are computed from
    conv_width: int = 4  # taps of the channels' convolution
    conv_bias: bool = True  # a bias per channel of the convolution
    bias: bool = False  # biases of the projections from and to the stream
    # Of RMSNorms of queries, keys and what steps are computed from: Jamba. None: no such norms.
    norm_epsilon: float | None = None
    norm_scale: bool = True  # these norms have learned scales; Falcon-Mamba's have none

    def __post_init__(self) -> None:
        require_positive(self, "num_channels", "state_dim", "rank", "conv_width")
        require_within(hidden_dim=self.num_channels, head_dim=self.state_dim)

    @property
    def num_q_heads(self) -> int:
        """Number of channels."""
        return self.num_channels

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.state_dim

    @property
    def value_width(self) -> int:
        """Number of channels."""
        return self.num_channels

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {"num_channels": self.num_channels}

    @property
    def token_flops(self) -> float:
        """FLOPs per token of reading the state at the query and of writing it."""
        return 4.0 * self.num_channels * self.state_dim

    @property
    def cache(self) -> CacheSpec:
        """The state: numbers per channel, and the inputs that the convolution still reads."""
        state = StateArray(
            name="state",
            shape=(self.num_channels, self.state_dim, 1),
            dims=(axes.Q_HEADS, axes.HEAD, None),
        )
        return CacheSpec(
            arrays=(), state=(state, _tail("value", self.conv_width, self.num_channels, 1))
        )


@record
class ShortConvolutionConfig(RecurrentConfig):
    """A short causal convolution of each channel between two gates: LFM2.

    Examples:
        >>> mixer = jaxinfra.ShortConvolutionConfig(num_heads=32, head_dim=64, conv_width=3)
        >>> mixer.cache.state[0].shape
        (2, 32, 64)
    """

    num_heads: int  # groups of channels, which tensor parallelism divides
    head_dim: int  # channels of a group
    conv_width: int = 3  # taps of the convolution
    bias: bool = False  # biases of the projections and of the convolution

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "head_dim", "conv_width")
        require_within(num_q_heads=self.num_heads, head_dim=self.head_dim)

    @property
    def num_q_heads(self) -> int:
        """Number of groups of channels."""
        return self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of groups of channels."""
        return self.num_heads

    @property
    def score_width(self) -> int:
        """Width of a gate."""
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Number of channels."""
        return self.num_heads * self.head_dim

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {"num_heads": self.num_heads}

    @property
    def cache(self) -> CacheSpec:
        """The state: the inputs that the convolution still reads."""
        return CacheSpec(
            arrays=(), state=(_tail("value", self.conv_width, self.num_heads, self.head_dim),)
        )


def _tail(name: str, conv_width: int, num_heads: int, width: int) -> StateArray:
    """The inputs that a convolution of this width still reads."""
    return StateArray(
        name=name,
        shape=(conv_width - 1, num_heads, width),
        dims=(None, axes.Q_HEADS, axes.HEAD),
        is_sum=False,
    )
