"""RMSNorm and LayerNorm over rows, with the residual addition before them."""

from .api import layer_norm as layer_norm
from .api import rms_norm as rms_norm
from .fp8 import layer_norm_fp8 as layer_norm_fp8
from .fp8 import rms_norm_fp8 as rms_norm_fp8
from .fp8_formula import Fp8Rows as Fp8Rows
