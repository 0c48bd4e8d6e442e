"""The Hopper kernels themselves under vmap, scan and recomputation, and at a million tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import LSE_NAME, OUT_NAME, dispatch
from tests.kernels import attention_oracle
from tests.tolerance import assert_within_rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]

attend = functools.partial(flash_attention, implementation="hopper")
POLICY = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def assert_close(got, want):
    """Of two calls of one kernel: fp32 sums around it may be taken in another order."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 2.0**-7 * np.abs(b).max()
        assert np.linalg.norm(a - b) <= 2.0**-9 * np.linalg.norm(b)


@pytest.mark.parametrize("sinks", [False, True])
def test_vmap_equals_a_loop(sinks):
    q, k, v, d_out = (normal(i, 3, 2, 200, n, 64) for i, n in enumerate((4, 2, 2, 4)))
    masks = {"key_value_seq_lengths": jnp.asarray([[90, 200], [0, 150], [200, 1]])}
    if sinks:
        masks["sinks"] = jax.random.normal(jax.random.key(9), (3, 4))

    def gradients(q, k, v, masks, d_out):
        out, pull = jax.vjp(lambda *x: attend(*x, is_causal=True, **masks), q, k, v)
        return out, pull(d_out)

    # Keys are shared by the vmapped dim.
    mapped = jax.jit(jax.vmap(gradients, in_axes=(0, None, 0, 0, 0)))(q, k[0], v, masks, d_out)
    alone = jax.jit(gradients)
    for i in range(3):
        one = jax.tree.map(lambda x: x[i], (q, v, masks, d_out))  # noqa: B023
        want = alone(one[0], k[0], *one[1:])
        assert_close(jax.tree.map(lambda x: x[i], mapped), want)  # noqa: B023


def test_recomputation_in_a_scan_keeps_what_is_named():
    x, w = normal(0, 1, 256, 4, 64), normal(1, 3, 64, 64) / 8

    def layer(x, w):
        q = jnp.einsum("btnh,hg->btng", x, w)
        return jnp.tanh(attend(q, x, x, is_causal=True)), None

    def gradient(policy):
        body = jax.checkpoint(layer, policy=policy)
        loss = lambda x, w: jnp.sum(jax.lax.scan(body, x, w)[0].astype(jnp.float32))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile()

    policies = jax.checkpoint_policies
    nothing = gradient(policies.nothing_saveable)
    named = gradient(policies.save_only_these_names(OUT_NAME, LSE_NAME))
    kernels = [f.as_text().count('custom_call_target="mosaic_gpu') for f in (nothing, named)]
    assert kernels == [3, 2], "forward, forward again, backward; and without the second forward"
    assert_close(named(x, w), nothing(x, w))


def test_a_million_tokens():
    """Arrays of more elements than int32 counts: each part of rows equals its own small call."""
    T, N, K, H, left = 2**20, 32, 4, 128, 127
    parts = [0, T // 2 - 100, T - 256]  # byte 2**32 of q lies in the second

    def array(seed, heads):
        # Of other values in every head, without random numbers of so many.
        base = jax.random.normal(jax.random.key(seed), (1, T, 1, H), jnp.bfloat16)
        heads = jnp.linspace(0.5, 1.5, heads, dtype=jnp.bfloat16)[None, None, :, None]
        return jnp.broadcast_to(base, (1, T, heads.shape[2], H)) * heads

    def gradients(attend, q, k, v, d_out):
        window = {"is_causal": True, "local_window_size": (left, 0)}
        out, pull = jax.vjp(lambda *x: attend(*x, **window), q, k, v)
        return out, *pull(d_out)

    @jax.jit
    def kernel():
        operands = tuple(array(seed, heads) for seed, heads in enumerate((N, K, K, N)))
        results = gradients(attend, *operands)
        pieces = []
        for start in parts:
            keys = slice(max(0, start - left), start + 256)
            rows = slice(start, start + 256)
            q, k, v, d_out = operands
            out, dq, dk, dv = results
            # Of these keys, those that no later query sees.
            inner = slice(start, start + 256 - left) if start < T - 256 else rows
            pieces.append(
                (
                    (q[:, rows], k[:, keys], v[:, keys], d_out[:, rows]),
                    (out[:, rows], dq[:, rows], dk[:, inner], dv[:, inner]),
                )
            )
        return pieces

    for start, (operands, got) in zip(parts, kernel(), strict=True):
        before = operands[1].shape[1] - 256
        inner = slice(before, before + got[2].shape[1])
        q, k, v, d_out = (np.asarray(x, np.float64) for x in operands)
        seen = attention_oracle.visible(
            1, 256, before + 256, left=left, right=0, q_ids=None, kv_ids=None, q_lengths=None,
            kv_lengths=None,
        )  # fmt: skip
        oracle = attention_oracle.attention(
            q, k, v, d_out, np.zeros(q.shape[:3]), seen, scale=H**-0.5, kept=jnp.bfloat16
        )
        want = (oracle["out"], oracle["dq"], oracle["dk"][:, inner], oracle["dv"][:, inner])
        assert_within_rounding(got, want, what=f"rows from {start}")


def test_a_forward_alone_takes_another(monkeypatch):
    def preferences(call, *, gradient):
        return ["hopper" if gradient else "cudnn"]

    monkeypatch.setattr(dispatch, "preferences", preferences)
    q, k, v, d_out = (normal(i, 2, 256, n, 64) for i, n in enumerate((4, 2, 2, 4)))

    def function(name):
        @functools.partial(jax.checkpoint, policy=POLICY)
        def layer(x, kv):
            return flash_attention(x, *kv, is_causal=True, implementation=name), None

        return lambda q, k, v: jax.lax.scan(layer, q, (jnp.stack([k, -k]), jnp.stack([v, v])))[0]

    def gradients(name):
        out, pull = jax.vjp(function(name), q, k, v)
        return out, pull(d_out)

    alone, cudnn = jax.jit(function("auto")), jax.jit(function("cudnn"))
    np.testing.assert_array_equal(alone(q, k, v), cudnn(q, k, v))
    assert_close(jax.jit(gradients, static_argnums=0)("auto"), gradients("hopper"))
