"""Attention over a sharded sequence: what one device computes, forward and all gradients.

The oracle is NumPy in float64, loops and all (tests/kernels/attention_oracle.py); the bound, what
rounding may do.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.run import AttentionImplementation, ContextMethod
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.hlo.program import Collective, collectives
from jaxinfra.parallel.context import halo
from jaxinfra.parallel.context.methods import ContextAttention, context_bytes
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.zigzag import from_zigzag, to_zigzag, zigzag_indices
from tests.kernels import attention_oracle
from tests.seeds import seeded
from tests.sharded.cases import COMPILER_OPTIONS
from tests.tolerance import assert_within_rounding

B, T, N, H = 2, 48, 8, 8
MESHES = {
    "context2-tensor2-fsdp2": MeshConfig(fsdp=2, context=2, tensor=2),
    "context4": MeshConfig(context=4),
    "context8": MeshConfig(context=8),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    num_kv_heads: int = 4
    window: int | None = None
    packed: bool = False
    cap: float | None = None
    mesh: str = "context4"
    dtype: str = "float32"

    @property
    def config(self) -> GroupedAttentionConfig:
        return GroupedAttentionConfig(
            num_q_heads=N,
            num_kv_heads=self.num_kv_heads,
            head_dim=H,
            rope=None,
            window=self.window,
            logit_soft_cap=self.cap,
        )


CASES = {
    "causal": Case(),
    "mha-capped": Case(num_kv_heads=8, cap=2.0),
    "causal-on-8": Case(num_kv_heads=8, mesh="context8"),
    "packed": Case(packed=True, mesh="context2-tensor2-fsdp2"),
    "bf16": Case(dtype="bfloat16", packed=True),
    # Left of a query: less than a chunk of 6, two chunks exactly, across the middle, almost all.
    "window-within-a-chunk": Case(window=4),
    "window-of-chunks": Case(window=13, packed=True),
    "window-long": Case(window=33, mesh="context2-tensor2-fsdp2"),
    "window-almost-all": Case(window=47, packed=True, mesh="context8", num_kv_heads=8),
}
QUICK = {
    ContextMethod.RING: {"mha-capped", "packed", "bf16", "window-of-chunks"},
    ContextMethod.ULYSSES: {"window-of-chunks"},
    ContextMethod.ALL_GATHER: {"packed"},
}
PAIRS = [
    pytest.param(name, method, marks=() if name in QUICK[method] else pytest.mark.slow)
    for method in QUICK
    for name in CASES
]


def arrays(case: Case):
    rng = np.random.default_rng(seeded(7))

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
    """The oracle."""
    case = CASES[name]
    (q, k, v, d_out), ids = arrays(case)
    left = None if case.window is None else case.window - 1
    seen = attention_oracle.visible(
        B, T, T, left=left, right=0,
        q_ids=ids, kv_ids=ids, q_lengths=None, kv_lengths=None,
    )  # fmt: skip
    exact = attention_oracle.attention(
        q, k, v, d_out, np.zeros((B, T, N)), seen,
        scale=H**-0.5, cap=case.cap, kept=jnp.dtype(case.dtype),
    )  # fmt: skip
    return tuple(exact[name] for name in ("out", "dq", "dk", "dv"))


def context_attention(case: Case, method: ContextMethod) -> ContextAttention:
    mesh = MESHES[case.mesh]
    placement = Placement(mesh=make_mesh(mesh, devices=jax.devices()[: mesh.num_devices]))
    return ContextAttention(placement=placement, method=method)


@pytest.mark.slow_cases(
    "bf16-ring", "window-of-chunks-ring", "packed-all_gather", "mha-capped-ring"
)
@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_equals_one_device(name, method):
    case = CASES[name]
    operands, ids = arrays(case)
    function = jax.jit(
        functools.partial(results, context_attention(case, method), case),
        compiler_options=COMPILER_OPTIONS,
    )
    num_shards = MESHES[case.mesh].context
    ordered = [None if x is None else to_zigzag(x, num_shards) for x in (*operands, ids)]
    got = tuple(from_zigzag(np.asarray(x), num_shards) for x in function(*ordered))
    assert_within_rounding(got, expected(name), what=f"{method} {name}")


def orders(num_shards: int) -> list[int]:
    """Blocks of work of each device: a chunk and those before it, for both of its chunks."""
    chunks = zigzag_indices(2 * num_shards, num_shards).reshape(num_shards, 2)
    return (chunks + 1).sum(axis=1).tolist()


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_zigzag_balances_causal_work(num_shards):
    assert orders(num_shards) == [2 * num_shards + 1] * num_shards
    x = np.arange(40).reshape(2, 20)
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, num_shards), num_shards), x)
    assert to_zigzag(x, 5)[0].tolist()[:8] == [0, 1, 18, 19, 2, 3, 16, 17]


def programs(case: Case, method: ContextMethod) -> tuple[list[Collective], list[Collective]]:
    """Collectives of the forward program, and of a backward one that starts from its residuals."""
    (q, k, v, d_out), ids = arrays(case)
    attend = functools.partial(
        context_attention(case, method),
        config=case.config,
        segment_ids_BT=None if ids is None else jnp.asarray(ids),
    )
    place = jax.sharding.NamedSharding(
        jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,)),
        jax.sharding.PartitionSpec(None, "context"),
    )
    operands = jax.device_put((q, k, v, d_out), place)
    compile_ = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS, out_shardings=place)
    forward = compile_(attend).lower(*operands[:3])
    _, pull = jax.vjp(jax.jit(attend), *operands[:3])
    backward = compile_(lambda pull, d_out: pull(d_out)).lower(pull, operands[3])
    return collectives(forward.compile()), collectives(backward.compile())


# XLA's CPU compiler widens bf16 of all but the ring, which sends integers.
@pytest.mark.slow_cases("ring-float32")
@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (ContextMethod.RING, "float32"),
        pytest.param(ContextMethod.ULYSSES, "float32", marks=pytest.mark.slow),
        pytest.param(ContextMethod.ALL_GATHER, "float32", marks=pytest.mark.slow),
        pytest.param(ContextMethod.RING, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_bytes_sent_are_the_formula(method, dtype):
    """GQA: 8 query and 4 key/value heads; packed, so that documents travel too."""
    case = Case(packed=True, dtype=dtype)
    expected = context_bytes(
        method,
        num_shards=4,
        tokens=B * T // 4,
        q_width=N * H,
        kv_width=2 * 4 * H,
        itemsize=jnp.dtype(dtype).itemsize,
        is_packed=True,
    )
    forward, backward = programs(case, method)
    found = tuple(sum(each.sent_bytes for each in program) for program in (forward, backward))
    assert found == expected
    kinds = {
        ContextMethod.RING: {"collective-permute"},
        ContextMethod.ULYSSES: {"all-to-all", "all-gather"},
        ContextMethod.ALL_GATHER: {"all-gather", "reduce-scatter"},
    }
    assert {each.kind for each in forward + backward} <= kinds[method]
    if method is ContextMethod.RING:
        # Forward, keys P-1 times. Backward, keys and later sums as often, P-3 times in one send.
        assert (len(forward), len(backward)) == (3, 5)


@pytest.mark.parametrize("left", [2, 3, 7, 11, 23])
def test_a_window_gathers_what_it_would_be_sent(left):
    """Chunks of three tokens: part of one, one, more than one, and more than there are."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(1, 2 * 24 * 5 + 1, dtype=np.float32).reshape(2, 24, 5)
    ids = np.random.default_rng(seeded(0)).integers(0, 3, (2, 24)).astype(np.int32)

    def both(x, ids):
        return [fetch(x, ids, "context", left) for fetch in (halo._sent, halo._gathered)]

    spec = jax.sharding.PartitionSpec(None, "context")
    found = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sent, gathered = jax.jit(found)(to_zigzag(x, 4), to_zigzag(ids, 4))
    np.testing.assert_array_equal(sent[0], gathered[0])
    np.testing.assert_array_equal(sent[1], gathered[1])
    assert np.any(sent[1] < 0)
    assert np.any(sent[1] >= 0)


