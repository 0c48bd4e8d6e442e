"""Exact attention in linear memory: reference, portable and Hopper implementations."""

from .api import flash_attention as flash_attention
from .api import flash_attention_gradient as flash_attention_gradient
from .implementations import LSE_NAME as LSE_NAME
from .implementations import OUT_NAME as OUT_NAME
from .spec import AttentionMasks as AttentionMasks
from .spec import AttentionSpec as AttentionSpec
from .spec import MeshAxes as MeshAxes
