"""The shape of a decoder-only model: sizes and kinds of every layer."""

import dataclasses
from collections.abc import Callable

from jaxinfra import axes
from jaxinfra.config.cache import CachedArray, CacheSpec
from jaxinfra.config.kinds import Branches, Head, MlpKind, NormPlacement, QkNormOver
from jaxinfra.config.latent import LatentAttentionConfig as LatentAttentionConfig
from jaxinfra.config.limits import check_cap, check_window, require_positive, require_within
from jaxinfra.config.norm import NormConfig as NormConfig
from jaxinfra.config.own import OwnFeedForward, OwnMixer
from jaxinfra.config.record import record
from jaxinfra.config.recurrent import (
    GatedDeltaConfig,
    NoMixer,
    SelectiveScanConfig,
    ShortConvolutionConfig,
    StateSpaceConfig,
)
from jaxinfra.config.rope import QueryScaling, RopeConfig, check_rope
from jaxinfra.config.routing import BalanceConfig, RoutingConfig, check_choice
from jaxinfra.config.shared_keys import check_shared
from jaxinfra.config.streams import StreamsConfig
from jaxinfra.errors import ConfigError, UnsupportedError


@record
class GroupedAttentionConfig:
    """Self-attention: MHA (kv heads = query heads), GQA (fewer kv heads) or MQA (one kv head).

    Examples:
        >>> rope = jaxinfra.RopeConfig(theta=500_000)
        >>> jaxinfra.GroupedAttentionConfig(num_q_heads=32, num_kv_heads=8, head_dim=64, rope=rope)
        GroupedAttentionConfig(num_q_heads=32, num_kv_heads=8, head_dim=64, ...)
    """

    num_q_heads: int  # query heads
    num_kv_heads: int  # key/value heads; divides num_q_heads
    head_dim: int  # width of a head
    rope: RopeConfig | None  # rotary positions; None: none
    window: int | None = None  # a query sees itself and the window-1 tokens before it
    logit_soft_cap: float | None = None  # cap * tanh(score / cap): Gemma-2
    scale: float | None = None  # multiplies scores; None: head_dim^-0.5
    qk_norm: NormConfig | None = None  # norm of queries and keys: Qwen3
    qk_norm_over: QkNormOver = QkNormOver.HEAD  # elements that the norm takes together
    qk_norm_after_rope: bool = False  # normalize after the rotation: Hunyuan, Llama 4
    value_norm: NormConfig | None = None  # norm of each head's values: Gemma 4
    values_are_keys: bool = False  # values are projected by the keys' weight: Gemma 4
    qkv_bias: bool = False  # biases of queries, keys, values
    out_bias: bool = False  # bias of the output projection
    sinks: bool = False  # a learned score per head, in the softmax but without a value: gpt-oss
    qkv_clip: float | None = None  # queries, keys and values are clipped to +- this: OLMo, MPT
    out_gate: bool = False  # heads' results are multiplied by sigmoid(projection of x): Qwen3-Next
    query_scaling: QueryScaling | None = None  # of queries by position: Llama 4, Ministral 3
    chunk: int | None = None  # a query sees only keys of its own chunk of positions: Llama 4
    # A number per head that multiplies the distance to a key, subtracted from scores (ALiBi,
    # Press et al. 2022): BLOOM, MPT.
    distance_slopes: tuple[float, ...] | None = None
    # Later layers attend to this layer's keys and values, which they name: Gemma 3n, Gemma 4.
    gives_keys: str | None = None  # name of this layer's
    takes_keys: str | None = None  # name of an earlier layer's; this layer has none of its own
    # Your own attention by name (jaxinfra.part): (q, k, v, *, mask, distance) -> out.
    function: str | None = None

    def __post_init__(self) -> None:
        q, k = self.num_q_heads, self.num_kv_heads
        if q < 1 or k < 1 or q % k:
            raise ConfigError(
                f"num_q_heads={q} is not a multiple of num_kv_heads={k}; "
                "query heads share key/value heads in equal groups"
            )
        if self.head_dim < 1:
            raise ConfigError(f"head_dim={self.head_dim} must be positive")
        require_within(num_q_heads=q, head_dim=self.head_dim)
        if self.rope is not None:
            check_rope(self.rope, head_dim=self.head_dim)
        check_window(self.window)
        check_cap(self.logit_soft_cap)
        self._check_extras()

    def _check_extras(self) -> None:
        own = (self.sinks, self.logit_soft_cap, self.scale, self.chunk, self.distance_slopes)
        if self.function is not None and any(own):
            raise ConfigError(
                f"function={self.function!r} computes the attention: sinks, logit_soft_cap, scale, "
                "chunk and distance_slopes are its own affair; leave them out"
            )
        if self.qkv_clip is not None and self.qkv_clip <= 0.0:
            raise ConfigError(f"qkv_clip={self.qkv_clip} must be positive, or none")
        if self.chunk is not None and (self.chunk < 1 or self.window is not None):
            raise ConfigError(
                f"chunk={self.chunk} with window={self.window}: a chunk has at least 1 position, "
                "and a layer has one of the two"
            )
        slopes = self.distance_slopes
        if slopes is not None and len(slopes) != self.num_q_heads:
            raise ConfigError(
                f"distance_slopes has {len(slopes)} numbers for num_q_heads={self.num_q_heads}"
            )

    @property
    def rotated_dim(self) -> int:
        """Width of the part of a head that is rotated (RoPE)."""
        return self.head_dim

    @property
    def score_width(self) -> int:
        """Query width over all heads in q k^T."""
        return self.num_q_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Value width over all query heads in p v."""
        return self.num_q_heads * self.head_dim

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {"num_q_heads": self.num_q_heads, "num_kv_heads": self.num_kv_heads}

    @property
    def cache(self) -> CacheSpec:
        """The cache: a key and a value of every key/value head; nothing with ``takes_keys``."""
        if self.takes_keys is not None:
            return CacheSpec(arrays=(), window=self.window)
        shape = (self.num_kv_heads, self.head_dim)
        dims = (axes.KV_HEADS, axes.HEAD)
        return CacheSpec(
            arrays=tuple(CachedArray(name=name, shape=shape, dims=dims) for name in ("k", "v")),
            window=self.window,
        )


@record
class AttentionBesideStateConfig:
    """Attention and a state space that read the same input, and whose outputs are added: Falcon-H1.

    Examples:
        >>> attention = jaxinfra.preset("tiny").model.blocks[0].mixer
        >>> sizes = dict(num_key_heads=1, num_value_heads=8, key_dim=16, value_dim=8)
        >>> space = jaxinfra.StateSpaceConfig(**sizes, norm_heads=None)
        >>> mixer = jaxinfra.AttentionBesideStateConfig(attention=attention, state_space=space)
    """

    attention: GroupedAttentionConfig  # of all tokens
    state_space: StateSpaceConfig  # beside it
    attention_in_scale: float = 1.0  # multiplies the input of attention
    attention_out_scale: float = 1.0  # multiplies its output
    state_in_scale: float = 1.0  # multiplies the input of the state space
    state_out_scale: float = 1.0  # multiplies its output

    @property
    def rope(self) -> RopeConfig | None:
        """Rotary embedding of the attention."""
        return self.attention.rope

    @property
    def rotated_dim(self) -> int:
        """Width of the part of a head that is rotated (RoPE)."""
        return self.attention.rotated_dim

    @property
    def window(self) -> int | None:
        """Window of the attention."""
        return self.attention.window

    @property
    def scale(self) -> float | None:
        """Multiplier of the attention's scores."""
        return self.attention.scale

    @property
    def logit_soft_cap(self) -> float | None:
        """Soft cap of the attention's scores."""
        return self.attention.logit_soft_cap

    @property
    def num_q_heads(self) -> int:
        """Number of query heads of the attention."""
        return self.attention.num_q_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads of the attention."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head of the attention."""
        return self.attention.head_dim

    @property
    def score_width(self) -> int:
        """Query width over all heads of the attention."""
        return self.attention.score_width

    @property
    def value_width(self) -> int:
        """Value width over all query heads of the attention."""
        return self.attention.value_width

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return self.attention.tensor_sizes | self.state_space.tensor_sizes

    @property
    def cache(self) -> CacheSpec:
        """The cache: the attention's entries per token, and the state."""
        return dataclasses.replace(self.attention.cache, state=self.state_space.cache.state)


