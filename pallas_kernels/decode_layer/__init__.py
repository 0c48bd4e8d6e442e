"""Decoder layers for one new token, all in a single kernel launch.

The 132 thread blocks, one per SM, must all be resident, since they wait for each other. A block has
two warpgroups that compute and one that loads. A layer has five phases (``hopper``): the QKV
product, attention, the output product, gate and up, down. Each phase ends with a barrier of all
blocks; the next one reads other blocks' results from L2 (``inputs``). The loading warpgroup fills a
ring buffer (``stream``) with tiles of weights, keys and values, in the order of their use. It runs
ahead over phases and layers and waits only for free slots. The residual stream, queries, hidden
values and all sums are fp32 within a launch; keys and values are rounded once to the pages' dtype.

Several GPUs can share each layer (``peers``). Every GPU then has its own heads and hidden columns,
and writes its sums of the output and down products to all of them. Those sums take the place of two
of the five barriers. On two H200s a step of Llama-3-8B takes 2.47 ms; Llama-3.2-1B gained nothing.

One row of Llama-3.2-1B on an H200 takes 44.4 us per layer; separate kernels take 57.6. A decode
step takes 0.80 ms; of Llama-3-8B 4.01 ms, in int4 1.85, in FP8 2.56. The time beyond reading the
weights is latency: four barriers of 0.8 us each (2 to 3 while the ring is filled) and the reads
after them. TMA copies of one row of a tile each took 15 us more per layer than ``cp.async``. Each
phase reads the thread index again (``per_thread.thread_anew``): otherwise values derived from it
live through all layers, which spilled 620 bytes.
"""

from .api import LayerImplementation as LayerImplementation
from .api import decode_layers as decode_layers
from .api import refused_layers as refused_layers
from .reference import LayerWeights as LayerWeights
