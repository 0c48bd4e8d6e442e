"""RMSNorm and LayerNorm over rows, with the residual addition before them."""

from .api import layer_norm as layer_norm
from .api import rms_norm as rms_norm