type MixerConfig = (
    GroupedAttentionConfig
    | LatentAttentionConfig
    | AttentionBesideStateConfig
    | GatedDeltaConfig
    | StateSpaceConfig
    | SelectiveScanConfig
    | ShortConvolutionConfig
    | NoMixer
    | OwnMixer
)
"""Config of a layer that mixes the positions of a sequence."""


@record
class MlpConfig:
    """A dense feed-forward layer.

    Examples:
        >>> layer = jaxinfra.MlpConfig(hidden_dim=8192, kind="geglu")
    """

    hidden_dim: int  # width of the hidden layer
    kind: MlpKind = MlpKind.SWIGLU  # activation, gated or not
    bias: bool = False  # a bias on each projection
    gate_scale: float = 1.0  # multiplies the gate before its activation: Falcon-H1
    # Share of gates that become 0, as if normally distributed; others count from there: Gemma 3n.
    sparsity: float = 0.0
    out_scale: float = 1.0  # multiplies the output: Falcon-H1

    def __post_init__(self) -> None:
        if self.gate_scale != 1.0 and not self.kind.gated:
            raise ConfigError(f"gate_scale={self.gate_scale} with kind={self.kind}, without a gate")
        if not 0.0 <= self.sparsity < 1.0 or (self.sparsity and not self.kind.gated):
            raise ConfigError(
                f"sparsity={self.sparsity} of kind={self.kind}: it is below 1, and of a gate"
            )
        if self.hidden_dim < 1:
            raise ConfigError(f"mlp hidden_dim={self.hidden_dim} must be at least 1")
        require_within(hidden_dim=self.hidden_dim)

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {"mlp.hidden_dim": self.hidden_dim}


