"""Attention calls that every implementation is tested on: what is masked, and on which shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import flash_attention
from tests.kernels import attention_oracle
from tests.rounding import Rounded
from tests.seeds import seeded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths are odd on purpose: nothing may demand a divisor."""

    name: str
    B: int = 2
    T: int = 77
    S: int = 77
    N: int = 4
    K: int = 2
    H: int = 64
    V: int = 64
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    segments: bool = False
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    sink_off: bool = False  # the first sink is -inf: none
    bias: tuple[int, ...] | None = None
    outliers: bool = False
    dtypes: tuple[str, ...] = ("float32",)  # in the suite for CPUs; () leaves it to the GPU's


_F16, _BF16, _BOTH = ("float16",), ("bfloat16",), ("float32", "bfloat16")
_ALL = ("float32", "bfloat16", "float16")

CASES = (
    Case(name="full", dtypes=_F16),
    Case(name="causal", N=8, causal=True, dtypes=_BOTH),
    Case(name="causal-more-keys", T=41, S=90, causal=True),
    Case(name="causal-more-queries", T=90, S=41, causal=True),  # the first 49 rows see nothing
    Case(name="decode", T=1, S=83, causal=True, dtypes=_BF16),
    Case(name="window", window=(13, 5)),
    Case(name="window-left", window=(20, 0), T=100, S=100, dtypes=_BF16),
    Case(name="window-open-left", window=(None, 7), T=60, S=85),
    Case(name="window-open-right", window=(4, None), dtypes=()),
    Case(name="window-of-two", window=(1, 0), T=50, S=50),
    Case(name="packed", segments=True, causal=True, dtypes=_BF16),
    Case(name="packed-cross", segments=True, T=60, S=85),
    Case(name="lengths", q_lengths=(77, 30), kv_lengths=(0, 55)),
    Case(name="lengths-causal", q_lengths=(50, 77), kv_lengths=(33, 64), causal=True, dtypes=()),
    Case(name="soft-cap", cap=1.5, dtypes=()),
    Case(name="soft-cap-causal", cap=30.0, causal=True, outliers=True, dtypes=_BF16),
    Case(name="sinks", sinks=True, causal=True, dtypes=_BF16),
    Case(name="sinks-empty-rows", sinks=True, kv_lengths=(0, 70)),
    Case(name="sinks-and-one-off", sinks=True, sink_off=True, kv_lengths=(0, 70)),
    Case(name="scale", scale=0.7, causal=True, dtypes=()),
    Case(name="scale-negative", scale=-0.3, causal=True),
    Case(name="scale-zero", scale=0.0, dtypes=()),
    Case(name="bias", bias=(2, 4, 77, 77)),
    Case(name="bias-broadcast", bias=(1, 4, 1, 77), causal=True, cap=5.0, dtypes=_BF16),
    Case(name="bias-of-queries", bias=(2, 1, 77, 1), segments=True),
    Case(name="outliers", outliers=True, dtypes=_F16),
    Case(name="outliers-causal", outliers=True, causal=True, H=128, V=128, dtypes=_BF16),
    Case(name="everything", causal=True, window=(40, 3), segments=True, kv_lengths=(60, 77),
         q_lengths=(77, 66), cap=4.0, sinks=True, scale=0.2, T=61, S=77, N=6, dtypes=_ALL),
    Case(name="mha", N=3, K=3, causal=True),
    Case(name="gqa-3", N=6, K=2, causal=True, dtypes=()),
    Case(name="gqa-8", N=16, K=2, T=40, S=40, causal=True, dtypes=_F16),
    Case(name="mqa", N=5, K=1, causal=True),
    Case(name="width-72", H=72, V=72, causal=True, dtypes=_BF16),
    Case(name="width-80", H=80, V=80, causal=True, dtypes=_BF16),
    Case(name="width-112", H=112, V=112, causal=True, dtypes=_BF16),
    Case(name="width-160", H=160, V=160, N=2, causal=True, dtypes=_BF16),
    Case(name="width-96", H=96, V=96, causal=True, dtypes=_F16),
    Case(name="width-256", H=256, V=256, N=2, causal=True, dtypes=_BF16),
    Case(name="mla", H=192, V=128, N=2, causal=True, dtypes=_BF16),
)  # fmt: skip

_GPU = {"dtypes": ()}
LONG = (
    Case(name="long-causal", T=515, S=515, N=8, H=128, V=128, causal=True, outliers=True, **_GPU),
    Case(name="long-more-keys", T=300, S=741, N=2, K=1, causal=True, **_GPU),
    Case(name="long-more-queries", T=600, S=300, H=128, V=128, causal=True, **_GPU),
    Case(name="long-window", T=700, S=700, window=(130, 0), outliers=True, **_GPU),
    Case(name="long-window-both", T=400, S=650, H=128, V=128, window=(170, 90), **_GPU),
    Case(name="long-packed", T=900, S=900, segments=True, causal=True, H=128, V=128, **_GPU),
    Case(name="long-lengths", T=500, S=450, q_lengths=(500, 130), kv_lengths=(0, 333), **_GPU),
    Case(name="long-everything", T=461, S=577, N=6, causal=True, window=(240, 3), segments=True,
         kv_lengths=(460, 577), q_lengths=(461, 300), cap=4.0, sinks=True, H=128, V=128, **_GPU),
    Case(name="long-80", T=300, S=430, H=80, V=80, causal=True, window=(150, 0), segments=True,
         sinks=True, **_GPU),
    Case(name="long-96", T=411, S=411, H=96, V=96, causal=True, kv_lengths=(300, 411), cap=5.0,
         outliers=True, **_GPU),
    Case(name="long-mla", T=330, S=460, H=192, V=128, causal=True, segments=True, sinks=True,
         **_GPU),
    Case(name="long-192", T=300, S=300, H=192, V=192, causal=True, window=(140, 0), cap=2.0,
         **_GPU),
    Case(name="long-256", T=333, S=400, H=256, V=256, causal=True, window=(190, 0), segments=True,
         kv_lengths=(390, 400), sinks=True, **_GPU),
    Case(name="long-256-more-queries", T=300, S=170, N=2, K=1, H=256, V=256, causal=True,
         outliers=True, **_GPU),
    Case(name="long-256-soft-cap", T=411, S=411, H=256, V=256, causal=True, window=(300, 0),
         cap=50.0, scale=0.2, outliers=True, **_GPU),
)  # fmt: skip
"""Several tiles in both dims, of every width: for kernels alone, the oracle takes seconds."""

