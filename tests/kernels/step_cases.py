"""Decode steps that are tested in the interpreter and on a GPU, and their oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import append_and_attend
from tests.kernels import paged_cases as cases
from tests.rounding import Rounded, stored
from tests.tolerance import assert_within_rounding

SHORT = [
    cases.PagedCase(name="lengths", lengths=(70, 1, 64, 0, 65), N=16, K=4, sinks=True),
    cases.PagedCase(name="window", lengths=(130, 65), N=8, K=4, H=128, size=64, window=40),
]
LONG = [
    cases.PagedCase(name="one-row", lengths=(2048,), N=32, K=8, size=64),
    cases.PagedCase(name="one-row-128", lengths=(2049,), N=32, K=8, H=128, size=64, sinks=True),
    cases.PagedCase(
        name="many-rows", lengths=(*range(1, 20), 64, 128, 129, 0, 700), N=32, K=8, size=16,
        window=100, cap=5.0,
    ),
    cases.PagedCase(name="pages-128", lengths=(1, 128, 129, 500), N=32, K=4, H=128, size=128),
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Arguments of ``append_and_attend``, array options, and what must come."""

    arguments: tuple
    options: dict
    want: tuple  # Rounded attention, and both pools


def step_of(case: cases.PagedCase, *, hidden=np.nan) -> Step:
    """The last token of every row is new: where it belongs lies what nobody put there."""
    (q, k, v, tables, lengths), arrays = case.arrays("bfloat16", hidden=hidden)
    rng = np.random.default_rng(1)
    new = rng.standard_normal((case.B, 1, 2 * case.K, case.H)).astype(q.dtype)
    heads = np.concatenate([q, new], axis=2)
    angles = rng.uniform(0, 6, (case.B, 1, case.H // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    half = case.H // 2
    wide = heads.astype(np.float64)
    first, second = Rounded(wide[..., :half]), Rounded(wide[..., half:])
    c, s = (Rounded(x.astype(np.float64)[:, :, None]) for x in (cos, sin))
    turned = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    turned = stored(turned, q.dtype)
    value = turned.value.astype(q.dtype)
    before, after = (k.copy(), v.copy()), (k.copy(), v.copy())
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        page, slot = tables[b, (length - 1) // case.size], (length - 1) % case.size
        for pool in before:
            pool[page, slot] = hidden
        after[0][page, slot] = value[b, 0, case.N : case.N + case.K]
        after[1][page, slot] = heads[b, 0, case.N + case.K :]
    want = cases.expected(case, (value[:, :, : case.N], *after, tables, lengths), arrays)
    arguments = (heads, *before, tables, lengths[:, None] - 1, (cos, sin))
    chosen = {"window": case.window, "soft_cap": case.cap, "scale": case.scale}
    return Step(arguments=arguments, options=chosen | arrays, want=(want, *after))


def run(step: Step, **chosen):
    """What ``append_and_attend`` makes of a step."""
    arguments = [jnp.asarray(x) for x in step.arguments[:-1]]
    return append_and_attend(*arguments, step.arguments[-1], **step.options, **chosen)


def assert_is_step(got, step: Step) -> None:
    """Attention within rounding, and pools: keys are turned in fp32 and rounded once."""
    out, *pools = got
    assert_within_rounding(out, step.want[0])
    for mine, true in zip(pools, step.want[1:], strict=True):
        mine, true = (np.asarray(x, np.float64) for x in (mine, true))
        np.testing.assert_allclose(mine, true, rtol=2.0**-7, atol=2.0**-20)
