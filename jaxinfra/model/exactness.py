"""Models that have exact numerics: each layer's results depend on a token's own text alone."""

from collections.abc import Iterator

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, MlpConfig, ModelConfig
from jaxinfra.config.rope import LongRopeScaling
from jaxinfra.errors import ConfigError
from jaxinfra.model.execution import Execution


def check_exact(config: ModelConfig, execution: Execution) -> None:
    """Raises ConfigError if numerics are exact and a layer has no exact form."""
    if not execution.policy.is_exact:
        return
    reasons = [reason for block in config.blocks for reason in _reasons(block)]
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
            "attention with rotary, learned or no positions, windows, sinks and soft caps, and for "
            "dense feed-forward layers; set numerics=fast"
        )


def _reasons(block: BlockConfig) -> Iterator[str]:
    """Names the parts of a block that have no exact form."""
    mixer, feed = block.mixer, block.feed_forward
    if not isinstance(mixer, GroupedAttentionConfig):
        yield f"mixer {type(mixer).__name__}, whose sums follow the length of a chunk"
        return
    if feed is not None and not isinstance(feed, MlpConfig):
        yield f"feed_forward {type(feed).__name__}"
    if block.norm.function is not None:
        yield f"norm function={block.norm.function!r}, whose sums are your own"
    if mixer.function is not None:
        yield f"attention function={mixer.function!r}, whose sums are your own"
    if mixer.chunk is not None:
        yield f"attention chunk={mixer.chunk}, at whose edges blocks of keys would begin anew"
    if mixer.distance_slopes:
        yield "distance_slopes"
    if mixer.out_gate:
        yield "out_gate"
    if mixer.rope is not None and isinstance(mixer.rope.scaling, LongRopeScaling):
        yield "LongRoPE, whose angles depend on how long a text will be"
