"""Weights quantized to 4 and 8 bits: formats, rounding, and their layouts for kernels."""

from .columns import are_alike as are_alike
from .columns import arranged as arranged
from .columns import concatenated_columns as concatenated_columns
from .columns import repeated_outputs as repeated_outputs
from .columns import why_not_arranged as why_not_arranged
from .rounding import round_weight as round_weight
from .weight import Activations as Activations
from .weight import Arrangement as Arrangement
from .weight import DoubleQuantizedScales as DoubleQuantizedScales
from .weight import QuantizedWeight as QuantizedWeight
from .weight import WeightCode as WeightCode
from .weight import WeightFormat as WeightFormat
from .weight import dequantized_rows as dequantized_rows
from .weight import double_quantized as double_quantized