@record
class ExpertsConfig:
    """Routed experts, and shared experts that every token passes (DeepSeekMoE, arXiv 2401.06066).

    Examples:
        >>> layer = jaxinfra.ExpertsConfig(num_experts=8, top_k=2, hidden_dim=14336)  # Mixtral's
    """

    num_experts: int  # routed experts of a layer
    top_k: int  # routed experts of a token
    hidden_dim: int  # width of one expert's hidden layer
    kind: MlpKind = MlpKind.SWIGLU  # activation of an expert
    bias: bool = False  # biases on each expert's projections
    routing: RoutingConfig = RoutingConfig()  # how experts are chosen
    balance: BalanceConfig = BalanceConfig()  # losses and biases that balance experts' loads
    shared_hidden_dim: int = 0  # hidden width of all shared experts together; 0: none
    # Width that routed experts read and write, projected from and to the model's: Nemotron 3.
    latent_dim: int | None = None  # None: the model's own width
    shared_gate: bool = False  # Qwen2-MoE scales the shared expert by a learned gate
    # Norms before and after routed and shared experts apart, and of the router's input: Gemma 4.
    norms: NormConfig | None = None  # None: the block's norm is that of all

    def __post_init__(self) -> None:
        if self.hidden_dim < 1 or self.shared_hidden_dim < 0:
            raise ConfigError(
                f"experts of hidden_dim={self.hidden_dim} and shared_hidden_dim="
                f"{self.shared_hidden_dim}: the first must be at least 1, the second at least 0"
            )
        if self.latent_dim is not None and self.latent_dim < 1:
            raise ConfigError(f"latent_dim={self.latent_dim} must be at least 1, or none")
        if self.kind is MlpKind.XIELU:
            raise ConfigError(
                "kind=xielu has learned numbers, which experts do not; choose another"
            )
        if self.norms is not None and not self.shared_hidden_dim:
            raise ConfigError("norms of experts apart, without shared ones; set shared_hidden_dim")
        if self.shared_gate and not self.shared_hidden_dim:
            raise ConfigError("shared_gate scales a shared expert; set shared_hidden_dim")
        check_choice(self.routing, num_experts=self.num_experts, top_k=self.top_k)

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        shared = {"experts.shared_hidden_dim": self.shared_hidden_dim}
        return {"experts.hidden_dim": self.hidden_dim} | (shared if self.shared_hidden_dim else {})


type FeedForwardConfig = MlpConfig | ExpertsConfig | OwnFeedForward
"""Config of a layer that transforms each position by itself."""


