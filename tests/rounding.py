"""How far legitimate fp32 and 16-bit arithmetic may be from an oracle: running error analysis.

An oracle is written in NumPy. Given ``Rounded`` operands instead of arrays it computes, beside each
float64 value, the spread of that value over the programs that could have computed it in fp32, in
whatever order their sums run: each operation adds its own rounding, and passes on those of its
operands by its derivative.

- A rounding is at most u = 2**-24 of the result: 4 u for exp, log and tanh, whose libraries err by
  an ulp or two, and u |x| more for exp, which a program may compute as exp2(x log2 e).
- A sum of n terms, in any order, errs by the roundings of its n partial sums, none of which is
  above the sum of the terms' absolute values: sqrt(n) u sum |terms|.
- Roundings are taken as independent and of mean zero, and so add up as squares. By Hoeffding's
  inequality an error above L times the spread then has probability 2 exp(-L**2 / 2) at most (Higham
  and Mary 2019, "A new approach to probabilistic rounding error analysis").

Nothing here depends on what any program computed on any machine.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

UNIT = 2.0**-24
FUNCTION_UNITS = 4.0


class Rounded(np.lib.mixins.NDArrayOperatorsMixin):
    """A float64 array, and per element the spread of what fp32 programs compute for it."""

    def __init__(self, value: Any, spread: Any = 0.0):
        self.value = np.asarray(value, np.float64)
        # An infinity or NaN has no error: it must be met exactly.
        known = np.broadcast_to(np.asarray(spread, np.float64), self.value.shape)
        self.spread = np.where(np.isfinite(self.value), known, 0.0)

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    T = property(lambda self: Rounded(self.value.T, self.spread.T))

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index) -> "Rounded":
        return Rounded(self.value[index], self.spread[index])

    def __setitem__(self, index, other) -> None:
        other = rounded(other)
        self.value[index], self.spread[index] = other.value, other.spread

    def __array__(self, dtype=None, copy=None):
        raise TypeError("a Rounded would lose its spread; read .value if that is meant")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if method != "__call__" or options:
            return NotImplemented
        if ufunc in _OF_VALUES:
            return ufunc(*(rounded(x).value for x in inputs))
        if ufunc is np.matmul:
            return np.einsum("...ij,...jk->...ik", *inputs)
        if ufunc not in _RULES:
            return NotImplemented
        operands = [rounded(x) for x in inputs]
        with np.errstate(all="ignore"):
            value = ufunc(*(x.value for x in operands))
            slopes, own = _RULES[ufunc](value, *(x.value for x in operands))
            passed = [
                np.where(x.spread == 0.0, 0.0, x.spread * slope)
                for x, slope in zip(operands, slopes, strict=True)
            ]
        return Rounded(value, _root(UNIT * own, *passed))

    def __array_function__(self, function, types, arguments, options):
        if function not in _FUNCTIONS:
            return NotImplemented
        return _FUNCTIONS[function](*arguments, **options)

    def sum(self, axis=None, keepdims=False) -> "Rounded":
        return np.sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis=None, keepdims=False) -> "Rounded":
        return np.mean(self, axis=axis, keepdims=keepdims)

    def max(self, axis=None, keepdims=False) -> "Rounded":
        return np.max(self, axis=axis, keepdims=keepdims)

    def reshape(self, *shape) -> "Rounded":
        return Rounded(self.value.reshape(*shape), self.spread.reshape(*shape))


def rounded(x: Any) -> Rounded:
    """``x``, exact if it is an array."""
    return x if isinstance(x, Rounded) else Rounded(x)


def stored(x: Any, dtype: Any) -> Any:
    """``x`` after it was kept in ``dtype``, which the oracle itself does not round to."""
    if not isinstance(x, Rounded):
        return x
    return Rounded(x.value, _root(x.spread, storage_error(x.value, dtype)))


def storage_error(value: np.ndarray, dtype: Any) -> np.ndarray:
    """What one rounding to ``dtype`` may change, also below its smallest normal number."""
    info = jnp.finfo(dtype)
    # Programs flush what is below fp32's and bf16's normal numbers, far below all that is tested.
    flushes = jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16)
    least = info.smallest_normal if flushes else info.smallest_subnormal
    return np.where(np.isfinite(value), np.abs(value) * float(info.eps) / 2 + float(least), 0.0)


def _root(*parts: np.ndarray) -> np.ndarray:
    """Of the sum of the squares."""
    return np.sqrt(functools.reduce(np.add, (np.square(part) for part in parts)))


def _exact(*slopes: float) -> Callable:
    return lambda z, *_: (slopes, np.zeros_like(z))


_OF_VALUES = {
    np.greater, np.greater_equal, np.less, np.less_equal, np.equal, np.not_equal, np.isfinite,
    np.isnan, np.isinf,
}  # fmt: skip
# Of the value and the operands: the derivative by each operand, and the operation's own roundings
# in units.
_RULES: dict[np.ufunc, Callable] = {
    np.add: lambda z, _x, _y: ((1.0, 1.0), np.abs(z)),
    np.subtract: lambda z, _x, _y: ((1.0, 1.0), np.abs(z)),
    np.multiply: lambda z, x, y: ((y, x), np.abs(z)),
    np.divide: lambda z, _x, y: ((1 / y, z / y), 2 * np.abs(z)),
    np.negative: _exact(-1.0),
    np.absolute: _exact(1.0),
    np.square: lambda z, x: ((2 * x,), np.abs(z)),
    np.power: lambda z, x, n: ((n * x ** (n - 1), 0.0), n * np.abs(z)),
    np.sqrt: lambda z, _: ((0.5 / z,), 2 * z),
    np.exp: lambda z, x: ((z,), (FUNCTION_UNITS + np.where(z == 0, 0.0, np.abs(x))) * z),
    np.log: lambda z, x: ((1 / x,), FUNCTION_UNITS * np.abs(z)),
    np.expm1: lambda z, x: ((z + 1,), FUNCTION_UNITS * np.abs(z)),
    np.tanh: lambda z, _: ((1 - z * z,), FUNCTION_UNITS * np.abs(z)),
}
_FUNCTIONS: dict[Callable, Callable] = {}


def _rule_of(function: Callable) -> Callable:
    def register(rule: Callable) -> Callable:
        _FUNCTIONS[function] = rule
        return rule

    return register


def _both(function: Callable) -> None:
    """A function that moves elements moves their spreads alike."""

    def moved(x, *arguments, **options):
        many = isinstance(x, (tuple, list))
        values, spreads = (
            [getattr(rounded(each), part) for each in (x if many else [x])]
            for part in ("value", "spread")
        )
        pair = (function(y if many else y[0], *arguments, **options) for y in (values, spreads))
        if function is np.split:
            return [Rounded(*each) for each in zip(*pair, strict=True)]
        return Rounded(*pair)

    _FUNCTIONS[function] = moved


for _function in (np.concatenate, np.broadcast_to, np.repeat, np.take_along_axis, np.split,
                  np.moveaxis, np.squeeze, np.reshape):  # fmt: skip
    _both(_function)


@_rule_of(np.where)
def _where(condition, x, y):
    x, y = rounded(x), rounded(y)
    return Rounded(np.where(condition, x.value, y.value), np.where(condition, x.spread, y.spread))


@_rule_of(np.zeros_like)
def _zeros_like(x):
    return Rounded(np.zeros(x.shape))


@_rule_of(np.sum)
def _sum(x, axis=None, keepdims=False):
    finite = np.where(np.isfinite(x.value), x.value, 0.0)
    value = np.sum(x.value, axis=axis, keepdims=keepdims)
    terms = np.sum(np.abs(finite), axis=axis, keepdims=keepdims)
    variance = np.sum(np.square(x.spread), axis=axis, keepdims=keepdims)
    length = x.size / max(value.size, 1)
    return Rounded(value, np.sqrt(variance + length * np.square(UNIT * terms)))


@_rule_of(np.mean)
def _mean(x, axis=None, keepdims=False):
    total = np.sum(x, axis=axis, keepdims=keepdims)
    return total / (x.size / total.size)


@_rule_of(np.max)
def _max(x, axis=None, keepdims=False):
    assert axis is not None
    at = np.expand_dims(np.argmax(x.value, axis=axis), axis)
    # All programs take the same one, or one that is as large within its spread.
    found = np.take_along_axis(x, at, axis=axis)
    return found if keepdims else np.squeeze(found, axis)


@_rule_of(np.einsum)
def _einsum(spec: str, a, b):
    a, b = rounded(a), rounded(b)
    product = functools.partial(np.einsum, spec, optimize=True)
    value = product(a.value, b.value)
    terms = product(np.abs(a.value), np.abs(b.value))
    length = _contracted(spec, a.shape, b.shape)
    variance = length * np.square(UNIT * terms)
    if a.spread.any():
        variance = variance + product(np.square(a.spread), np.square(b.value))
    if b.spread.any():
        variance = variance + product(np.square(a.value), np.square(b.spread))
    return Rounded(value, np.sqrt(variance))


def _contracted(spec: str, *shapes: tuple[int, ...]) -> int:
    """Terms of each sum of an einsum."""
    inputs, output = spec.replace("...", "").split("->")
    sizes: dict[str, int] = {}
    for letters, shape in zip(inputs.split(","), shapes, strict=True):
        sizes |= dict(zip(letters[::-1], shape[::-1], strict=False))
    return int(np.prod([size for letter, size in sizes.items() if letter not in output]))
