"""Ops without a gradient: they say so instead of returning a wrong one."""

import jax

from .errors import UnsupportedError


def without_gradient[T](arrays: T, why: str) -> T:
    """``arrays`` as they are; a derivative through them is refused.

    Args:
        why: the message: what to do instead.
    """

    @jax.custom_jvp
    def same(arrays: T) -> T:
        return arrays

    @same.defjvp
    def refuse(primals, tangents):
        del primals, tangents
        raise UnsupportedError(why)

    return same(arrays)
