"""Attention under JAX's transformations, and what it keeps in memory."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import flash_attention
from pallas_kernels.flash_attention import LSE_NAME, OUT_NAME, AttentionMasks, AttentionSpec, xla
from pallas_kernels.flash_attention.implementations import AttentionPlan, attend
from pallas_kernels.flash_attention.spec import visible_BTS, visible_tiles
from tests.kernels import attention_oracle
from tests.kernels.attention_stand_in import BOTH, FAST_COMPILE, STAND_IN, results
from tests.tolerance import assert_within_rounding

jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
SPEC = AttentionSpec(scale=0.3, right=0)
X = np.ones((1, 6, 2, 8), np.float32) * np.arange(6, dtype=np.float32)[None, :, None, None]


@pytest.mark.slow_cases("custom-call-False", "xla-True")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_vmap_equals_a_loop(name, sinks):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    masks = AttentionMasks(
        kv_lengths=np.array([[9, 20], [0, 15], [20, 1]]), sinks=normal(3, 4) if sinks else None
    )
    # Keys are shared by the vmapped dim.
    args = (normal(3, 2, 20, 4, 8), normal(2, 20, 2, 8), normal(3, 2, 20, 2, 8), masks)
    args += (normal(3, 2, 20, 4, 8), normal(3, 2, 20, 4))
    one = functools.partial(results, BOTH[name], SPEC)
    mapped = jit(jax.vmap(one, in_axes=(0, None, 0, 0, 0, 0)))(*args)
    alone = jit(one)
    for i in range(3):
        row = jax.tree.map(lambda x: np.asarray(x)[i], (args[0], args[2], *args[3:]))  # noqa: B023
        wants = jax.tree.leaves(alone(row[0], args[1], *row[1:]))
        for got, want in zip(jax.tree.leaves(mapped), wants, strict=True):
            np.testing.assert_allclose(np.asarray(got)[i], want, atol=2e-6)


def count_calls(jaxpr, name: str) -> int:
    """Calls of a named jitted function, a loop's body counted once."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.params.get("name") == name
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr)):
                    total += count_calls(getattr(inner, "jaxpr", inner), name)
    return total


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME), 1),
    ],
    ids=["nothing-saved", "out-and-lse-saved"],
)
def test_remat_in_a_scan_does_not_rerun_what_is_saved_by_name(policy, forwards):
    plan = AttentionPlan(implementation=STAND_IN, spec=SPEC)

    def layer(x, w):
        q = jnp.einsum("btnh,hg->btng", x, w)
        out, _ = attend(plan, q, x, x, AttentionMasks())
        return jnp.tanh(out), None

    def loss(layer, x, w):
        return jnp.sum(jax.lax.scan(layer, x, w)[0])

    x, w = X, np.full((3, 8, 8), np.float32(1 / 9))
    remat = jax.checkpoint(layer, policy=policy)
    grad = jax.grad(loss, argnums=(1, 2))
    jaxpr = jax.make_jaxpr(functools.partial(grad, remat))(x, w)
    assert count_calls(jaxpr.jaxpr, "attention_forward") == forwards
    saved, plain = (jit(functools.partial(grad, f))(x, w) for f in (remat, layer))
    for got, want in zip(saved, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # operations one by one
def test_without_jit():
    x = jnp.asarray(X)
    args = (x, x, x, AttentionMasks(), x, x[..., 0])
    nothing = dict.fromkeys(("q_ids", "kv_ids", "q_lengths", "kv_lengths"))
    seen = attention_oracle.visible(1, 6, 6, left=None, right=0, **nothing)
    true = attention_oracle.attention(
        *(np.asarray(each, np.float64) for each in (x, x, x, x, x[..., 0])),
        seen,
        scale=SPEC.scale,
        kept=jnp.float32,
    )
    want = [true[name] for name in ("out", "lse", "dq", "dk", "dv")]
    with jax.disable_jit():
        got = results(STAND_IN, SPEC, *args)
    for each in (got, jit(functools.partial(results, STAND_IN, SPEC))(*args)):
        assert_within_rounding(jax.tree.leaves(each), want)


def temporary_bytes(implementation: str, length: int) -> int:
    q = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.bfloat16)

    def loss(q, k, v):
        out = flash_attention(q, k, v, is_causal=True, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32))

    compiled = jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_length():
    short, long = (temporary_bytes("xla", length) for length in (4096, 8192))
    # The tile of scores does not grow, all else doubles.
    assert short < long < 2 * short
    # The measure would see a quadratic program.
    assert temporary_bytes("reference", 2048) > 3.5 * temporary_bytes("reference", 1024)


bounds = st.none() | st.integers(0, 30)


@hypothesis.given(
    st.integers(1, 40), st.integers(1, 40), bounds, bounds, st.integers(1, 12), st.integers(1, 12)
)
@hypothesis.settings(deadline=None, max_examples=100)
def test_tiles_are_those_with_a_visible_entry(T, S, left, right, q_tile, kv_tile):
    spec = AttentionSpec(scale=1.0, left=left, right=right)
    positions = {"q_positions_T": np.arange(T), "kv_positions_S": np.arange(S)}
    seen = visible_BTS(spec, AttentionMasks(), diagonal=S - T, **positions)
    seen = np.ones((T, S), bool) if seen is None else np.asarray(seen)[0]
    expected = [
        [i, j]
        for i in range(-(-T // q_tile))
        for j in range(-(-S // kv_tile))
        if seen[i * q_tile : (i + 1) * q_tile, j * kv_tile : (j + 1) * kv_tile].any()
    ]
    tiles = visible_tiles(spec, q_length=T, kv_length=S, q_tile=q_tile, kv_tile=kv_tile)
    assert tiles.tolist() == expected


def test_hidden_tiles_are_not_computed():
    """The loop's trip count is the work: half for causal, the window's share for a window."""

    chunk = xla.longest_chunk(1)

    def trips(**masks):
        x = jax.ShapeDtypeStruct((1, 64 * chunk, 1, 8), jnp.bfloat16)
        attention = functools.partial(flash_attention, implementation="xla", **masks)
        text = str(jax.make_jaxpr(attention)(x, x, x))
        return int(text.split("length=")[1].split()[0])

    assert trips() == 64 * 64
    assert trips(is_causal=True) == 64 * 65 // 2
    assert trips(local_window_size=(2 * chunk, 0)) == 64 * 3 - 3


def test_lengths_of_zero():
    q, empty = np.ones((2, 5, 2, 8), np.float32), np.ones((2, 0, 2, 8), np.float32)
    for implementation in ("xla", "reference"):
        attention = jit(
            functools.partial(flash_attention, implementation=implementation, return_residual=True)
        )
        out, lse = jax.device_get(attention(q, empty, empty))
        assert not out.any()
        assert np.isneginf(lse).all()
        out, lse = attention(empty, q, q)
        assert out.shape == empty.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_portable_path_lowers_to_cuda(dtype):
    """With its operands and accumulators in the program: a CPU has no F16_F16_F32 to test.

    In bf16 without a preset (``common/dot.py``): what says so is the fp32 result.
    """
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), dtype)

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, implementation="xla").astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(x, x, x).lower(lowering_platforms=("cuda",))
    kind = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products
    for line in products:
        assert line.rstrip().endswith("xf32>") or "xf32> loc(" in line
        assert f"x{kind}>, tensor<" in line
        if dtype != "bfloat16":
            assert f"lhs_precision_type = {kind}, rhs_precision_type = {kind}" in line
            assert "accumulation_type = f32" in line
