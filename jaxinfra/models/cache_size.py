"""How much a model caches of each sequence, counted from its mixers' ``CacheSpec``."""

from jaxinfra.config.model import ModelConfig


def cached_elements(config: ModelConfig, num_tokens: int, *, evicted: bool) -> int:
    """Numbers that all layers cache of one sequence.

    Args:
        evicted: whether a layer with a window keeps what is in its window only.
    """
    total = 0
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        cache = block.mixer.cache
        kept = num_tokens if cache.window is None or not evicted else min(num_tokens, cache.window)
        total += repeats * cache.elements * kept
    return total
