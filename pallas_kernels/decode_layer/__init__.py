"""Decoder layers for one new token, all in a single kernel launch.

132 blocks, one per SM, must all be resident: they wait for each other. A block has two warpgroups
that compute and one that loads. The phases of a layer (``hopper``: queries, keys and values;
attention; out; gate and up; down) each end with a meeting of all blocks. A phase reads
other blocks' results from L2 after the meeting (``inputs``). The loading warpgroup fills one
ring (``stream``) with tiles of weights, keys and values, in the order in which phases and layers
need them. It waits only for free slots. The residual stream, queries, hidden values
and all sums are fp32 within a launch; keys and values are rounded once, as pages have them.

One row of Llama-3.2-1B on an H200: 44.4 us per layer beside 57.6 one product after another; a step
0.80 ms, of Llama-3-8B 4.01, in int4 1.85, in FP8 2.56. What is left beside the bytes is latency:
four meetings of 0.8 us, 2 to 3 while the ring is filled, and reads after them. Copies by TMA, a row
of a tile each, took 15 us more per layer than ``cp.async``. Each phase reads a thread's number anew
(``per_thread.thread_anew``): what is derived from it was kept for all layers, 620 bytes of spills.
"""

from .api import LayerImplementation as LayerImplementation
from .api import decode_layers as decode_layers
from .api import refused_layers as refused_layers
from .reference import LayerWeights as LayerWeights