NAMED = {case.name: case for case in (*CASES, *LONG)}


def arguments(case: Case, dtype) -> tuple[dict, dict]:
    """(differentiable arguments, the others) of ``flash_attention``, and cotangents under "d_"."""
    rng = np.random.default_rng(seeded(sum(map(ord, case.name))))
    B, T, S, N, K, H, V = (getattr(case, dim) for dim in "BTSNKHV")

    def normal(*shape):
        x = rng.standard_normal(shape, dtype=np.float32)
        if case.outliers:
            # A few channels much larger than the rest, as trained models have.
            x = np.where(rng.random(shape[-1]) < 0.05, 8 * x, x)
        return jnp.asarray(x.astype(dtype))

    arrays = {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, V)}
    if case.sinks:
        sinks = rng.standard_normal(N, dtype=np.float32)
        sinks[0] = -np.inf if case.sink_off else sinks[0]
        arrays["sinks"] = jnp.asarray(sinks)
    if case.bias is not None:
        arrays["bias"] = normal(*case.bias)
    others = {
        "is_causal": case.causal,
        "local_window_size": case.window,
        "logit_soft_cap": case.cap,
        "scale": case.scale,
    }
    if case.segments:
        for name, length in (("q_segment_ids", T), ("kv_segment_ids", S)):
            ids = np.sort(rng.integers(0, 3, (B, length)), axis=1)
            ids[:, length - 6 :] = -1  # padding at the end of a packed row
            others[name] = jnp.asarray(ids, jnp.int32)
    if case.q_lengths is not None:
        others["query_seq_lengths"] = jnp.asarray(case.q_lengths[:B], jnp.int32)
    if case.kv_lengths is not None:
        others["key_value_seq_lengths"] = jnp.asarray(case.kv_lengths[:B], jnp.int32)
    return arrays, others


def cotangents(case: Case, dtype) -> tuple[jax.Array, jax.Array]:
    """d_out and d_lse; d_lse also on rows whose logsumexp is -inf, where it must not matter."""
    rng = np.random.default_rng(seeded(1 + sum(map(ord, case.name))))
    d_out = rng.standard_normal((case.B, case.T, case.N, case.V), dtype=np.float32)
    d_lse = rng.standard_normal((case.B, case.T, case.N), dtype=np.float32)
    return jnp.asarray(d_out.astype(dtype)), jnp.asarray(d_lse)


def run(case: Case, dtype, *, residual: bool = True, **options) -> dict[str, jax.Array]:
    """out, lse and all gradients of one implementation."""
    arrays, others = arguments(case, dtype)
    d_out, d_lse = cotangents(case, dtype)

    @jax.jit
    def results(arrays):
        def attend(arrays):
            return flash_attention(**arrays, **others, **options, return_residual=residual)

        outs, pull = jax.vjp(attend, arrays)
        grads = pull((d_out, d_lse) if residual else d_out)[0]
        return outs if residual else (outs, None), grads

    (out, lse), grads = results(arrays)
    named = {"query": "dq", "key": "dk", "value": "dv", "sinks": "d_sinks", "bias": "d_bias"}
    result = {"out": out} | ({"lse": lse} if residual else {})
    return result | {named[name]: grad for name, grad in grads.items()}


def oracle(case: Case, input_dtype, *, residual: bool = True) -> dict[str, Rounded]:
    """The same results in NumPy, from the inputs as rounded to ``input_dtype``."""
    arrays, others = arguments(case, input_dtype)
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    d_out, d_lse = (np.asarray(x, np.float64) for x in cotangents(case, input_dtype))
    left, right = case.window or (None, None)
    seen = attention_oracle.visible(
        case.B,
        case.T,
        case.S,
        left=left,
        right=0 if case.causal else right,
        q_ids=_array(others.get("q_segment_ids")),
        kv_ids=_array(others.get("kv_segment_ids")),
        q_lengths=_array(others.get("query_seq_lengths")),
        kv_lengths=_array(others.get("key_value_seq_lengths")),
    )
    result = attention_oracle.attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        d_out,
        d_lse if residual else np.zeros_like(d_lse),
        seen,
        scale=case.H**-0.5 if case.scale is None else case.scale,
        cap=case.cap,
        sinks=arrays.get("sinks"),
        bias=arrays.get("bias"),
        kept=input_dtype,
    )
    if not residual:
        del result["lse"]
    return result


def _array(x):
    return None if x is None else np.asarray(x)


@functools.cache
def expected(case: Case, dtype_name: str, *, residual: bool = True) -> dict[str, Rounded]:
    """The oracle, computed once for all implementations that are compared with it."""
    return oracle(case, jnp.dtype(dtype_name), residual=residual)
