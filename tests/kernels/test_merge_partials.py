"""Merging is the monoid it is said to be, and equals attention over the union of the keys."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from pallas_kernels import InputError, flash_attention, merge_partials

ROWS, WIDTH = 5, 3
# One shape throughout, so that the merge compiles once.
merge = jax.jit(merge_partials)


def parts(count):
    """Partial results of ``count`` sets of keys; a row that saw none has logsumexp -inf, out 0."""
    # XLA flushes subnormals to zero.
    values = st.floats(-8, 8, width=32, allow_subnormal=False)
    scores = st.one_of(st.just(-np.inf), st.floats(-80, 80, width=32, allow_subnormal=False))
    one = st.tuples(
        hnp.arrays(np.float32, (ROWS, WIDTH), elements=values),
        hnp.arrays(np.float32, (ROWS,), elements=scores),
    ).map(lambda part: (np.where(np.isneginf(part[1])[:, None], 0, part[0]), part[1]))
    return st.tuples(*[one] * count)


def exact(*parts):
    """The merge of all parts at once, in float64."""
    outs = np.stack([out for out, _ in parts]).astype(np.float64)
    lses = np.stack([lse for _, lse in parts]).astype(np.float64)
    m = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isneginf(m), 0, m))
    total = weights.sum(axis=0)
    safe = np.where(total > 0, total, 1)
    out = (weights[..., None] * outs).sum(axis=0) / safe[:, None]
    return out, np.where(total > 0, np.where(np.isneginf(m), 0, m) + np.log(safe), -np.inf)


def assert_close(got, want):
    # Sums of weights that are at most 1, of values up to 8: a few ulp of the largest value.
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=8 * 8 * 2.0**-23)
    np.testing.assert_allclose(got[1], want[1], rtol=4 * 2.0**-23, atol=4 * 2.0**-23)


@hypothesis.given(parts(3))
@hypothesis.settings(deadline=None, max_examples=60)
def test_associative_commutative_and_exact(three):
    a, b, c = three
    want = exact(a, b, c)
    assert_close(merge(*merge(*a, *b), *c), want)
    assert_close(merge(*a, *merge(*b, *c)), want)
    assert_close(merge(*merge(*c, *a), *b), want)


@hypothesis.given(parts(1))
@hypothesis.settings(deadline=None, max_examples=30)
def test_identity_is_exact(one):
    identity = (np.zeros((ROWS, WIDTH), np.float32), np.full(ROWS, -np.inf, np.float32))
    for out, lse in (merge(*one[0], *identity), merge(*identity, *one[0])):
        np.testing.assert_array_equal(out, one[0][0])
        np.testing.assert_array_equal(lse, one[0][1])


@jax.jit
@jax.grad
def gradients(arguments):
    out, lse = merge_partials(*arguments)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, jnp.cos(lse)))


@hypothesis.given(parts(2))
@hypothesis.settings(deadline=None, max_examples=40)
def test_gradients_are_finite_and_those_of_the_formula(two):
    (out_a, lse_a), (out_b, lse_b) = two
    grads = gradients((out_a, lse_a, out_b, lse_b))
    out, lse = exact(*two)
    finite = np.where(np.isneginf(lse), 0, lse)
    d_out, d_lse = np.cos(out), -np.sin(finite)
    for (out_x, lse_x), d_out_x, d_lse_x in zip(two, grads[0::2], grads[1::2], strict=True):
        weight = np.where(np.isneginf(lse_x), 0, np.exp(lse_x - finite))
        np.testing.assert_allclose(d_out_x, weight[:, None] * d_out, atol=1e-5)
        want = weight * (d_lse + ((out_x - out) * d_out).sum(axis=-1))
        # lse up to 80 is known to 80 * 2**-24, which its sine passes on.
        np.testing.assert_allclose(d_lse_x, want, atol=2e-4)


@pytest.mark.parametrize("cut", [1, 17, 40])
def test_parts_of_the_keys_merge_to_the_whole(cut):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 40, 4, 16), dtype=np.float32) for _ in range(3))

    @jax.jit
    def attend(k, v, lengths):
        options = {"key_value_seq_lengths": lengths, "return_residual": True}
        return flash_attention(q, k, v, implementation="xla", **options)

    lengths = np.array([40, 30])
    whole = attend(k, v, jnp.asarray(lengths))
    first = attend(k[:, :cut], v[:, :cut], jnp.asarray(np.minimum(lengths, cut)))
    rest = attend(k[:, cut:], v[:, cut:], jnp.asarray(np.maximum(lengths - cut, 0)))
    for got, want in zip(jax.jit(merge_partials)(*first, *rest), whole, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_shapes_are_checked():
    out, lse = jnp.zeros((3, 4)), jnp.zeros((3,))
    with pytest.raises(InputError, match=r"\(3, 4\).*without the last dim"):
        merge_partials(out, lse, out, jnp.zeros((4,)))
