"""Logs of the implementation that "auto" chose, once for each distinct case."""

import functools
import logging

from . import device

_logger = logging.getLogger(__name__)


def announce(op: str, implementation: str, case: str, *, because: str | None = None) -> None:
    """Logs at level INFO which implementation "auto" chose for a case, once per case.

    Args:
        case: shapes and settings of the call.
        because: why faster implementations could not be chosen.
    """
    _announce(op, device.target().slug, implementation, case, f" ({because})" if because else "")


@functools.cache
def _announce(op: str, device_kind: str, implementation: str, case: str, because: str) -> None:
    _logger.info("%s on %s uses %s for %s%s", op, device_kind, implementation, case, because)
