"""Kernels for JAX on Hopper GPUs, with portable references. Imports nothing but JAX.

Each name is imported at its first use, so that ``import pallas_kernels`` costs nothing.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collective_matmul import all_gather_matmul as all_gather_matmul
    from .collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
    from .common.errors import InputError as InputError
    from .common.errors import UnsupportedError as UnsupportedError
    from .common.merge import merge_partials as merge_partials
    from .decode_layer import decode_layers as decode_layers
    from .few_rows_matmul import few_rows_matmul as few_rows_matmul
    from .few_rows_matmul import quantized_matmul as quantized_matmul
    from .flash_attention import flash_attention as flash_attention
    from .flash_attention import flash_attention_gradient as flash_attention_gradient
    from .fp8 import quantize as quantize
    from .fp8 import quantize_both_ways as quantize_both_ways
    from .fp8 import quantize_swiglu as quantize_swiglu
    from .fp8 import quantize_swiglu_gradient as quantize_swiglu_gradient
    from .fp8 import scaled_matmul as scaled_matmul
    from .grouped_matmul import combine as combine
    from .grouped_matmul import grouped_matmul as grouped_matmul
    from .grouped_matmul import grouped_swiglu as grouped_swiglu
    from .grouped_matmul import grouped_weight_gradient as grouped_weight_gradient
    from .grouped_matmul import scaled_grouped_matmul as scaled_grouped_matmul
    from .linear_attention import linear_attention as linear_attention
    from .linear_attention import linear_attention_in_slots as linear_attention_in_slots
    from .linear_attention import short_convolution as short_convolution
    from .linear_attention import short_convolutions_in_slots as short_convolutions_in_slots
    from .norm import layer_norm as layer_norm
    from .norm import rms_norm as rms_norm
    from .ordered_matmul import ordered_matmul as ordered_matmul
    from .paged_attention import append_heads as append_heads
    from .paged_attention import append_to_pages as append_to_pages
    from .paged_attention import paged_attention as paged_attention
    from .quantized_weight import QuantizedWeight as QuantizedWeight
    from .row_sums import open_mailbox as open_mailbox
    from .row_sums import sum_rows as sum_rows
    from .softmax import log_softmax as log_softmax
    from .softmax import logsumexp as logsumexp
    from .softmax import softmax as softmax

__version__ = "0.1.0"

_PUBLIC = {
    "collective_matmul": ("all_gather_matmul", "matmul_reduce_scatter"),
    "common.errors": ("InputError", "UnsupportedError"),
    "common.merge": ("merge_partials",),
    "decode_layer": ("decode_layers",),
    "few_rows_matmul": ("few_rows_matmul", "quantized_matmul"),
    "flash_attention": ("flash_attention", "flash_attention_gradient"),
    "fp8": (
        "quantize",
        "quantize_both_ways",
        "quantize_swiglu",
        "quantize_swiglu_gradient",
        "scaled_matmul",
    ),
    "grouped_matmul": (
        "combine",
        "grouped_matmul",
        "grouped_swiglu",
        "grouped_weight_gradient",
        "scaled_grouped_matmul",
    ),
    "linear_attention": (
        "linear_attention",
        "linear_attention_in_slots",
        "short_convolution",
        "short_convolutions_in_slots",
    ),
    "norm": ("layer_norm", "rms_norm"),
    "ordered_matmul": ("ordered_matmul",),
    "paged_attention": ("append_heads", "append_to_pages", "paged_attention"),
    "quantized_weight": ("QuantizedWeight",),
    "row_sums": ("open_mailbox", "sum_rows"),
    "softmax": ("log_softmax", "logsumexp", "softmax"),
}
"""Names of functions by the module that has them."""

__all__ = [name for names in _PUBLIC.values() for name in names]  # pyrefly: ignore


def _lazily(module: str, name: str) -> property:
    def read(_: types.ModuleType) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)

    # The import system sets a package's attribute to each submodule that it has loaded; where a
    # function has its submodule's name, the function stays.
    return property(read, lambda *_: None)


class _Package(types.ModuleType):
    """This package, whose functions are imported when they are read."""

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for names in _PUBLIC.values() for name in names)})


for _module, _names in _PUBLIC.items():
    for _name in _names:
        setattr(_Package, _name, _lazily(_module, _name))
sys.modules[__name__].__class__ = _Package
