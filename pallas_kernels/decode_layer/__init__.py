"""Decoder layers of a one-token step, all in one launch."""

from .api import LayerImplementation as LayerImplementation
from .api import decode_layers as decode_layers
from .api import refused_layers as refused_layers
from .reference import LayerWeights as LayerWeights
