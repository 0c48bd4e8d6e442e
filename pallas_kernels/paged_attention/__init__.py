"""Attention over a paged cache of keys and values, and writing new ones to it.

A decode step reads every cached key and value once and multiplies it with a few queries, so the
rate of memory is all there is to reach: on an H200 large caches are read at 93 to 102% of a plain
copy's rate, one row of 32,768 tokens at 77% (``experiments/results/paged-attention-h200.json``).

- All key tiles of all rows are one line, cut into equal pieces (``hopper/plan.py``). Nothing is
  compiled when lengths change.
- ``hopper/attend.py`` reads pages, ``hopper/attend_codes.py`` quantized ones; both leave a part and
  its logsumexp for each piece of a row. ``hopper/merge.py`` merges them. Rows that one worker has
  read get their result at once: a written byte costs more than a byte that is read.
- Chunks of a prompt take the forward kernel of training, whose copies look up page tables
  (``hopper/chunk.py``): 624 TFLOP/s for 1,024 tokens behind 2,048, where tiles for decoding reach
  196.
- Slots that are not filled may hold NaN: values beyond a row's keys are zeroed in shared memory.
"""

from .api import PagedImplementation as PagedImplementation
from .api import attends_chunk as attends_chunk
from .api import paged_attention as paged_attention
from .append import append_heads as append_heads
from .append import append_to_pages as append_to_pages
from .codes import codes_of as codes_of
from .codes import numbers_of as numbers_of
