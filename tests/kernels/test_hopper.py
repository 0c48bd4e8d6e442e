"""The Hopper attention kernels without a GPU: values in the interpreter, lowering for every form.

The interpreter lacks matmul operands in registers, adding copies and inline code, so it runs the
kernels' ``interpretable`` form; the real form is held to lower here and to be right on a GPU.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.flash_attention import hopper
from pallas_kernels.flash_attention.hopper import (
    backward_by_columns,
    backward_by_keys,
    forward_kernel,
)
from pallas_kernels.flash_attention.hopper.config import BackwardConfig, ForwardConfig
from pallas_kernels.flash_attention.spec import AttentionMasks, AttentionSpec, BackwardOperands
from tests.kernels import attention_oracle

# Outputs and gradients carry bf16 rounding of the result, of P and of dS: 2**-9 each.
BF16_ERROR = 5e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    T: int
    S: int | None = None
    B: int = 1
    N: int = 2
    K: int = 1
    H: int = 64
    Hv: int | None = None
    left: int | None = None
    right: int | None = None
    cap: float | None = None
    segments: bool = False
    lengths: bool = False
    sinks: bool = False

    @property
    def spec(self):
        return AttentionSpec(
            scale=self.H**-0.5, left=self.left, right=self.right, logit_soft_cap=self.cap
        )

    def arrays(self):
        rng = np.random.default_rng(0)
        S, Hv = self.S or self.T, self.Hv or self.H
        shapes = (
            (self.B, self.T, self.N, self.H),
            (self.B, S, self.K, self.H),
            (self.B, S, self.K, Hv),
            (self.B, self.T, self.N, Hv),
        )
        q, k, v, d_out = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
        d_lse = jnp.asarray(rng.normal(size=(self.B, self.T, self.N)), jnp.float32)
        return q * 2, k, v, d_out, d_lse

    def masks(self):
        rng = np.random.default_rng(1)
        S, arrays = self.S or self.T, {}
        if self.segments:
            arrays["q_segment_ids"] = np.sort(rng.integers(-1, 3, (self.B, self.T)), axis=1)
            arrays["kv_segment_ids"] = np.sort(rng.integers(-1, 3, (self.B, S)), axis=1)
        if self.lengths:
            arrays["q_lengths"] = np.full((self.B,), self.T - 9)
            arrays["kv_lengths"] = np.full((self.B,), S - 70)
        arrays = {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
        if self.sinks:
            arrays["sinks"] = jnp.linspace(-1.0, 1.0, self.N, dtype=jnp.float32)
        return AttentionMasks(**arrays)

    def oracle(self):
        q, k, v, d_out, d_lse = self.arrays()
        m = self.masks()
        seen = attention_oracle.visible(
            self.B, self.T, self.S or self.T, left=self.left, right=self.right,
            q_ids=_numpy(m.q_segment_ids), kv_ids=_numpy(m.kv_segment_ids),
            q_lengths=_numpy(m.q_lengths), kv_lengths=_numpy(m.kv_lengths),
        )  # fmt: skip
        return attention_oracle.attention(
            *(np.asarray(x, np.float64) for x in (q, k, v, d_out, d_lse)), seen,
            scale=self.spec.scale, cap=self.cap, sinks=_numpy(m.sinks),
        )  # fmt: skip


def _numpy(x):
    return None if x is None else np.asarray(x)


def relative(got, want):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / np.linalg.norm(want)


QUICK = [
    Case(T=136),
    Case(T=77, S=139, right=0),
]
THOROUGH = [
    Case(T=139, S=77, right=0),
    Case(T=200, right=0, B=2, N=4, K=2),
    Case(T=300, right=0, left=40),
    Case(T=200, left=17, right=9),
    Case(T=200, B=2, segments=True),
    Case(T=200, right=0, segments=True, lengths=True),
    Case(T=136, right=0, cap=5.0, sinks=True),
    Case(T=136, H=96, right=0),
]
CASES = [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in THOROUGH)]


@pytest.mark.slow_cases(
    "Case(T=136, S=None, B=1, N=2, K=1, H=64, Hv=None, left=None, right=None, cap=None, "
    "segments=False, lengths=False, sinks=False)"
)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_the_oracle(case):
    q, k, v, _, _ = case.arrays()
    want = case.oracle()
    f = functools.partial(
        hopper.forward,
        spec=case.spec,
        config=ForwardConfig(block_kv=64),
        interpretable=True,
    )
    out, lse = jax.jit(f)(q, k, v, case.masks())
    assert relative(out, want["out"]) < BF16_ERROR
    empty = np.isneginf(want["lse"])
    np.testing.assert_array_equal(np.isneginf(np.asarray(lse)), empty)
    np.testing.assert_allclose(np.asarray(lse)[~empty], want["lse"][~empty], atol=1e-5)
    assert not np.asarray(out, np.float32)[empty].any()


def gradients_of(case, form, interpretable):
    """The gradients by one of the kernels, from the oracle's out and logsumexp."""
    q, k, v, d_out, d_lse = case.arrays()
    want = case.oracle()
    out, lse = jnp.asarray(want["out"], q.dtype), jnp.asarray(want["lse"], jnp.float32)
    backward, options = form
    f = functools.partial(backward, spec=case.spec, interpretable=interpretable, **options)
    operands = BackwardOperands(
        q=q, k=k, v=v, masks=case.masks(), out=out, lse=lse, d_out=d_out, d_lse=d_lse
    )
    got = jax.jit(f)(operands)
    return got, want


