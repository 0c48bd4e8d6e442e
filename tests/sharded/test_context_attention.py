"""Attention over a sharded sequence: what one device computes, forward and all gradients.

The oracle is NumPy in float64, loops and all (tests/kernels/attention_oracle.py); the bound, twice
the error of plain attention on one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import AttentionConfig
from jaxinfra.config.run import AttentionImplementation, ContextMethod
from jaxinfra.ops.attention import attention
from jaxinfra.parallel.context.attend import ContextAttention
from jaxinfra.parallel.context.order import from_zigzag, to_zigzag
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from tests.kernels import attention_oracle
from tests.sharded.cases import COMPILER_OPTIONS
from tests.tolerance import assert_no_worse

B, T, N, H = 2, 48, 8, 8
MESHES = {
    "context2-tensor2-fsdp2": MeshConfig(fsdp=2, context=2, tensor=2),
    "context4": MeshConfig(context=4),
    "context8": MeshConfig(context=8),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    num_kv_heads: int = 4
    causal: bool = True
    window: int | None = None
    packed: bool = False
    cap: float | None = None
    mesh: str = "context4"
    dtype: str = "float32"

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            num_q_heads=N,
            num_kv_heads=self.num_kv_heads,
            head_dim=H,
            rope=None,
            window=self.window,
            logit_soft_cap=self.cap,
        )


CASES = {
    "causal": Case(),
    "full": Case(causal=False),
    "mha-capped": Case(num_kv_heads=8, cap=2.0, mesh="context8"),
    "packed": Case(packed=True, mesh="context2-tensor2-fsdp2"),
    "packed-full": Case(packed=True, causal=False),
    "bf16": Case(dtype="bfloat16", packed=True),
    # Left of a query: less than a chunk of 6, two chunks exactly, across the middle, almost all.
    "window-within-a-chunk": Case(window=4),
    "window-of-chunks": Case(window=13, packed=True),
    "window-long": Case(window=33, mesh="context2-tensor2-fsdp2"),
    "window-almost-all": Case(window=47, packed=True, mesh="context8", num_kv_heads=8),
}
# The ring on all; of the others, windowed all-gather is the same code.
QUICK = {
    ContextMethod.RING: set(CASES),
    ContextMethod.ULYSSES: {"causal", "packed", "window-of-chunks"},
    ContextMethod.ALL_GATHER: {"full", "packed", "bf16"},
}
PAIRS = [
    pytest.param(name, method, marks=() if name in QUICK[method] else pytest.mark.slow)
    for method in QUICK
    for name in CASES
]


def arrays(case: Case):
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(case.dtype))

    K = case.num_kv_heads
    ids = None
    if case.packed:
        ids = np.sort(rng.integers(0, 4, (B, T)), axis=1).astype(np.int32)
        ids[1, T - 7 :] = -1
    return (normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H), normal(B, T, N, H)), ids


def results(attend, case: Case, q, k, v, d_out, ids):
    """out, dq, dk, dv."""
    out, pull = jax.vjp(
        lambda q, k, v: attend(q, k, v, config=case.config, segment_ids_BT=ids), q, k, v
    )
    return out, *pull(d_out)


@functools.cache
def expected(name: str):
    """Plain attention on one device, and the oracle."""
    case = CASES[name]
    (q, k, v, d_out), ids = arrays(case)
    one = functools.partial(
        attention, implementation=AttentionImplementation.REFERENCE, is_causal=case.causal
    )
    plain = jax.jit(functools.partial(results, one, case))(q, k, v, d_out, ids)
    left = None if case.window is None else case.window - 1
    seen = attention_oracle.visible(
        B, T, T, left=left, right=0 if case.causal else None,
        q_ids=ids, kv_ids=ids, q_lengths=None, kv_lengths=None,
    )  # fmt: skip
    exact = attention_oracle.attention(
        q, k, v, d_out, np.zeros((B, T, N)), seen,
        scale=H**-0.5, cap=case.cap, dtype=np.float64,
    )  # fmt: skip
    return plain, tuple(exact[name] for name in ("out", "dq", "dk", "dv"))


def on_mesh(case: Case, method: ContextMethod):
    """A jitted function of arrays in zig-zag order, placed as a model's activations are."""
    mesh = MESHES[case.mesh]
    devices = jax.devices()[: mesh.num_devices]
    placement = Placement(mesh=make_mesh(mesh, devices=devices))
    attend = ContextAttention(placement=placement, method=method, is_causal=case.causal)
    function = functools.partial(results, attend, case)
    return jax.jit(function, compiler_options=COMPILER_OPTIONS), mesh.context


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_equals_one_device(name, method):
    case = CASES[name]
    operands, ids = arrays(case)
    function, num_shards = on_mesh(case, method)
    ordered = [None if x is None else to_zigzag(x, num_shards) for x in (*operands, ids)]
    got = tuple(from_zigzag(np.asarray(x), num_shards) for x in function(*ordered))
    plain, oracle = expected(name)
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"{method} {name}")
