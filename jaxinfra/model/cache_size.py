"""How much a model caches of each sequence, counted from its mixers' ``CacheSpec``."""

from jaxinfra.config.model import ModelConfig


def cached_elements(config: ModelConfig, num_tokens: int, *, evicted: bool) -> int:
    """Numbers that all layers cache of one sequence, scales not among them.

    Args:
        evicted: whether a layer with a window keeps what is in its window only.
    """
    return cached_numbers(config, num_tokens, evicted=evicted)[0]


def cached_numbers(config: ModelConfig, num_tokens: int, *, evicted: bool) -> tuple[int, int]:
    """The same, and the scales beside them in a format that has them."""
    elements = scales = 0
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        cache = block.mixer.cache
        kept = num_tokens if cache.window is None or not evicted else min(num_tokens, cache.window)
        elements += repeats * cache.elements * kept
        scales += repeats * cache.scales * kept
    return elements, scales
