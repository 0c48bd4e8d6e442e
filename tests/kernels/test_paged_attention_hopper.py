"""Paged attention for Hopper without a GPU: plan, values in the interpreter, lowering, refusals.

The interpreter's blocks are threads, of which small machines have few: two blocks of one worker.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import UnsupportedError, paged_attention
from pallas_kernels.common import device
from pallas_kernels.flash_attention.hopper.config import ForwardConfig
from pallas_kernels.paged_attention.codes import rows_as_pages
from pallas_kernels.paged_attention.hopper import plan_pages
from pallas_kernels.paged_attention.hopper.attend import attend_pages
from pallas_kernels.paged_attention.hopper.chunk import attend_chunk, attend_token, is_chunk
from pallas_kernels.paged_attention.hopper.config import PagedConfig, QueryLayout, config_for
from pallas_kernels.paged_attention.hopper.forward import SIZES, reads_codes, unsupported
from pallas_kernels.paged_attention.hopper.merge import merge_pages
from pallas_kernels.paged_attention.hopper.plan import extent_of, piece_start, team_of
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.validate import make_call
from pallas_kernels.quantized_weight import WeightCode
from tests.kernels import paged_cases as cases
from tests.tolerance import assert_within_rounding


def call_of(case, arguments, arrays):
    return make_call(*map(jnp.asarray, arguments[:3]), *arguments[3:], **case.options, **arrays)


def kernels_of(case):
    """A function to partial results and one that merges them, for the interpreter."""

    def parts(call):
        layout = QueryLayout.of(call)
        config = dataclasses.replace(config_for(layout), num_blocks=2, num_workers=1)
        return call, layout, config, plan_pages(call, layout, config)

    def attend(arguments, arrays):
        call, layout, config, plan = parts(call_of(case, arguments, arrays))
        return attend_pages(call, plan, layout=layout, config=config, interpretable=True)

    def merge(arguments, arrays, partials):
        call, layout, config, plan = parts(call_of(case, arguments, arrays))
        return merge_pages(call, plan, partials, layout=layout, config=config)

    return jax.jit(attend), jax.jit(merge)


INTERPRETED = ["everything", "pages-16"]
SLOW = ["pages-128", "window", "chunk", "empty-rows"]


@pytest.mark.slow_cases("pages-16")
@pytest.mark.parametrize(
    "name", [*INTERPRETED, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_kernels_are_the_definition(name):
    case = cases.NAMED[name]
    arguments, arrays = case.arrays("bfloat16")
    attend, merge = kernels_of(case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = merge(arguments, arrays, attend(arguments, arrays))
    assert_within_rounding(got, cases.expected(case, arguments, arrays))


def chunk_of(case, arguments, arrays):
    """By the kernel for chunks, in tiles for the interpreter."""

    def attend(arguments, arrays):
        call = call_of(case, arguments, arrays)
        return attend_chunk(call, config=ForwardConfig(block_kv=64), interpretable=True)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return jax.jit(attend)(arguments, arrays)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NaN in hidden slots
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (c.name != "chunk-before-keys"))
        for c in cases.CHUNKS
    ],
    ids=lambda case: case.name,
)
def test_chunks_are_the_definition(case):
    arguments, arrays = case.arrays("bfloat16")
    got = chunk_of(case, arguments, arrays)
    assert_within_rounding(got, cases.expected(case, arguments, arrays))
    if case.window is not None:
        wider = dataclasses.replace(case, window=case.window + 1)
        with pytest.raises(AssertionError):
            assert_within_rounding(got, cases.expected(wider, arguments, arrays))


TOKENS = [
    cases.PagedCase(name="token", lengths=(150, 0, 65), N=4, K=2, window=70, cap=5.0),
    cases.PagedCase(name="token-alone", lengths=(64,), N=8, K=1, size=64),
]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NaN in hidden slots
@pytest.mark.slow
@pytest.mark.parametrize("case", TOKENS, ids=lambda case: case.name)
def test_one_token_in_the_order_of_training_is_the_definition(case):
    arguments, arrays = case.arrays("bfloat16")

    def attend(arguments, arrays):
        call = call_of(case, arguments, arrays)
        return attend_token(call, config=ForwardConfig(block_kv=64), interpretable=True)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(attend)(arguments, arrays)
    assert_within_rounding(got, cases.expected(case, arguments, arrays))


def test_who_takes_a_chunk():
    def is_taken(T=512, N=32, K=8, B=1, size=64, **options):
        case = cases.PagedCase(name="", lengths=(T,) * B, T=T, N=N, K=K, size=size, **options)
        return is_chunk(call_of(case, *case.arrays("bfloat16")))

    assert is_taken()
    assert is_taken(size=256)
    assert is_taken(T=128)
    assert not is_taken(T=64, B=8)
    assert not is_taken(T=128, N=8)  # 8 tiles leave most of a GPU idle


@pytest.mark.slow  # of the bound, which other tests hold; interpreted
def test_a_wrong_weight_of_a_part_is_caught():
    case = cases.PagedCase(name="", lengths=(300,), K=1, size=64)
    arguments, arrays = case.arrays("bfloat16")
    want = cases.expected(case, arguments, arrays)
    attend, merge = kernels_of(case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        partials = attend(arguments, arrays)
        assert_within_rounding(merge(arguments, arrays, partials), want)
        # Two teams have parts of the row; one's counts 10% too much.
        lse = partials.lse.at[0].add(np.float32(np.log2(1.1)))
        wrong = merge(arguments, arrays, partials._replace(lse=lse))
    with pytest.raises(AssertionError, match="are rounding"):
        assert_within_rounding(wrong, want)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_heads", [8, 32, 5])  # 5 heads: a team is one worker
def test_a_plan_gives_every_tile_to_one_team(num_heads, window):
    rng = np.random.default_rng(num_heads)
    lengths = rng.integers(0, 5000, 9).astype(np.int32)
    lengths[[0, 4, 8]] = 0, 1, 0
    counts = np.minimum(rng.integers(0, 6, 9), lengths).astype(np.int32)
    shape = (9, 5, 8 * num_heads, 64)
    config = PagedConfig()
    pool = np.zeros((1, 64, num_heads, 64), jnp.bfloat16)
    call = make_call(
        np.zeros(shape, jnp.bfloat16), pool, pool, np.zeros((9, 80), np.int32), lengths,
        query_lengths=counts, window=window,
    )  # fmt: skip
    layout = QueryLayout.of(call)
    plan = jax.jit(plan_pages, static_argnums=(1, 2))(call, layout, config)
    before, entry = jax.device_get(plan)
    head_blocks = num_heads // config.team(layout)
    tiles = np.diff(before) // head_blocks
    for e, count in enumerate(tiles):
        row, tile = divmod(e, layout.num_q_tiles)
        tokens = range(tile * layout.tokens, min((tile + 1) * layout.tokens, counts[row]))
        seen = set()
        for t in tokens:
            position = lengths[row] - counts[row] + t
            first = 0 if window is None else max(0, position - window + 1)
            seen |= set(range(first // 64, position // 64 + 1))
        assert count == len(seen)
    total, num_teams = int(before[-1]), config.num_teams(layout)
    teams, tiles = np.arange(num_teams + 1, dtype=np.int32), np.arange(total, dtype=np.int32)
    starts, owners = (
        np.asarray(jax.jit(f, static_argnums=2)(numbers, np.int32(total), num_teams))
        for f, numbers in ((piece_start, teams), (team_of, tiles))
    )
    assert starts[0] == 0
    assert starts[-1] == total
    assert set(np.diff(starts)) <= {total // num_teams, total // num_teams + 1}
    np.testing.assert_array_equal(owners, np.repeat(np.arange(num_teams), np.diff(starts)))
    has_tiles = starts[:-1] < total
    want = np.searchsorted(before[1:], starts[:-1], side="right")
    np.testing.assert_array_equal(entry[has_tiles], want[has_tiles])


def test_a_tile_sees_nothing_before_its_row_begins():
    layout = QueryLayout(B=1, T=8, N=8, K=1, H=64, V=64, size=16)
    got = extent_of(1000, layout, None, jnp.int32(3), jnp.int32(8), jnp.int32(0))
    assert (int(got.position), int(got.tokens), int(got.end)) == (-5, 8, 3)


# (B, T, N, K, H, V, size, options)
SHAPES = [
    (64, 1, 32, 8, 128, 128, 64, {}),
    (128, 1, 32, 32, 128, 128, 16, {"window": 1000, "soft_cap": 30.0}),
    (1, 1, 64, 8, 128, 128, 128, {"query_lengths": True}),
    (4, 7, 6, 2, 256, 256, 32, {"sinks": True}),
    (2, 2, 128, 1, 192, 128, 64, {}),
    (8, 300, 24, 8, 64, 64, 256, {}),
]


@pytest.mark.slow_cases(
    "4-7-6-2-256-256-32-bfloat16",
    "64-1-32-8-128-128-64-float16",
    "64-1-32-8-128-128-64-bfloat16",
    "128-1-32-32-128-128-16-bfloat16",
    "1-1-64-8-128-128-128-bfloat16",
    "2-2-128-1-192-128-64-bfloat16",
    "8-300-24-8-64-64-256-bfloat16",
)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(SHAPES[0], jnp.float16), *((shape, jnp.bfloat16) for shape in SHAPES)],
    ids=lambda x: "-".join(map(str, x[:7])) if isinstance(x, tuple) else x.__name__,
)
def test_lowers(shape, dtype):
    B, T, N, K, H, V, size, options = shape
    options = dict(options)
    # Of a mesh, as after training: then numbers within a kernel, too, have its sharding.
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    arguments = [struct((B, T, N, H), dtype), struct((99, size, K, H), dtype)]
    arguments += [struct((99, size, K, V), dtype)]
    arguments += [struct((B, 40), jnp.int32), struct((B,), jnp.int32)]
    if options.pop("sinks", False):
        options["sinks"] = jnp.zeros(N)
    if options.pop("query_lengths", False):
        options["query_lengths"] = jnp.zeros(B, jnp.int32)
    f = functools.partial(paged_attention, **options)
    with device.compiling_for(device.H200):
        text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    # What reads and what merges; chunks are not split.
    assert text.count("@mosaic_gpu") >= (1 if "attention_chunk" in text else 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((1, 8, 2, 64, 64, 16), jnp.float32, "float32 is neither bfloat16 nor float16"),
        ((1, 8, 2, 64, 64, 48), jnp.bfloat16, "pages of 48 slots are none of 16"),
        ((1, 8, 2, 80, 80, 16), jnp.bfloat16, "widths 80/80 are not multiples of 64"),
        ((1, 8, 2, 64, 576, 16), jnp.bfloat16, "values of 576 columns are wider than 256"),
        ((1, 100, 1, 64, 64, 16), jnp.bfloat16, "100 query heads to a kv head are above 64"),
        (None, jnp.bfloat16, "is not a Hopper GPU"),
    ],
    ids=str,
)
def test_refuses(shape, dtype, words):
    B, N, K, H, V, size = shape or (1, 8, 2, 64, 64, 16)
    q, k, v = (np.zeros(s, dtype) for s in ((B, N, H), (3, size, K, H), (3, size, K, V)))
    facts = device.H200 if shape else device.facts_of(jax.devices()[0])
    with device.compiling_for(facts), pytest.raises(UnsupportedError, match=words):
        paged_attention(
            q, k, v, np.zeros((B, 2), np.int32), np.zeros(B, np.int32), implementation="hopper"
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((1, 8, 2, 64), jnp.float16, "quantized cache must be bfloat16, not float16"),
        ((1, 8, 2, 256), jnp.bfloat16, "widths 256/256 of a quantized cache are not 64 or 128"),
        ((1, 20, 10, 64), jnp.bfloat16, "10 kv heads: they are no multiple and no divisor of 8"),
        ((1, 20, 1, 64, 64), jnp.bfloat16, "20 query heads to a kv head are above 16"),
        ((1, 8, 2, 64), jnp.bfloat16, "pages of 16 are copied 64 bytes .* make pages of 32 slots"),
        ((1, 8, 1, 64), jnp.bfloat16, "pages of 16 are copied 32 bytes .* make pages of 64 slots"),
    ],
    ids=str,
)
def test_refuses_caches_in_few_bits(shape, dtype, words):
    B, N, K, H, size = (*shape, 16)[:5]
    pool, scale = np.zeros((3, size, K, H), np.int8), np.zeros((3, size, K), dtype)
    arguments = np.zeros((B, N, H), dtype), pool, pool, np.zeros((B, 2), np.int32)
    attend = functools.partial(paged_attention, k_scale=scale, v_scale=scale)
    with device.compiling_for(device.H200), pytest.raises(UnsupportedError, match=words):
        attend(*arguments, np.zeros(B, np.int32), implementation="hopper")


def test_many_queries_read_their_rows_numbers():
    """What a row's codes mean, page after page; few queries read codes as they lie."""
    case = cases.PagedCase(name="", lengths=(40, 29), T=17, N=8, K=1)
    arguments, arrays = case.arrays("float32")
    arguments, scales, _ = cases.coded(arguments, WeightCode.INT4, rounds=True)
    call = call_of(case, arguments, arrays | scales)
    assert not reads_codes(call)
    assert reads_codes(dataclasses.replace(call, q_BTNH=call.q_BTNH[:, :16]))
    attend = jax.jit(paged_attention_reference)
    np.testing.assert_array_equal(*jax.device_get((attend(call), attend(rows_as_pages(call)))))


@pytest.mark.parametrize("num_kv", [1, 2, 4, 8, 16])
def test_scales_are_copied_to_aligned_places(num_kv):
    """Of what is not refused; the copy engine ends a kernel that asks for another place."""
    allowed = set()
    for size in SIZES:
        case = cases.PagedCase(name="", lengths=(40,), K=num_kv, N=2 * num_kv, size=size)
        arguments, arrays = case.arrays("bfloat16")
        given, scales, _ = cases.coded(arguments, WeightCode.INT8, rounds=False)
        call = call_of(case, given, arrays | scales)
        with device.compiling_for(device.H200):
            reason = unsupported(call)
        layout = QueryLayout.of(call)
        block = config_for(layout).block_kv
        # Bytes from a tile's first scale to that of its next page, and from one tile to the next.
        steps = [2 * layout.scale_heads * slots for slots in (min(size, block), block)]
        assert (reason is None) == all(step % 128 == 0 for step in steps), (size, reason)
        if reason is None:
            allowed.add(size)
    assert allowed == {size for size in SIZES if size * min(num_kv, 8) >= 64}