@record
class BlockConfig:
    """One transformer block: a mixer and a feed-forward layer, each on a residual branch.

    Examples:
        >>> mixer = jaxinfra.GroupedAttentionConfig(
        ...     num_q_heads=4, num_kv_heads=2, head_dim=32, rope=None
        ... )
        >>> feed_forward = jaxinfra.MlpConfig(hidden_dim=512)
        >>> block = jaxinfra.BlockConfig(mixer=mixer, feed_forward=feed_forward)
    """

    mixer: MixerConfig  # mixes the positions of a sequence; NoMixer: only the feed-forward layer
    feed_forward: FeedForwardConfig | None  # acts on each position alone; None: only the mixer
    norm: NormConfig = NormConfig()  # norm of both layers
    norm_placement: NormPlacement = NormPlacement.PRE  # before each layer, after it, or both
    branches: Branches = Branches.SEQUENTIAL  # what the feed-forward layer reads
    residual_scale: float = 1.0  # multiplies what each layer adds to the stream: Granite
    stream_scale: bool = False  # a learned number multiplies the stream after the block: Gemma 4
    layer_input_dim: int = 0  # width of an input that this layer alone has: Gemma 3n, Gemma 4
    streams: StreamsConfig | None = None  # several residual streams: Gemma 3n; None: one

    def __post_init__(self) -> None:
        is_parallel = self.branches is not Branches.SEQUENTIAL
        if self.num_layers == 0:
            raise ConfigError("a block without mixer and feed-forward layer: give one of them")
        if is_parallel and (self.norm_placement is not NormPlacement.PRE or self.num_layers < 2):
            raise ConfigError(
                f"branches={self.branches} with norm_placement={self.norm_placement} and "
                f"{self.num_layers} of mixer and feed_forward: layers side by side are two, and "
                "normalized before (norm_placement=pre)"
            )
        if self.residual_scale <= 0.0:
            raise ConfigError(f"residual_scale={self.residual_scale} must be positive")

    @property
    def num_layers(self) -> int:
        """Number of layers on residual branches: 1 where mixer or feed-forward layer is missing."""
        return (not isinstance(self.mixer, NoMixer)) + (self.feed_forward is not None)

    @property
    def num_norms(self) -> int:
        """Number of norms of the residual stream or of what is added to it."""
        if self.branches is Branches.SHARED_NORM:
            return 1
        per_layer = 2 if self.norm_placement is NormPlacement.SANDWICH else 1
        return per_layer * self.num_layers


@record
class Stack:
    """A pattern of blocks, repeated; the model runs the repetitions in a ``scan``.

    A uniform stack has a pattern of one block, Gemma-2's alternating windows a pattern of two.

    Examples:
        >>> block = jaxinfra.preset("tiny").model.blocks[0]
        >>> stack = jaxinfra.Stack(pattern=(block,), repeats=4)
    """

    pattern: tuple[BlockConfig, ...]  # blocks that follow one another
    repeats: int  # how often the pattern is repeated

    def __post_init__(self) -> None:
        if not self.pattern or self.repeats < 1:
            raise ConfigError(
                f"a stack of {self.repeats} repetitions of {len(self.pattern)} blocks: both must "
                "be at least 1"
            )


