"""Attention over a paged KV cache, and writing new keys and values to the cache.

A decode step reads every cached key and value once and multiplies it with a few queries, so memory
bandwidth is the limit. On an H200 large caches are read at 93 to 102% of a plain copy's rate, one
row of 32,768 tokens at 77% (``experiments/results/paged-attention-h200.json``).

- The key tiles of all rows are laid end to end and cut into equal pieces, one per team of workers
  (``hopper/plan.py``). New lengths need no compilation.
- ``hopper/attend.py`` reads pages, ``hopper/attend_codes.py`` quantized pages. Both write a partial
  result and its logsumexp for each piece of a row; ``hopper/merge.py`` merges these. For a row that
  one worker reads alone, the worker writes the final result, which saves the partial one: writing a
  byte costs more than reading it.
- Chunks of a prompt take the forward kernel of training, with copies that look up page tables
  (``hopper/chunk.py``): 624 TFLOP/s for 1,024 tokens after 2,048 cached ones, where the decode
  kernel reaches 196.
- Empty slots may hold NaN: values beyond a row's keys are zeroed in shared memory.
"""

from .api import PagedImplementation as PagedImplementation
from .api import attends_chunk as attends_chunk
from .api import paged_attention as paged_attention
from .append import append_heads as append_heads
from .append import append_to_pages as append_to_pages
from .codes import codes_of as codes_of
from .codes import numbers_of as numbers_of
