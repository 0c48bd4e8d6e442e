"""Linear attention with decay: the gated delta rule, its form per channel, and state spaces."""

from .api import linear_attention as linear_attention
from .api import linear_attention_in_slots as linear_attention_in_slots
from .convolution import short_convolution as short_convolution
from .convolution import short_convolutions_in_slots as short_convolutions_in_slots
