"""Which tiles the kernels over rows take: that they fit a Hopper GPU, before it says that not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic

from experiments.bench.kernels.memory_bound import VARIANTS
from pallas_kernels import layer_norm, rms_norm, softmax
from pallas_kernels.common import device, tables
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.norm import formulas, fp8_formula
from pallas_kernels.rows import dispatch
from pallas_kernels.rows.choice import MOST_BARRIERS, config_for
from pallas_kernels.rows.config import Blocks, Flat, Stream, Twice, Wide
from pallas_kernels.rows.formula import MASK, RowCall
from pallas_kernels.rows.row_choice import row_for
from pallas_kernels.rows.smem import smem_bytes
from pallas_kernels.softmax import hopper as softmaxes
from tests.kernels.row_cases import num_kernels

DTYPES = dispatch.DTYPES


def calls(columns, dtype=jnp.bfloat16):
    """Of every formula there is."""
    x = jax.ShapeDtypeStruct((8, columns), dtype)
    made = {
        "softmax": RowCall.of(softmaxes.forward(log=False, masked=False), [x]),
        "masked_softmax": RowCall.of(
            softmaxes.forward(log=False, masked=True), [x, x.update(dtype=MASK)]
        ),
        "softmax_gradient": RowCall.of(softmaxes.gradient(), [x] * 2),
        "log_softmax_gradient": RowCall.of(softmaxes.log_gradient(), [x] * 2),
    }
    for name, layer in (("rms_norm", False), ("layer_norm", True)):
        for residual in (False, True):
            norm = formulas.NormForm(
                columns=columns, epsilon=0.0, centered=layer, biased=layer, residual=residual
            )
            form = name + "+residual" * residual
            made[form] = RowCall.of(formulas.forward(norm), [x] * (1 + residual), [x] * (1 + layer))
            fp8 = fp8_formula.forward(norm)
            made[form + "_fp8"] = RowCall.of(fp8, [x] * (1 + residual), [x] * (1 + layer))
            made[form + "_gradient"] = RowCall.of(
                formulas.backward(norm), [x] * (2 + residual), [x]
            )
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_every_length_fits(dtype):
    """All multiples of 256 columns to 8192 and of 2048 to 262,144, of every formula."""
    for columns in (*range(256, 8192, 256), *range(8192, 262145, 2048)):
        for name, call in calls(columns, dtype).items():
            if not call.over_inputs and 4096 < columns < 8192:
                continue  # refused: neither in blocks nor streamed
            config = config_for(4096, call)
            if isinstance(config, Blocks):
                continue
            what = f"{name} of {columns}: {config}"
            assert smem_bytes(config, call) <= SMEM_BYTES, what
            if isinstance(config, Stream):
                assert config.num_teams >= 1, what
                assert config.num_stages >= 2, what
                assert config.num_warpgroups * config.num_stages <= MOST_BARRIERS, what
                continue
            if isinstance(config, Flat):
                assert config.columns >= columns, what
                continue
            assert config.columns == columns, what
            assert config.warpgroups * config.slots <= MOST_BARRIERS, what
            assert config.tile % (32 * config.vector) == 0, what
            if isinstance(config, Wide):
                assert config.slots > config.chunks or config.row_a_block, what


def test_variants_of_the_benchmark_fit():
    for (name, columns), variants in VARIANTS.items():
        for variant, config in variants.items():
            assert not isinstance(config, Blocks)
            what = f"{name} of {columns}, {variant}"
            assert smem_bytes(config, calls(columns)[name]) <= SMEM_BYTES, what


# A length of each way through the GPU; those of 262,144 columns fill shared memory the most.
LOWERED = [
    (softmax, 131072),
    (softmax, 262144),
    (softmax, 126976),
    (rms_norm, 4096),
    (rms_norm, 32768),
    (rms_norm, 262144),
    (layer_norm, 1024),
    (layer_norm, 10240),
    (layer_norm, 131072),
    (layer_norm, 262144),
]


@pytest.fixture
def asked(monkeypatch):
    """Bytes of shared memory, of every group of buffers that is lowered."""
    asked = []
    count = mosaic._smem_tree_size

    def counted(buffers):
        asked.append(count(buffers))
        return asked[-1]

    monkeypatch.setattr(mosaic, "_smem_tree_size", counted)
    return asked


def of_both_sizes(*cases):
    """A dtype decides by its bytes: those of float16 are bfloat16's, and of float32 the longest
    rows say most. The others run with the slow tests.
    """
    return [
        pytest.param(
            *case,
            dtype,
            marks=[pytest.mark.slow]
            * (dtype == jnp.float16 or (dtype == jnp.float32 and case[-1] != 262144)),
            id="-".join([*(getattr(x, "__name__", str(x)) for x in case), dtype.__name__]),
        )
        for case in cases
        for dtype in DTYPES
    ]


@pytest.mark.slow_cases(
    "softmax-131072-bfloat16",
    "softmax-262144-bfloat16",
    "rms_norm-262144-bfloat16",
    "rms_norm-262144-float32",
    "layer_norm-10240-bfloat16",
    "layer_norm-131072-bfloat16",
    "layer_norm-262144-float32",
    "rms_norm-32768-bfloat16",
    "softmax-126976-bfloat16",
    "softmax-262144-float32",
)
@pytest.mark.parametrize(("f", "columns", "dtype"), of_both_sizes(*LOWERED))
def test_kernels_ask_for_the_shared_memory_that_was_counted(asked, f, columns, dtype):
    x = jax.ShapeDtypeStruct((152, columns), dtype)
    vector = jax.ShapeDtypeStruct((columns,), jnp.float32)
    vectors = () if f is softmax else (vector,) if f is rms_norm else (vector, vector)
    options = {} if f is softmax else {"epsilon": 1e-6}

    def both(x, vectors, d_y):
        y, vjp = jax.vjp(functools.partial(f, implementation="hopper", **options), x, *vectors)
        return y, vjp(d_y)

    assert num_kernels(both, x, vectors, x) == 2
    made = calls(columns, dtype)
    counts = []
    for name in (f.__name__, f.__name__ + "_gradient"):
        config = config_for(152, made[name])
        if not isinstance(config, Blocks):
            counts.append(smem_bytes(config, made[name]))
    assert sorted(counts) == sorted(asked)[-len(counts) :]
    assert max(asked) <= SMEM_BYTES


@pytest.mark.slow_cases("32768-bfloat16", "131072-bfloat16", "262144-bfloat16", "262144-float32")
@pytest.mark.parametrize(
    ("columns", "dtype"), of_both_sizes((32768,), (131072,), (262144,), (126976,))
)
def test_masked_kernels_ask_for_the_shared_memory_that_was_counted(asked, columns, dtype):
    x, where = (jax.ShapeDtypeStruct((152, columns), of) for of in (dtype, jnp.bool))
    assert num_kernels(lambda x, m: softmax(x, where=m, implementation="hopper"), x, where) == 1
    call = calls(columns, dtype)["masked_softmax"]
    assert max(asked) == smem_bytes(config_for(152, call), call) <= SMEM_BYTES


MULTIPROCESSOR = 228 * 1024  # bytes of shared memory, and a KB of each block's is not its own


@pytest.mark.parametrize("name", ["softmax", "softmax_gradient", "masked_softmax"])
def test_blocks_that_take_a_row_leave_room_for_others(name):
    """What their reads and exchanges hide behind; where eight blocks share a row, for one other."""
    rng, taken = np.random.default_rng(0), 0
    for columns in (8193, 50257, 131072, 262144, *rng.integers(1000, 262144, 40).tolist()):
        for call in (calls(columns)[name], calls(columns // 2048 * 2048 + 2048)[name]):
            config = row_for(call)
            if config is None or call.columns > 131072:
                continue
            taken += 1
            blocks = MULTIPROCESSOR // (smem_bytes(config, call) + 1024)
            assert blocks >= (2 if config.cluster == 8 else 3), (columns, config)
            rows = config.row_a_block if isinstance(config, Wide) else config.most_turns == 1
            assert rows, (columns, config)
    assert taken > 4


def test_scales_are_held_by_blocks_of_few_rows():
    for columns in (1503, 2499, 4673, 12496, 32768, 50257, 80098, 131072):
        config = config_for(4096, calls(columns)["rms_norm"])
        assert isinstance(config, Flat), columns
        assert config.most_turns == (4 if config.cluster > 1 else 2), columns
        assert config.columns // (128 * config.cluster * config.group) <= 64, columns
        assert config.slots == config.chunks * (2 if columns > 4096 else 1), columns
        assert not config.in_memory, columns


def test_exponentials_of_long_rows_go_on_and_of_short_ones_are_a_warps():
    assert config_for(4096, calls(1032)["log_softmax_gradient"]).by_warps
    for columns, name in ((211712, "softmax"), (214129, "log_softmax_gradient")):
        config = config_for(256, calls(columns)[name])
        assert isinstance(config, Flat), name
        assert (config.cluster, config.most_turns) == (8, 0), name
    assert config_for(256, calls(211712)["softmax_gradient"]).most_turns == 1


def test_a_layer_norm_that_a_warpgroup_holds():
    config = config_for(4096, calls(3264)["layer_norm"])
    assert isinstance(config, Flat)
    assert (config.cluster, config.group, config.most_turns) == (1, 1, 4)
    assert config.slots == 2 * config.chunks
    for columns in (2902, 4104):
        assert not config_for(4096, calls(columns)["layer_norm"]).most_turns, columns


@pytest.mark.parametrize(
    ("columns", "cluster"), [(27167, 2), (48739, 4), (98304, 8), (100422, 8), (125184, 8)]
)
def test_a_layer_norm_that_blocks_share_goes_in_two_teams(columns, cluster):
    """Whose rows are at different stages; its gradient's sums leave no registers for them."""
    by_name = calls(columns)
    config = config_for(4096, by_name["layer_norm"])
    assert isinstance(config, Flat)
    assert (config.cluster, config.group, config.teams) == (cluster, 2, 2)
    assert not config.ahead
    assert config.slots > config.chunks, "nothing is asked for while a row is worked on"
    for name in ("layer_norm_gradient", "rms_norm", "rms_norm_gradient"):
        other = config_for(4096, by_name[name])
        assert not isinstance(other, Flat) or other.teams == 1, name


