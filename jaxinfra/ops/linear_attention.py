"""Linear attention and the short convolution before it, by the kernels' package."""

from pallas_kernels import linear_attention as linear_attention
from pallas_kernels import linear_attention_in_slots as linear_attention_in_slots
from pallas_kernels import short_convolution as short_convolution
from pallas_kernels import short_convolutions_in_slots as short_convolutions_in_slots
