"""Paged attention for Hopper GPUs: a balanced plan, kernels that read pages, one that merges."""

from .append_heads import append_heads_hopper as append_heads_hopper
from .append_heads import unsupported_append as unsupported_append
from .chunk import is_chunk as is_chunk
from .chunk import ordered_attention as ordered_attention
from .forward import numbers_first as numbers_first
from .forward import paged_attention_hopper as paged_attention_hopper
from .forward import unsupported as unsupported
from .plan import plan_pages as plan_pages
