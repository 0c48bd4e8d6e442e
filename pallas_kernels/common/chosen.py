"""The choice of an implementation, and logs of what "auto" chose, once for each distinct case."""

import functools
import logging
from collections.abc import Callable, Sequence

from . import device
from .errors import InputError, UnsupportedError

_logger = logging.getLogger(__name__)


def choose(
    op: str, implementation: str, names: Sequence[str], why_not_hopper: Callable[[], str | None]
) -> str:
    """Returns the implementation to run: "auto" is "hopper" if that supports the call, else "xla".

    Args:
        op: name of the op in error messages.
        names: implementations of the op, besides "auto".
        why_not_hopper: why the kernels cannot compute this call; None if they can.

    Raises:
        InputError: the implementation is unknown.
        UnsupportedError: "hopper" is named and cannot compute the call.
    """
    if implementation not in ("auto", *names):
        raise InputError(
            f"implementation={implementation!r} is unknown; choose auto, {', '.join(names)}"
        )
    if implementation not in ("auto", "hopper"):
        return implementation
    reason = why_not_hopper()
    if implementation == "hopper" and reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot compute this {op}: {reason}. implementation='xla' can"
        )
    return "hopper" if reason is None else "xla"


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
