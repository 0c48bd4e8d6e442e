"""Cross entropy fused with the projection onto the vocabulary, without full logits in memory."""

from .api import HOPPER_LEAST_IDS as HOPPER_LEAST_IDS
from .api import CrossEntropySums as CrossEntropySums
from .api import hopper_chunks as hopper_chunks
from .api import linear_cross_entropy as linear_cross_entropy
from .api import xla_chunks as xla_chunks
