"""Models that have exact numerics: each layer's results depend on a token's own text alone."""

from collections.abc import Iterator

from jaxinfra import axes
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.kinds import Head, MlpKind, NormKind, QkNormOver
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
)
from jaxinfra.config.rope import DynamicScaling, LongRopeScaling
from jaxinfra.config.routing import Scoring
from jaxinfra.errors import ConfigError
from jaxinfra.model.execution import Execution
from jaxinfra.ops.exact_product import are_kernels


def check_exact(config: ModelConfig, execution: Execution) -> None:
    """Raises ConfigError if numerics are exact and a layer has no exact form."""
    if not execution.policy.is_exact:
        return
    reasons = [reason for block in config.blocks for reason in _reasons(block)]
    if are_kernels():
        reasons += [f"{each} on a GPU" for each in _not_compared(config)]
    tensor = execution.place.shards(axes.Q_HEADS)
    if tensor > 1:
        reasons += [f"{each} over tensor={tensor}" for each in _split(config)]
    if execution.cache_format is not CacheFormat.PLAIN:
        reasons.append(
            f"cache={execution.cache_format.value}, whose keys are rounded where they are read "
            "back only"
        )
    if config.final_norm.function is not None:
        reasons.append(f"norm function={config.final_norm.function!r}, whose sums are your own")
    if reasons:
        raise ConfigError(
            f"numerics=exact with {'; '.join(dict.fromkeys(reasons))}: it is proven for grouped "
            "and latent attention with rotary, learned or no positions, windows, sinks and soft "
            "caps, and for dense layers and experts; set numerics=fast"
        )


def _reasons(block: BlockConfig) -> Iterator[str]:
    """Names the parts of a block that have no exact form."""
    mixer, feed = block.mixer, block.feed_forward
    if not isinstance(mixer, GroupedAttentionConfig | LatentAttentionConfig):
        yield f"mixer {type(mixer).__name__}, whose sums follow the length of a chunk"
        return
    if isinstance(feed, ExpertsConfig):
        yield from _reasons_of_experts(feed)
    elif feed is not None and not isinstance(feed, MlpConfig):
        yield f"feed_forward {type(feed).__name__}, whose sums are your own"
    if block.norm.function is not None:
        yield f"norm function={block.norm.function!r}, whose sums are your own"
    scaling = None if mixer.rope is None else mixer.rope.scaling
    if isinstance(scaling, LongRopeScaling | DynamicScaling):
        yield f"{type(scaling).__name__}, whose angles depend on how long a text will be"
    if block.stream_scale:
        yield "stream_scale"
    if isinstance(mixer, LatentAttentionConfig):
        if mixer.indexer is not None:
            yield "indexer, whose scores of keys are summed in any order"
        return
    if mixer.function is not None:
        yield f"attention function={mixer.function!r}, whose sums are your own"
    if mixer.chunk is not None:
        yield f"attention chunk={mixer.chunk}, at whose edges blocks of keys would begin anew"
    if mixer.distance_slopes:
        yield "distance_slopes"
    if mixer.out_gate:
        yield "out_gate"
    if mixer.value_norm is not None:
        yield "value_norm"


def _not_compared(config: ModelConfig) -> Iterator[str]:
    """Names the parts of a model whose bits were not compared on a GPU."""
    norms = [config.final_norm, *filter(None, [config.embedding_norm])]
    for block in config.blocks:
        mixer, feed = block.mixer, block.feed_forward
        norms.append(block.norm)
        if isinstance(mixer, LatentAttentionConfig):
            yield "latent attention"
        elif isinstance(mixer, GroupedAttentionConfig) and mixer.qk_norm is not None:
            norms.append(mixer.qk_norm)
            if mixer.qk_norm_over is not QkNormOver.HEAD:
                yield f"qk_norm_over={mixer.qk_norm_over.value}"
        if isinstance(feed, MlpConfig) and feed.kind is not MlpKind.SWIGLU:
            yield f"layers of kind={feed.kind.value}"
    for norm in norms:
        if norm.kind is not NormKind.RMS or norm.bias or not norm.scale:
            yield "norms other than RMSNorm with a scale and no bias"


def _split(config: ModelConfig) -> Iterator[str]:
    """Names the parts of a model whose sums a tensor axis would put into another order."""
    for block in config.blocks:
        mixer = block.mixer
        if isinstance(block.feed_forward, ExpertsConfig):
            yield "experts"
        if (
            isinstance(mixer, GroupedAttentionConfig)
            and mixer.qk_norm is not None
            and mixer.qk_norm_over is QkNormOver.ALL_HEADS
        ):
            yield "qk_norm_over=all_heads"
    if config.head is Head.SCORE:
        yield "head=score"


def _reasons_of_experts(config: ExpertsConfig) -> Iterator[str]:
    """Names the settings of experts that have no exact form."""
    if config.balance.capacity_factor is not None:
        yield (
            f"capacity_factor={config.balance.capacity_factor}, by which other tokens decide about "
            "a token's experts"
        )
    if config.bias:
        yield "biases of experts"
    if config.kind is not MlpKind.SWIGLU:
        yield f"experts of kind={config.kind.value}"
    if config.routing.scoring is Scoring.SPARSE_MIXER:
        yield "scoring=sparse_mixer"
