"""Kernels for JAX on Hopper GPUs, with portable references. Imports nothing but JAX."""

from .common.errors import InputError as InputError
from .common.errors import UnsupportedError as UnsupportedError
from .common.merge import merge_partials as merge_partials
from .flash_attention import flash_attention as flash_attention
from .flash_attention import flash_attention_fp8 as flash_attention_fp8
from .flash_attention import flash_attention_gradient as flash_attention_gradient
from .flash_attention import quantize_fp8 as quantize_fp8
from .norm import layer_norm as layer_norm
from .norm import layer_norm_fp8 as layer_norm_fp8
from .norm import rms_norm as rms_norm
from .norm import rms_norm_fp8 as rms_norm_fp8
from .softmax import log_softmax as log_softmax
from .softmax import softmax as softmax
