"""Heads of a packed product into pages: the kernel in the interpreter, lowering, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError, append_heads
from pallas_kernels.common import device
from pallas_kernels.paged_attention.hopper import append_heads_hopper
from tests.rounding import Rounded
from tests.tolerance import assert_within_rounding


def operands(B=3, T=2, N=8, K=4, H=64, dtype="bfloat16"):
    """A row over the edge of a page, one into a page that it does not have, one of padding."""
    rng = np.random.default_rng(0)
    heads = jnp.asarray(rng.normal(size=(B, T, N + 2 * K, H)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(7, 16, K, H)), dtype) for _ in range(2))
    tables = np.array([[1, 2], [3, -1], [4, 5]], np.int32)
    positions = np.array([[15, 16], [9, 20], [31, -1]], np.int32)[:, -T:]
    angles = rng.uniform(0, 6, (B, T, H // 2)).astype(np.float32)
    return heads, k, v, tables, positions, (np.cos(angles), np.sin(angles))


def definition(heads, k, v, tables, positions, rope):
    """Queries and pools by loops over tokens; queries of padding are left out."""
    num_kv, size = k.shape[2], k.shape[1]
    num_q = heads.shape[2] - 2 * num_kv
    heads, want_k, want_v = (np.asarray(x, np.float64) for x in (heads, k, v))
    half = heads.shape[3] // 2
    first, second = Rounded(heads[..., :half]), Rounded(heads[..., half:])
    cos, sin = (Rounded(np.asarray(x, np.float64)[:, :, None]) for x in rope)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    want_k = Rounded(want_k)
    for row, token in np.ndindex(*positions.shape):
        place, slot = divmod(int(positions[row, token]), size)
        if positions[row, token] >= 0 and tables[row, place] >= 0:
            want_k[tables[row, place], slot] = turned[row, token, num_q : num_q + num_kv]
            want_v[tables[row, place], slot] = heads[row, token, num_q + num_kv :]
    return turned[:, :, :num_q], want_k, want_v


@pytest.mark.parametrize("form", ["xla", "kernel"])
def test_heads_go_where_the_tables_say(form):
    arguments = operands()
    if form == "kernel":
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            q, k, v = jax.jit(append_heads_hopper)(*arguments)
    else:
        q, k, v = jax.jit(functools.partial(append_heads, implementation="xla"))(*arguments)
    want_q, want_k, want_v = definition(*arguments)
    is_there = arguments[4] >= 0
    assert_within_rounding(q[is_there], want_q[is_there])
    assert_within_rounding(k, want_k)
    np.testing.assert_array_equal(np.asarray(v, np.float64), want_v)
    # A slot too far, or keys that are not turned, are no rounding.
    wrong = definition(*arguments[:4], arguments[4] - 1, arguments[5])
    with pytest.raises(AssertionError):
        assert_within_rounding(k, wrong[1])
    cos, sin = arguments[5]
    with pytest.raises(AssertionError):
        assert_within_rounding(k, definition(*arguments[:5], (cos, -sin))[1])


@pytest.mark.parametrize("case", [{"H": 64}, {"H": 128, "N": 32, "K": 8}, {"H": 256}], ids=str)
def test_pools_are_written_in_place(case):
    with device.compiling_for(device.H200):
        traced = jax.jit(append_heads, donate_argnums=(1, 2)).trace(*operands(**case))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 2
    assert "scatter" not in text


def test_what_does_not_fit_is_refused():
    heads, k, v, *rest = operands()
    with pytest.raises(InputError, match="go into pools"):
        append_heads(heads[:, :, :8], k, v, *rest)
    tables, positions, rope = rest
    with pytest.raises(InputError, match=r"positions are \[B, T\]"):
        append_heads(heads, k, v, tables, positions.T, rope)
    with pytest.raises(InputError, match=r"tables \[B, M\]"):
        append_heads(heads, k, v, tables[:2], positions, rope)
    with pytest.raises(InputError, match="triton"):
        append_heads(heads, k, v, *rest, implementation="triton")  # pyrefly: ignore[bad-argument-type]
    hopper = functools.partial(append_heads, implementation="hopper")
    with pytest.raises(UnsupportedError, match="Hopper"):
        hopper(heads, k, v, *rest)
    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="multiples of 4"):
            hopper(heads[:, :, :12], k[:, :, :2], v[:, :, :2], *rest)
        half = tuple(x[..., :16] for x in rest[-1])
        with pytest.raises(UnsupportedError, match="all must"):
            hopper(heads, k, v, *rest[:-1], half)
        with pytest.raises(UnsupportedError, match="not one of"):
            hopper(heads.astype(jnp.float32), k, v, *rest)
