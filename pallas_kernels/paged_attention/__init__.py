"""Attention over a cache in pages, and appending to it."""

from .api import PagedImplementation as PagedImplementation
from .api import attends_chunk as attends_chunk
from .api import paged_attention as paged_attention
from .append import append_heads as append_heads
from .append import append_to_pages as append_to_pages
from .codes import codes_of as codes_of
from .codes import numbers_of as numbers_of