def test_window_fetches_what_it_reaches_and_no_more():
    """4 tokens of a chunk of 6 before each chunk: lo and hi each one send, of keys with values."""
    case = Case(window=5)
    forward, _ = programs(case, ContextMethod.RING)
    assert [(each.kind, each.shape) for each in forward if "f32" in each.dtype] == [
        ("collective-permute", (B, 4, 2 * 4, H))
    ] * 2


REFUSED = {
    "length": (Case(), ContextMethod.RING, 44, ConfigError, "44 tokens .* into 2 x context=4"),
    "heads": (
        Case(num_kv_heads=2),
        ContextMethod.ULYSSES,
        T,
        ConfigError,
        "ulysses spreads 2 key/value heads .* context=4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused(name):
    case, method, length, error, message = REFUSED[name]
    q, k = jnp.zeros((B, length, N, H)), jnp.zeros((B, length, case.num_kv_heads, H))
    attend = functools.partial(
        context_attention(case, method), config=case.config, segment_ids_BT=None
    )
    with pytest.raises(error, match=message):
        jax.eval_shape(attend, q, k, k)


def test_an_implementation_without_a_logsumexp_is_refused():
    attend = dataclasses.replace(
        context_attention(Case(), ContextMethod.RING), implementation=AttentionImplementation.CUDNN
    )
    attend = functools.partial(attend, config=Case().config, segment_ids_BT=None)
    q, k = jnp.zeros((B, T, N, H)), jnp.zeros((B, T, 4, H))
    with pytest.raises(UnsupportedError, match=r"cudnn.*context_method=ulysses needs none"):
        jax.eval_shape(attend, q, k, k)
