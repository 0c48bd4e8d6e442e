"""Two ways to hold a result to an oracle of higher precision, NumPy float64.

``assert_within_rounding`` derives its bound from the computation: the oracle carries, per element,
the spread of legitimate fp32 and 16-bit programs (``tests/rounding.py``), which no machine's luck
enters. It is the one to use.

``assert_no_worse`` is FlashAttention's rule: at most twice the error of a plain implementation in
the same dtypes, plus two units in the last place. It is for errors that both share and no order of
sums moves: operands quantized to 8 bits, and results stored by another library.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.rounding import rounded, storage_error

FACTOR = 2.0
ULPS = 2.0
# An element above four spreads has, by Hoeffding's inequality, a probability below 7e-4 if each
# rounding is as bad as it may be and no partial sum smaller than all its terms together: a program
# is some ten times better. The mean square of many elements has no such tail.
SPREADS = 4.0
SPREADS_OF_RMS = 1.0


def assert_within_rounding(got: Any, oracle: Any, *, what: str = "result") -> None:
    """Asserts that each element of each leaf is one that rounding alone may have made.

    ``|got - oracle| <= 4 spread`` per element, where a spread is the oracle's own and one rounding
    to the dtype of ``got``; and of a whole leaf, whose roundings are many and independent, the root
    mean square error is at most that of the spreads. Infinities and NaN must be where the oracle
    has them.

    Args:
        got: a pytree of arrays.
        oracle: the same tree of ``Rounded``.
        what: names the subject in messages.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(got)
    for (path, mine), true in zip(leaves, structure.flatten_up_to(oracle), strict=True):
        name = what + jax.tree_util.keystr(path)
        true = rounded(true)
        assert np.shape(mine) == true.shape, f"{name}: {np.shape(mine)} != {true.shape}"
        finite = _finite(name, np.asarray(mine, np.float64), true.value)
        if not finite.any():
            continue
        value, spread = true.value[finite], true.spread[finite]
        spread = np.hypot(spread, storage_error(value, mine.dtype))
        error = np.abs(np.asarray(mine, np.float64)[finite] - value)
        worst = np.argmax(error / spread)
        assert error[worst] <= SPREADS * spread[worst], (
            f"{name}: error {error[worst]:.3e} of an element that is {value[worst]:.3e} is "
            f"{error[worst] / spread[worst]:.1f} times its spread; at most {SPREADS:g} are rounding"
        )
        # Of few elements it is nearly the largest.
        bound = SPREADS_OF_RMS + (SPREADS - SPREADS_OF_RMS) / np.sqrt(error.size)
        assert _rms(error) <= bound * _rms(spread), (
            f"{name}: rms error {_rms(error):.3e} is {_rms(error) / _rms(spread):.1f} times the "
            f"spread's; at most {bound:.1f} are rounding"
        )


def assert_no_worse(
    got: Any,
    *,
    plain: Any,
    oracle: Any,
    what: str = "result",
    factor: float = FACTOR,
    orders: Sequence[Any] = (),
) -> None:
    """Asserts ``error(got) <= 2 error(plain) + 2 ulp`` for each leaf, in two norms.

    The norms are the largest error of an element (an ulp is then that of the largest element) and
    the root mean square error (an ulp of the root mean square): the first catches one wrong
    element, the second a small error everywhere that an outlier's ulp would hide. Infinities and
    NaN must be where the oracle has them.

    Args:
        got: a pytree of arrays; each leaf's own dtype sets its ulp.
        plain: the same tree from the plain implementation in the same dtypes.
        oracle: the same tree in float64.
        what: names the subject in messages.
        factor: of the plain error; another than 2 wants a reason beside it.
        orders: more trees of the plain implementation, its sums in other orders. The plain error
            is then the largest: of a leaf of a few elements, one order's may be small by luck.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(got)
    plain_leaves = zip(*map(structure.flatten_up_to, (plain, *orders)), strict=True)
    oracle_leaves = structure.flatten_up_to(oracle)
    for (path, mine), theirs, true in zip(leaves, plain_leaves, oracle_leaves, strict=True):
        name = what + jax.tree_util.keystr(path)
        assert np.shape(mine) == np.shape(true), f"{name}: {np.shape(mine)} != {np.shape(true)}"
        assert mine.dtype == theirs[0].dtype, f"{name}: {mine.dtype}, plain has {theirs[0].dtype}"
        _assert_leaf(name, mine, theirs, np.asarray(true, np.float64), factor)


def _assert_leaf(
    name: str, got: Any, plain: Sequence[Any], oracle: np.ndarray, factor: float
) -> None:
    epsilon = float(jnp.finfo(got.dtype).eps)
    got, plain = np.asarray(got, np.float64), np.asarray(plain, np.float64)
    finite = _finite(name, got, oracle)
    if not finite.any():
        return
    got, plain, oracle = got[finite], plain[:, finite], oracle[finite]
    for norm_name, norm in (("max", _max), ("rms", _rms)):
        plain_error = max(norm(each - oracle) for each in plain)
        bound = factor * plain_error + ULPS * epsilon * norm(oracle)
        error = norm(got - oracle)
        assert error <= bound, (
            f"{name}: {norm_name} error {error:.3e} is above {bound:.3e} = {factor:g} * plain's "
            f"{plain_error:.3e} + {ULPS:g} ulp of {norm(oracle):.3e}"
        )


def _finite(name: str, got: np.ndarray, oracle: np.ndarray) -> np.ndarray:
    """Where the oracle is finite; elsewhere ``got`` must be what it is."""
    finite = np.isfinite(oracle)
    wrong = ~finite & ~((got == oracle) | (np.isnan(got) & np.isnan(oracle)))
    wrong |= finite & ~np.isfinite(got)
    assert not wrong.any(), (
        f"{name}: {np.count_nonzero(wrong)} of {wrong.size} elements are non-finite where the "
        f"oracle is not, or otherwise than it; first at {np.argwhere(wrong)[0].tolist()}"
    )
    return finite


def _max(x: np.ndarray) -> float:
    return float(np.max(np.abs(x)))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
