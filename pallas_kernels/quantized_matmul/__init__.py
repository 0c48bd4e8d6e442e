"""Products with weights that are kept in 4 or 8 bits."""

from .api import quantized_matmul as quantized_matmul
from .arrangement import arranged as arranged
from .arrangement import why_not_arranged as why_not_arranged
from .choice import takes_kernel as takes_kernel
from .columns import are_alike as are_alike
from .columns import concatenated_columns as concatenated_columns
from .columns import repeated_outputs as repeated_outputs
from .reference import dequantized_rows as dequantized_rows
from .rounding import round_weight as round_weight
from .scales import DoubleQuantizedScales as DoubleQuantizedScales
from .scales import double_quantized as double_quantized
from .weight import Activations as Activations
from .weight import Arrangement as Arrangement
from .weight import QuantizedWeight as QuantizedWeight
from .weight import WeightCode as WeightCode
from .weight import WeightFormat as WeightFormat
