"""Softmax over rows, masked, and its logarithm."""

from .api import log_softmax as log_softmax
from .api import softmax as softmax
