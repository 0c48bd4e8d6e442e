"""Sums of few rows over the GPUs of a mesh axis, in one hop over NVLink."""

from .api import RowMailbox as RowMailbox
from .api import RowSumsImplementation as RowSumsImplementation
from .api import SummedRows as SummedRows
from .api import open_mailbox as open_mailbox
from .api import refused_rows as refused_rows
from .api import sum_rows as sum_rows
