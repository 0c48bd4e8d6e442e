"""Softmax over rows, optionally masked, and log-softmax."""

from .api import log_softmax as log_softmax
from .api import logsumexp as logsumexp
from .api import softmax as softmax
