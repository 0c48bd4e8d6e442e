"""RMSNorm over rows."""

from .api import rms_norm as rms_norm