def test_layer_norms_of_whole_words_fold_ahead_rather():
    for columns in (40960, 46992, 65536):
        config = config_for(4096, calls(columns)["layer_norm"])
        assert isinstance(config, Flat)
        assert (config.group, config.teams, config.ahead) == (4, 1, True)


def test_rows_that_are_kept_nowhere():
    """The longest norms' gradients, and lengths that few blocks divide."""
    for name, columns in (
        ("layer_norm_gradient", 262144),
        ("layer_norm+residual_gradient", 262144),
        ("rms_norm+residual_gradient", 126976),
    ):
        assert isinstance(config_for(4096, calls(columns)[name]), Twice), name
    assert isinstance(config_for(4096, calls(131072)["layer_norm_gradient"]), Wide)


def test_measurements_count_where_rows_go_the_same_way(tmp_path):
    """131,072 columns divide into blocks evenly, 126,976 go as any length does."""
    measured = [
        tables.Row.of(
            case={
                "form": "softmax", "direction": "gradient", "rows": 4096, "columns": 131072,
                "dtype": "bfloat16",
            },
            choice={"implementation": name},
            ms=ms,
        )
        for name, ms in (("hopper", 1.0), ("xla", 2.0))
    ]  # fmt: skip
    table = tables.Table(
        op="softmax", question=dispatch.QUESTION, device_kind="NVIDIA H200", environment=(),
        rows=tuple(measured),
    )  # fmt: skip
    tables.save(table, tmp_path / "dispatch-nvidia-h200.json")

    def chosen(columns):
        case = dispatch.Case(
            op="softmax", form="softmax", direction="gradient", rows=4096,
            call=calls(columns)["softmax_gradient"],
        )  # fmt: skip
        return dispatch.choose("auto", case, tuned=tmp_path, num_devices=1)

    with device.compiling_for(device.H200):
        assert chosen(131072) == "hopper"
        assert chosen(262144) == "hopper"
        assert chosen(126976) == "xla"