BY_KEYS = (backward_by_keys.backward, {"config": BackwardConfig()})
DQ_WARPGROUP = (
    backward_by_keys.backward,
    {"config": BackwardConfig(dq_warpgroup=True, num_stages=3)},
)
BY_COLUMNS = (backward_by_columns.backward, {})


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", [*QUICK, *THOROUGH], ids=str)
def test_backward_is_the_oracle(case):
    got, want = gradients_of(case, BY_KEYS, interpretable=True)
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert relative(gradient, want[name]) < BF16_ERROR, name


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", [QUICK[1], *THOROUGH[1:5]], ids=str)
def test_backward_with_a_warpgroup_for_dq_is_the_oracle(case):
    got, want = gradients_of(case, DQ_WARPGROUP, interpretable=True)
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert relative(gradient, want[name]) < BF16_ERROR, name


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("num_warpgroups", [2, 3])
@pytest.mark.parametrize("case", [THOROUGH[1], THOROUGH[2], QUICK[1]], ids=str)
def test_persistent_forward_is_the_oracle(case, num_warpgroups, monkeypatch):
    """Three blocks, which take several tiles each, of different lengths."""
    monkeypatch.setattr(forward_kernel, "NUM_PROCESSORS", 3)
    q, k, v, _, _ = case.arrays()
    config = ForwardConfig(block_kv=64, num_warpgroups=num_warpgroups, persistent=True)
    f = functools.partial(hopper.forward, spec=case.spec, config=config, interpretable=True)
    out, _ = jax.jit(f)(q, k, v, case.masks())
    assert relative(out, case.oracle()["out"]) < BF16_ERROR


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "case",
    [
        Case(T=136, H=256, right=0),
        Case(T=200, H=192, right=0, left=50, segments=True),
        Case(T=136, H=256, right=0, cap=5.0),
        Case(T=136, H=192, Hv=128, right=0),
    ],
    ids=str,
)
def test_backward_of_wide_heads_is_the_oracle(case):
    got, want = gradients_of(case, BY_COLUMNS, interpretable=True)
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert relative(gradient, want[name]) < BF16_ERROR, name


WIDTHS = [
    (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 128),
    (192, 192), (256, 256),
]  # fmt: skip
SPECS = {
    "full": {},
    "causal": {"right": 0},
    "window": {"right": 0, "left": 1023},
    "capped": {"right": 0, "logit_soft_cap": 30.0},
    "capped window": {"right": 0, "left": 1023, "logit_soft_cap": 30.0},
}


