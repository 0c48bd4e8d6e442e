"""Kernels for JAX on Hopper GPUs, with portable references. Imports nothing but JAX."""

from .common.errors import InputError as InputError
from .common.errors import UnsupportedError as UnsupportedError
from .common.merge import merge_partials as merge_partials
from .flash_attention import flash_attention as flash_attention
from .flash_attention import flash_attention_fp8 as flash_attention_fp8
from .flash_attention import flash_attention_gradient as flash_attention_gradient
from .flash_attention import quantize_fp8 as quantize_fp8
from .grouped_matmul import combine as combine
from .grouped_matmul import grouped_matmul as grouped_matmul
from .grouped_matmul import grouped_swiglu as grouped_swiglu
from .norm import layer_norm as layer_norm
from .norm import layer_norm_fp8 as layer_norm_fp8
from .norm import rms_norm as rms_norm
from .norm import rms_norm_fp8 as rms_norm_fp8
from .paged_attention import append_to_pages as append_to_pages
from .paged_attention import paged_attention as paged_attention
from .quantize import quantize as quantize
from .quantize import quantize_both_ways as quantize_both_ways
from .scaled_matmul import scaled_matmul as scaled_matmul
from .skinny_matmul import skinny_matmul as skinny_matmul
from .softmax import log_softmax as log_softmax
from .softmax import softmax as softmax
