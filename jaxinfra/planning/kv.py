"""Bytes of KV caches, and what other forms of attention would take."""

from typing import Any

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.model import LatentAttentionConfig
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.model.cache_size import cached_numbers
from jaxinfra.planning.model import PlannedModel

CACHE_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}
"""Bits of a cached element."""

_SCALE_BITS = 16  # of a token and a head, in the formats that CacheFormat names


def element_bits(cache_format: str, *, width: float) -> float:
    """Bits of an element, its share of a scale included.

    Args:
        width: elements that share a scale: those of a head.
    """
    if cache_format not in CACHE_BITS:
        raise ConfigError(
            f"unknown cache format {cache_format!r}{nearest(cache_format, CACHE_BITS)}"
        )
    bits = CACHE_BITS[cache_format]
    has_scales = cache_format in tuple(CacheFormat)
    return bits + _SCALE_BITS / width if has_scales else bits


def kv_bytes_per_token(model: PlannedModel, cache_format: str = "bf16") -> float:
    """Bytes that one more token of context takes, over all layers."""
    return _bytes(*cached_numbers(model.config, 1, evicted=False), cache_format)


def kv_bytes(model: PlannedModel, *, batch: int, context: int, cache_format: str = "bf16") -> float:
    """Bytes of ``batch`` caches of ``context`` tokens; a windowed layer keeps its window only."""
    return batch * _bytes(*cached_numbers(model.config, context, evicted=True), cache_format)


def _bytes(elements: int, scales: int, cache_format: str) -> float:
    width = elements / scales if scales else 1.0
    return elements * element_bits(cache_format, width=width) / 8


def kv_table(model: PlannedModel) -> list[dict[str, Any]]:
    """This model's cache, and what it would be with other numbers of heads and other formats."""
    layers, mixer = model.config.num_layers, model.layers[0].mixer
    heads, kv_heads = mixer.num_q_heads, mixer.num_kv_heads
    one = layers * 2.0 * mixer.value_width / heads
    forms = {"MHA": heads * one, "MQA": one}
    form = {1: "MQA", heads: "MHA"}.get(kv_heads, f"GQA-{kv_heads}")
    if isinstance(mixer, LatentAttentionConfig):
        form = "MLA"
    forms = {name: size for name, size in forms.items() if name != form}
    elements, scales = cached_numbers(model.config, 1, evicted=False)
    forms[f"{form} (this model)"] = elements
    whole, width = heads * one * 2, elements / scales
    return [
        {
            "form": form,
            "cache_format": name,
            "bytes_per_token": elements * element_bits(name, width=width) / 8,
            # Times less than MHA in bf16.
            "over_mha": whole / (elements * element_bits(name, width=width) / 8),
        }
        for form, elements in forms.items()
        for name in ("bf16", "fp8", "int8", "int4")
    ]
