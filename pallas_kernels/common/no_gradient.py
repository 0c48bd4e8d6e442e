"""Guard for ops without a gradient: differentiating them raises an error."""

import jax

from .errors import UnsupportedError


def without_gradient[T](arrays: T, why: str) -> T:
    """Returns ``arrays`` unchanged, and raises an error where they are differentiated.

    Args:
        why: the error's message, which says what to do instead.
    """

    @jax.custom_jvp
    def same(arrays: T) -> T:
        return arrays

    @same.defjvp
    def refuse(primals, tangents):
        del primals, tangents
        raise UnsupportedError(why)

    return same(arrays)
