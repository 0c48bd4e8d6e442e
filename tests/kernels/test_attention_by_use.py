"""Another implementation where attention is not differentiated than where it is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import OUT_NAME, api, dispatch
from tests.kernels.attention_stand_in import FAST_COMPILE

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
RNG = np.random.default_rng(0)
Q, K, V, D_OUT = (
    RNG.standard_normal((2, 12, heads, 8), dtype=np.float32) for heads in (4, 2, 2, 4)
)
IDS = np.repeat(np.arange(3), 4)[None].repeat(2, axis=0)


@pytest.fixture
def taken(monkeypatch):
    """Names of implementations as they are traced; forwards alone take the reference."""
    traced: list[str] = []
    results_by = api._results_by

    def preferences(call, *, gradient):
        return ["xla" if gradient else "reference"]

    def seen(name, call, *arrays):
        traced.append(name)
        return results_by(name, call)(*arrays)

    def recorded(name, call):
        return functools.partial(seen, name, dataclasses.replace(call, q=None, k=None, v=None))

    monkeypatch.setattr(dispatch, "preferences", preferences)
    monkeypatch.setattr(api, "_results_by", recorded)
    return traced


def attention(q, k, v):
    return flash_attention(q, k, v, is_causal=True, q_segment_ids=IDS, kv_segment_ids=IDS)


def by(name):
    return functools.partial(
        flash_attention, is_causal=True, q_segment_ids=IDS, kv_segment_ids=IDS, implementation=name
    )


def test_a_forward_alone_takes_its_own(taken):
    out = jit(attention)(Q, K, V)
    assert taken == ["reference"]
    np.testing.assert_array_equal(out, jit(by("reference"))(Q, K, V))


@pytest.mark.parametrize("lifted", [False, True], ids=["plain", "vmap of checkpoint"])
def test_a_gradient_takes_another(taken, lifted):
    def gradients(attend, q, k, v, d_out):
        if lifted:
            policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME)
            attend = jax.checkpoint(attend, policy=policy)
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(d_out)

    def function(attend):
        one = functools.partial(gradients, attend)
        return jit(jax.vmap(one, in_axes=(0, None, 0, 0)) if lifted else one)

    arrays = (Q, K, V, D_OUT)
    if lifted:
        arrays = (np.stack([Q, -Q]), K, np.stack([V, 2 * V]), np.stack([D_OUT, D_OUT]))
    got = function(attention)(*arrays)
    assert "xla" in taken
    # The reference is traced as the function that is differentiated, and not computed.
    want = function(by("xla"))(*arrays)
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_a_logsumexp_comes_with_both(taken):
    def both(q):
        out, lse = flash_attention(q, K, V, return_residual=True)
        return jnp.sum(out * D_OUT) + jnp.sum(lse)

    def one(q, name):
        out, lse = flash_attention(q, K, V, return_residual=True, implementation=name)
        return jnp.sum(out * D_OUT) + jnp.sum(lse)

    assert jit(both)(Q) == jit(functools.partial(one, name="reference"))(Q)
    np.testing.assert_array_equal(
        jit(jax.grad(both))(Q), jit(jax.grad(functools.partial(one, name="xla")))(Q)
    )
    assert taken[-1] == "xla"
