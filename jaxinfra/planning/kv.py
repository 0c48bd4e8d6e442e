"""Sizes of KV caches.

bytes = 2 batch seq layers kv_heads head_dim dtype_size for heads; (rank + rotated width) in place
of 2 kv_heads head_dim for latent attention.
"""

import dataclasses

from jaxinfra.core.errors import ConfigError, nearest
from jaxinfra.planning.shapes import Heads, ModelShape

CACHE_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.0}
"""Bits of a cached element."""

_SCALE_BITS = 16  # one a group of a quantized cache
_GROUP = 128


def element_bits(cache_format: str, *, with_scales: bool = True) -> float:
    """Bits an element, the integer formats' scale and offset by groups of 128 included."""
    if cache_format not in CACHE_BITS:
        raise ConfigError(
            f"unknown cache format {cache_format!r}{nearest(cache_format, CACHE_BITS)}"
        )
    bits = CACHE_BITS[cache_format]
    if with_scales and cache_format.startswith("int"):
        bits += 2 * _SCALE_BITS / _GROUP  # scale and zero point
    return bits


def kv_bytes_per_token(shape: ModelShape, cache_format: str = "bf16") -> float:
    """Bytes that one more token of context takes, over all layers."""
    elements = sum(layer.count * layer.attention.kv_elements for layer in shape.layers)
    return elements * element_bits(cache_format) / 8


def kv_bytes(shape: ModelShape, *, batch: int, context: int, cache_format: str = "bf16") -> float:
    """Bytes of ``batch`` caches of ``context`` tokens; a windowed layer keeps its window only."""
    elements = sum(
        layer.count * layer.attention.kv_elements * min(context, layer.attention.window or context)
        for layer in shape.layers
    )
    return batch * elements * element_bits(cache_format) / 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KvRow:
    """One attention form of the comparison table."""

    form: str
    cache_format: str
    bytes_per_token: float
    over_mha: float  # how many times less than MHA in bf16


def kv_table(shape: ModelShape) -> list[KvRow]:
    """This model's cache, and what it would be with other numbers of heads and other formats."""
    heads = shape.layers[0].attention.num_q_heads
    layers = shape.num_layers
    width = shape.layers[0].attention.value_width // heads
    forms: dict[str, float] = {
        "MHA": layers * 2.0 * heads * width,
        "MQA": layers * 2.0 * width,
    }
    own = sum(layer.count * layer.attention.kv_elements for layer in shape.layers)
    attention = shape.layers[0].attention
    if isinstance(attention, Heads):
        grouped = f"GQA-{attention.num_kv_heads}"
        form = {1: "MQA", heads: "MHA"}.get(attention.num_kv_heads, grouped)
    else:
        form = "MLA"
    forms = {name: size for name, size in forms.items() if name != form}
    forms[f"{form} (this model)"] = own
    whole = layers * 2.0 * heads * width * 2
    return [
        KvRow(
            form=form,
            cache_format=name,
            bytes_per_token=elements * element_bits(name) / 8,
            over_mha=whole / (elements * element_bits(name) / 8),
        )
        for form, elements in forms.items()
        for name in ("bf16", "fp8", "int8", "int4")
    ]
