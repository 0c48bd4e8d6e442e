"""Rows in consecutive groups, each times its group's weight: the experts of a mixture."""

from .api import GATE_NAME as GATE_NAME
from .api import UP_NAME as UP_NAME
from .api import grouped_matmul as grouped_matmul
from .api import grouped_swiglu as grouped_swiglu
from .api import grouped_weight_gradient as grouped_weight_gradient
from .combine import combine as combine
from .fp8 import scaled_grouped_matmul as scaled_grouped_matmul
