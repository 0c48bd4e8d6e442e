"""Logs of what ``implementation="auto"`` took, once for each distinct case."""

import functools
import logging

from . import device

_logger = logging.getLogger(__name__)


def announce(op: str, implementation: str, case: str, *, because: str | None = None) -> None:
    """Logs a choice at level INFO.

    Args:
        case: shapes and settings that it was made for.
        because: why faster ones could not be taken.
    """
    _announce(op, device.target().slug, implementation, case, f" ({because})" if because else "")


@functools.cache
def _announce(op: str, device_kind: str, implementation: str, case: str, because: str) -> None:
    _logger.info("%s on %s uses %s for %s%s", op, device_kind, implementation, case, because)