def operands(H, Hv, T=2048, dtype=jnp.bfloat16):
    shape = jax.ShapeDtypeStruct
    q, k = shape((2, T, 8, H), dtype), shape((2, T, 2, H), dtype)
    return q, k, shape((2, T, 2, Hv), dtype), shape((2, T, 8, Hv), dtype)


def length_of(kind: str) -> int:
    """Copies of tiles have another form where 8 does not divide the length."""
    return 2043 if "capped" in kind else 2048


def lowers(f, *args):
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


LIKE_ANOTHER = {(72, 72), (80, 80), (112, 112), (160, 160), (192, 192)}


# By default one; the backward pass is lowered with documents below. Each width and mask by itself
# says where a fault is.
@pytest.mark.slow  # by default `test_attention_choice.py` lowers a forward kernel
@pytest.mark.parametrize(("widths", "kind"), list(itertools.product(WIDTHS, SPECS)), ids=str)
def test_forward_lowers(widths, kind):
    q, k, v, _ = operands(*widths, T=length_of(kind))
    spec = AttentionSpec(scale=widths[0] ** -0.5, **SPECS[kind])
    masks = AttentionMasks()
    assert hopper.unsupported(spec, masks, q, k, v) is None
    lowers(functools.partial(hopper.forward, spec=spec), q, k, v, masks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "kind"),
    [
        *itertools.product(WIDTHS, ["full", "causal", "window"]),
        *itertools.product([(128, 128), (256, 256)], ["capped"]),
    ],
)
def test_backward_lowers(widths, kind):
    q, k, v, out = operands(*widths, T=length_of(kind))
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    spec = AttentionSpec(scale=widths[0] ** -0.5, **SPECS[kind])
    f = functools.partial(hopper.backward, spec=spec)
    lowers(
        f,
        BackwardOperands(
            q=q, k=k, v=v, masks=AttentionMasks(), out=out, lse=lse, d_out=out, d_lse=lse
        ),
    )


@pytest.mark.slow_cases("(64, 64)", "(96, 96)", "(128, 128)", "(192, 128)", "(256, 256)")
@pytest.mark.parametrize(
    "widths",
    [pytest.param(w, marks=[pytest.mark.slow] * (w in LIKE_ANOTHER), id=str(w)) for w in WIDTHS],
)
def test_backward_of_packed_documents_fits_shared_memory(widths):
    q, k, v, out = operands(*widths)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    spec = AttentionSpec(scale=widths[0] ** -0.5, right=0)

    def f(q, k, v, out, lse, d_out, ids):
        masks = AttentionMasks(q_segment_ids=ids, kv_segment_ids=ids)
        operands = BackwardOperands(
            q=q, k=k, v=v, masks=masks, out=out, lse=lse, d_out=d_out, d_lse=None
        )
        return hopper.backward(operands, spec=spec)

    lowers(f, q, k, v, out, lse, out, ids)


@pytest.mark.parametrize(
    ("widths", "masks", "spec", "words"),
    [
        ((88, 88), {}, {}, "88/88"),
        ((128, 64), {}, {}, "128/64"),
        ((64, 64), {"bias": jnp.zeros((1, 1, 8, 8))}, {}, "bias"),
        ((64, 64), {}, {"scale": -1.0}, "scale=-1.0"),
    ],
    ids=["width", "value width", "bias", "scale"],
)
def test_forward_refuses(widths, masks, spec, words):
    q, k, v, _ = operands(*widths, T=8)
    spec = AttentionSpec(**{"scale": 1.0, **spec})
    masks = AttentionMasks(**masks)
    assert words in hopper.unsupported(spec, masks, q, k, v)
    with pytest.raises(UnsupportedError, match=words.replace(".", r"\.")):
        jax.eval_shape(functools.partial(hopper.forward, spec=spec), q, k, v, masks)


def test_tiles_that_exceed_shared_memory_are_refused_before_the_compiler():
    q, k, v, _ = operands(256, 256)
    f = functools.partial(
        hopper.forward, spec=AttentionSpec(scale=1.0), config=ForwardConfig(block_kv=128)
    )
    with pytest.raises(UnsupportedError, match="shared memory"):
        jax.eval_shape(f, q, k, v, AttentionMasks())
