"""Decoder layers of a one-token step, launched whole."""

from .api import LayerImplementation as LayerImplementation
from .api import LayerWeights as LayerWeights
from .api import decode_layer as decode_layer
from .api import layer_tail as layer_tail
