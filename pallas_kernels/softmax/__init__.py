"""Softmax over rows."""

from .api import softmax as softmax
