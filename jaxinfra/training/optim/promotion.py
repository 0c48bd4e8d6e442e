"""Calls into code that was not written for strict dtype promotion."""

import functools
from collections.abc import Callable

import jax


def standard_promotion[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Runs ``function`` under JAX's standard dtype promotion, whatever its caller has set.

    Optax raises Python floats to int32 counts, which strict promotion refuses.
    """

    @functools.wraps(function)
    def promoting(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoting
