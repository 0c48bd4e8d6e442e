"""Tolerances that are derived: no kernel may be much worse than the plain way to write it.

The rule is FlashAttention's: against an oracle of higher precision, the error of the subject is at
most twice the error of a plain implementation in the same dtypes, plus two units in the last place
of the result. The oracle must be one precision above the subject: NumPy float64, never the plain
implementation itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FACTOR = 2.0
ULPS = 2.0


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
    finite = np.isfinite(oracle)
    got, plain = np.asarray(got, np.float64), np.asarray(plain, np.float64)
    wrong = ~finite & ~((got == oracle) | (np.isnan(got) & np.isnan(oracle)))
    wrong |= finite & ~np.isfinite(got)
    assert not wrong.any(), (
        f"{name}: {np.count_nonzero(wrong)} of {wrong.size} elements are non-finite where the "
        f"oracle is not, or otherwise than it; first at {np.argwhere(wrong)[0].tolist()}"
    )
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


def _max(x: np.ndarray) -> float:
    return float(np.max(np.abs(x)))


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
