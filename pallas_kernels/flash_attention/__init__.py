"""Exact attention in linear memory: reference, portable and Hopper implementations."""

from .api import LSE_NAME as LSE_NAME
from .api import OUT_NAME as OUT_NAME
from .api import flash_attention as flash_attention
from .spec import AttentionMasks as AttentionMasks
from .spec import AttentionSpec as AttentionSpec