def stacked(*pattern: BlockConfig, num_layers: int) -> tuple[Stack, ...]:
    """Makes one stack, whose layer i is built from ``pattern[i % len(pattern)]``."""
    if not pattern or num_layers < 1 or num_layers % len(pattern):
        raise ConfigError(
            f"num_layers={num_layers} is not a multiple of the block pattern's length "
            f"{len(pattern)}; layers are scanned in whole repetitions of the pattern"
        )
    return (Stack(pattern=pattern, repeats=num_layers // len(pattern)),)


@record
class ModelConfig:
    """A decoder-only language model: stacks of layers, one after the other.

    Three dense layers and then 58 with experts are two stacks, each scanned by itself.

    Examples:
        >>> stacks = jaxinfra.preset("tiny").model.stacks
        >>> model = jaxinfra.ModelConfig(
        ...     vocab_size=512, model_dim=192, max_positions=64, stacks=stacks, tie_embeddings=True
        ... )
    """

    vocab_size: int  # rows of the token embedding table
    model_dim: int  # width of the residual stream
    max_positions: int  # longest sequence, in tokens
    stacks: tuple[Stack, ...]  # the layers
    tie_embeddings: bool  # the output projection is the token embedding table
    learned_positions: bool = False  # a learned position embedding table: GPT-2
    position_offset: int = 0  # rows of that table before position 0's: OPT has 2
    embedding_scale: float = 1.0  # multiplies token embeddings; Gemma: sqrt(model_dim)
    embedding_norm: NormConfig | None = None  # norm of the embeddings: BLOOM
    layer_input_rows: int = 0  # rows of the table of layers' inputs; ids beyond read row 0
    final_norm: NormConfig = NormConfig()  # before the logits
    head: Head = Head.LOGITS  # what the model computes after each token: logits, or a score
    logit_scale: float = 1.0  # multiplies the final norm's output, and so logits: Cohere, Granite
    logit_bias: bool = False  # a learned number beside each token's logit: Phi, GPT-J
    logit_soft_cap: float | None = None  # cap * tanh(logit / cap): Gemma-2
    dropout_rate: float = 0.0  # on embeddings and residual branches, in training only
    # Weights are sampled from N(0, init_std); projections back into the residual stream from
    # N(0, init_std / sqrt(2 num_layers)), so that its variance does not grow with depth (GPT-2).
    init_std: float = 0.02
    # A module after the layers, of a block like the last that attends, predicts the token after the
    # next one (multi-token prediction, DeepSeek-V3, section 2.2): an engine drafts with it.
    mtp: bool = False
    mtp_weight: float = 0.3  # of that prediction's loss in training

    def __post_init__(self) -> None:
        if not self.stacks:
            raise ConfigError("a model needs at least one stack of layers")
        require_positive(self, "vocab_size", "model_dim", "max_positions")
        require_within(
            vocab_size=self.vocab_size,
            model_dim=self.model_dim,
            max_positions=self.max_positions,
            num_layers=self.num_layers,
        )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ConfigError(f"dropout_rate={self.dropout_rate} must be in [0, 1)")
        if self.init_std <= 0.0:
            raise ConfigError(f"init_std={self.init_std} must be positive: zeros never learn")
        check_cap(self.logit_soft_cap)
        if self.logit_scale <= 0.0:
            raise ConfigError(f"logit_scale={self.logit_scale} must be positive")
        if self.mtp_weight < 0.0 or (self.mtp and self.head is Head.SCORE):
            raise ConfigError(f"mtp_weight={self.mtp_weight} below 0, or mtp with head=score")
        check_shared(self)
        if self.position_offset < 0 or (self.position_offset and not self.learned_positions):
            raise ConfigError(
                f"position_offset={self.position_offset}: rows of a learned table before the first "
                "position's; it needs learned_positions=true and is not negative"
            )

    def require_logits(self) -> None:
        """Raises UnsupportedError for a reward model, which has scores and no logits."""
        if self.head is Head.SCORE:
            raise UnsupportedError(
                "a reward model (head=score) scores texts and has no next token; its scores are "
                "jaxinfra.load_model(DIR)(ids)[..., 0], and `jaxinfra evaluate RUN` compares pairs"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers in all stacks."""
        return sum(len(stack.pattern) * stack.repeats for stack in self.stacks)

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """Distinct blocks: the patterns of all stacks, one after another. Block i is ``blocks/i``
        in parameter paths.
        """
        return tuple(block for stack in self.stacks for block in stack.pattern)

    @property
    def mtp_part(self) -> "ModelConfig":
        """A model of the one layer that the multi-token prediction module has.

        Raises:
            ConfigError: no layer of this model attends and keeps no state.
        """
        for block in reversed(self.blocks):
            if not isinstance(block.mixer, NoMixer) and not block.mixer.cache.state:
                stack = Stack(pattern=(block,), repeats=1)
                return dataclasses.replace(self, stacks=(stack,), mtp=False)
        raise ConfigError("mtp=true: no layer of this model attends, and the module's is like it")

    @property
    def repeats(self) -> tuple[int, ...]:
        """Number of layers built from each entry of ``blocks``."""
        return tuple(stack.repeats for stack in self.stacks for _ in stack.pattern)

    def with_layers(self, num_layers: int) -> "ModelConfig":
        """Returns the model with another number of layers; raises ConfigError if it has several
        stacks.
        """
        if len(self.stacks) > 1:
            raise ConfigError(
                f"num_layers={num_layers} for a model of {len(self.stacks)} stacks; set each one's "
                "repeats"
            )
        return dataclasses.replace(
            self, stacks=stacked(*self.stacks[0].pattern, num_layers=num_layers)
        )

    def with_blocks(self, change: Callable[[BlockConfig], BlockConfig]) -> "ModelConfig":
        """Returns the model with each of its blocks changed by a function."""
        changed = (tuple(map(change, each.pattern)) for each in self.stacks)
        stacks = zip(self.stacks, changed, strict=True)
        new = tuple(dataclasses.replace(each, pattern=pattern) for each, pattern in stacks)
        return dataclasses.replace(self, stacks=new)

    @property
    def layer_positions(self) -> tuple[tuple[int, int], ...]:
        """Each layer's index in ``blocks`` and its repetition of that block, in order."""
        places, first = [], 0
        for stack in self.stacks:
            pattern = range(first, first + len(stack.pattern))
            places += [(i, repeat) for repeat in range(stack.repeats) for i in pattern]
            first = pattern.stop
        return tuple(places)

    @property
    def layers(self) -> tuple[BlockConfig, ...]:
        """The block of every layer, in the order that they run in."""
        return tuple(self.blocks[i] for i, _ in self.layer_positions)
