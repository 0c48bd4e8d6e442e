"""Calls at the edge of the contract: rows without keys, bounds that hide nothing, odd integers."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import InputError, flash_attention
from pallas_kernels.flash_attention import AttentionMasks, AttentionSpec, implementations
from pallas_kernels.flash_attention.hopper.backward_block import row_statistics
from pallas_kernels.flash_attention.hopper.gradients import sink_gradient
from pallas_kernels.flash_attention.implementations import AttentionPlan
from pallas_kernels.flash_attention.spec import BackwardOperands, visible_BTS
from pallas_kernels.flash_attention.validate import make_spec
from tests.kernels.attention_stand_in import STAND_IN

P = PartitionSpec
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


Q, K, V = normal(2, 8, 4, 16), normal(2, 10, 2, 16), normal(2, 10, 2, 24)


def attended(**options) -> jax.Array:
    return jax.jit(functools.partial(flash_attention, **options))(Q, K, V)


def seen(spec: AttentionSpec, T: int, S: int) -> np.ndarray:
    positions = {"q_positions_T": np.arange(T), "kv_positions_S": np.arange(S)}
    visible = visible_BTS(spec, AttentionMasks(), diagonal=S - T, **positions)
    return np.ones((T, S), bool) if visible is None else np.broadcast_to(visible, (1, T, S))[0]


bounds = st.none() | st.integers(0, 12)


@hypothesis.given(st.integers(1, 9), st.integers(1, 9), bounds, bounds, st.booleans())
@hypothesis.settings(deadline=None, max_examples=60)
def test_bounds_that_hide_nothing_are_left_out(T, S, left, right, is_causal):
    spec = make_spec(
        T, S, head_width=4, scale=None, is_causal=is_causal, local_window_size=(left, right),
        logit_soft_cap=None,
    )  # fmt: skip
    given_spec = AttentionSpec(scale=0.5, left=left, right=0 if is_causal else right)
    np.testing.assert_array_equal(seen(spec, T, S), seen(given_spec, T, S))
    for side in ("left", "right"):
        if getattr(spec, side) is not None:  # then it hides something
            alone = AttentionSpec(scale=0.5, **{side: getattr(spec, side)})
            assert not seen(alone, T, S).all()


def test_a_window_of_any_size():
    windows = (2**40, np.int64(2**40), (2**31, None), [np.int32(9), None])

    @jax.jit
    def attend(q, k, v):
        attention = functools.partial(flash_attention, q, k, v, is_causal=True)
        return attention(), [attention(local_window_size=window) for window in windows]

    whole, others = attend(Q, K, V)
    for got in others:
        np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("window", [3.0, "ab", ("1", 2), (True, None, 1), (3.5, 1), -1])
def test_what_is_no_window(window):
    with pytest.raises(InputError, match="local_window_size="):
        flash_attention(Q, K, V, local_window_size=window)


def test_ids_that_int32_cannot_hold_are_refused():
    ids = {"q_segment_ids": np.zeros((2, 8), np.int64), "kv_segment_ids": np.zeros((2, 10), int)}
    whole = attended()
    np.testing.assert_array_equal(attended(**ids), whole)
    for wrong in (
        np.full((2, 8), 2**32),  # 0 in int32
        np.full((2, 8), 2**31),  # negative there
        jnp.zeros((2, 8), jnp.uint32),  # unknown while traced
    ):
        with pytest.raises(InputError, match=r"q_segment_ids is u?int\d+, whose values may not"):
            flash_attention(Q, K, V, **(ids | {"q_segment_ids": wrong}))
    np.testing.assert_array_equal(attended(key_value_seq_lengths=[10, 10]), whole)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_cotangents_of_rows_without_keys_do_not_matter(implementation):
    """Neither NaN for their logsumexp of -inf nor a sink of -inf, which is no sink."""
    sinks = np.float32([0.5, -np.inf, -np.inf, 0.0])
    lengths = np.array([0, 7])

    def attend(q, k, v, sinks):
        return flash_attention(
            q, k, v, sinks=sinks, key_value_seq_lengths=lengths,
            implementation=implementation, return_residual=True,
        )  # fmt: skip

    @jax.jit
    def evaluate(arguments, cotangents):
        results, pull = jax.vjp(attend, *arguments)
        return results, pull(cotangents)

    d_out, d_lse = normal(2, 8, 4, 24), normal(2, 8, 4)
    empty = np.zeros(d_lse.shape, bool)
    empty[0, :, 1:3] = True
    (results, want), (_, got) = (
        jax.device_get(evaluate((Q, K, V, sinks), (d_out, np.where(empty, hidden, d_lse))))
        for hidden in np.float32([0.0, np.nan])
    )
    out, lse = results
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert not out[0].any()
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)
    assert want[3][0] != 0
    assert want[3][1] == 0


def test_cotangents_of_rows_without_keys_on_hopper():
    """What its backward kernels get instead, and its gradient of sinks."""
    out, d_out = normal(1, 3, 2, 8), normal(1, 3, 2, 8)
    lse = np.float32([[[0.1, -np.inf], [-np.inf, 0.3], [1.0, 2.0]]])
    d_lse = np.where(np.isneginf(lse), np.float32(np.nan), np.float32(0.5))
    sinks = np.float32([-np.inf, 0.2])
    q, masks = np.zeros_like(out), AttentionMasks(sinks=sinks)
    operands = BackwardOperands(
        q=q, k=q, v=q, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=d_lse
    )
    lse2, delta = jax.device_get(jax.jit(row_statistics, static_argnums=1)(operands, 4))
    empty = np.isneginf(lse).swapaxes(1, 2)
    np.testing.assert_array_equal(np.isposinf(lse2[..., :3]), empty)
    assert np.isposinf(lse2[..., 3]).all()
    want = np.einsum("btnh,btnh->bnt", out, d_out) - 0.5
    np.testing.assert_allclose(delta[..., :3], np.where(empty, 0.0, want), atol=1e-6)
    got = jax.jit(sink_gradient)(operands)
    finite = np.where(empty, 0.0, lse.swapaxes(1, 2))
    p = np.where(empty, 0.0, np.exp(sinks[:, None] - finite))
    np.testing.assert_allclose(got, -(p * np.where(empty, 0, want)).sum(axis=(0, 2)), rtol=1e-5)


@pytest.mark.parametrize("name", ["xla", "reference", "custom-call"])
def test_keys_split_where_queries_are_not(name):
    """On Explicit axes keys and values are brought to the query's layout."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))

    def attend(q, k, v):
        if name == "custom-call":
            plan = AttentionPlan(implementation=STAND_IN, spec=AttentionSpec(scale=0.25))
            return implementations.attend(plan, q, k, v, AttentionMasks())[0]
        return flash_attention(q, k, v, implementation=name)

    def gradients(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(jnp.ones_like(out))

    want = jax.jit(gradients)(Q, K, V)
    with jax.set_mesh(mesh):
        q = jax.device_put(Q, NamedSharding(mesh, P()))
        k, v = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (K, V))
        got = jax.jit(gradients)(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert got[2].sharding.spec[0] == "data"
