"""Checks that weights are finite: a model with a NaN computes only NaN, and raises no error."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.errors import CheckpointError

_REMEDY = (
    "restore the weights from a good copy, or, to look at them as they are, add --allow-nonfinite "
    "(in Python: jaxinfra.checkpoint.finite.nonfinite_allowed)"
)
ALLOW_HELP = "take weights that hold NaN or infinity as they are"
_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("nonfinite_allowed", default=False)


@contextlib.contextmanager
def nonfinite_allowed(*, allowed: bool = True) -> Iterator[None]:
    """Allows weights that are not finite within a ``with`` block."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def require_finite(arrays: Mapping[str, jax.Array], *, where: object) -> None:
    """Raises CheckpointError naming the first floating-point array that holds a NaN or an infinity.
    Each array is read once, on its devices.
    """
    floating = {
        name: leaf for name, leaf in arrays.items() if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    if not floating or _allowed.get():
        return
    good = np.asarray(_all_finite(tuple(floating.values())).addressable_data(0))
    bad = [name for name, fine in zip(floating, good, strict=True) if not fine]
    if bad:
        raise CheckpointError(
            f"{where}: {bad[0]}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''} of "
            f"{len(floating)} arrays hold numbers that are not finite; {_REMEDY}"
        )


@jax.jit
def _all_finite(leaves: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def require_finite_piece(piece: np.ndarray, *, name: str) -> None:
    """Raises CheckpointError if elements of the tensor ``name``, on the host, are not finite."""
    kind: Any = piece.dtype
    if not jnp.issubdtype(kind, jnp.floating) or _allowed.get():
        return
    # NumPy knows no bfloat16, and widening it is exact.
    wide = piece if kind.kind == "f" else piece.astype(np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"tensor {name} holds numbers that are not finite; {_REMEDY}")
