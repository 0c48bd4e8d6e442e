"""Sums of rows over devices on a CPU: the formula, the kernel's threads, its calls and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxinfra.ops import decode_layers
from pallas_kernels import append_heads
from pallas_kernels.common import device
from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.hopper.arrivals import NOT_YET
from pallas_kernels.row_sums import open_mailbox, refused_rows, sum_rows
from pallas_kernels.row_sums.hopper import SLOTS, SumKernel
from tests.kernels.layer_cases import LayerCase
from tests.kernels.row_sum_cases import (
    AXIS,
    EPSILON,
    OFFSET,
    EqualRows,
    RowSumCase,
    bits,
    mesh_of,
)
from tests.kernels.thread_stand_in import Ref, Warpgroup
from tests.tolerance import assert_within_rounding


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_all_devices_get_the_formula_s_sums_bit_for_bit(devices):
    case, mesh = RowSumCase(rows=3, width=256, devices=devices), mesh_of(devices)
    given = case.arguments(mesh)
    got = jax.jit(case.program(mesh, "reference"))(*given)
    for each in got:
        np.testing.assert_array_equal(bits(each), np.broadcast_to(bits(each)[:1], each.shape))
    mine = tuple(each[0] for each in got)
    assert_within_rounding(mine, case.exact(given, got))


@dataclasses.dataclass
class OneGpu:
    """One of two GPUs: a block's threads and memory of both."""

    kernel: SumKernel
    rank: int

    def __post_init__(self):
        kind = ml_dtypes.bfloat16 if self.kernel.dtype == jnp.bfloat16 else np.float16
        self.threads = Warpgroup(kind, count=self.kernel.threads)
        shape = SLOTS, self.kernel.devices, self.kernel.rows, self.kernel.width // 2
        self.shape = shape
        self.boxes = [
            self.threads.put(np.full(shape, NOT_YET, np.int32)) for _ in range(self.kernel.devices)
        ]
        table = np.array([*(box.base for box in self.boxes), self.rank], np.int64).view(np.int32)
        self.table = self.threads.put(table)

    def box(self, which: int) -> np.ndarray:
        """The mailbox of a GPU."""
        return self.threads.read(self.boxes[which], self.shape, np.int32)

    def run(self, partial: np.ndarray, residual: np.ndarray, scale: np.ndarray | None):
        """Runs all blocks; peers' words must be there."""
        put, kernel = self.threads.put, self.kernel
        x, normed = (put(np.full_like(partial, np.nan)) for _ in range(2))
        given = [self.boxes[self.rank], self.table, put(partial), put(residual), x]
        given += [put(np.zeros(32, np.float32)), *([] if scale is None else [put(scale), normed])]
        with self.threads.running():
            for row in range(kernel.rows):
                kernel.of_row(*given, row)
        return [self.threads.read(each, partial.shape, partial.dtype) for each in (x, normed)]


def gpus(width: int, dtype, scale: np.ndarray | None, *, slot: int = 1) -> list[OneGpu]:
    norm = None
    if scale is not None:
        norm = RmsNorm(scale=jnp.asarray(scale), epsilon=EPSILON, offset=OFFSET)
    kernel = SumKernel(rows=2, width=width, devices=2, slot=slot, dtype=jnp.dtype(dtype), norm=norm)
    return [OneGpu(kernel=kernel, rank=rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("width", "dtype", "scale_dtype"),
    [
        (1024, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (3072, np.float16, np.float32),
        pytest.param(16_384, ml_dtypes.bfloat16, np.float32, marks=pytest.mark.slow),
    ],
)
def test_threads_send_wait_add_and_clear_what_they_read(width, dtype, scale_dtype):
    rng = np.random.default_rng(3)
    parts = rng.normal(size=(2, 2, width)).astype(dtype)
    residual, scale = (
        rng.normal(size=s).astype(d) for s, d in (((2, width), dtype), ((width,), scale_dtype))
    )
    both = gpus(width, dtype, scale)
    found = []
    for rank, gpu in enumerate(both):
        gpu.box(rank)[1, 1 - rank] = parts[1 - rank].view(np.int32)
        found.append(gpu.run(parts[rank], residual, scale))
        assert (gpu.box(rank) == NOT_YET).all(), "cleared for the call after the next"
        sent, other = gpu.box(1 - rank)[1], gpu.box(1 - rank)[0]
        np.testing.assert_array_equal(sent[rank], parts[rank].view(np.int32))
        assert (sent[1 - rank] == NOT_YET).all()
        assert (other == NOT_YET).all(), "the slot of the call before"
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(theirs))
    total = parts[0].astype(np.float32) + parts[1].astype(np.float32)
    want = (residual.astype(np.float32) + total).astype(dtype)
    np.testing.assert_array_equal(bits(found[0][0]), bits(want))
    norm = RmsNorm(scale=jnp.asarray(scale), epsilon=EPSILON, offset=OFFSET)
    normed = np.asarray(norm(jnp.asarray(want)), np.float32)
    # One rounding of 16 bits each way, of numbers that fp32 sums may move across its edge.
    unit = 2.0**-7 if dtype == ml_dtypes.bfloat16 else 2.0**-10
    np.testing.assert_allclose(found[0][1].astype(np.float32), normed, rtol=unit, atol=1e-6)


def test_without_a_norm_a_row_is_only_added():
    rng = np.random.default_rng(4)
    parts = rng.normal(size=(2, 2, 1024)).astype(np.float16)
    gpu = gpus(1024, np.float16, None, slot=0)[0]
    gpu.box(0)[0, 1] = parts[1].view(np.int32)
    x, normed = gpu.run(parts[0], parts[1], None)
    want = parts[1].astype(np.float32) + (parts[0].astype(np.float32) + parts[1].astype(np.float32))
    np.testing.assert_array_equal(bits(x), bits(want.astype(np.float16)))
    assert np.isnan(normed).all()


def test_two_nans_are_never_sent_as_what_has_not_arrived():
    part = np.full((2, 1024), NOT_YET, np.int16).view(np.float16)
    gpu = gpus(1024, np.float16, None)[0]
    gpu.box(0)[1, 1] = np.full(512, 0x3C003C00)  # ones
    x, _ = gpu.run(part, np.zeros_like(part), None)
    assert (gpu.box(1)[1, 0] == 0x7FFF7FFF).all()
    assert np.isnan(x).all()


def test_a_mailbox_that_was_moved_fails_the_launch():
    gpu, rows = gpus(1024, np.float16, None)[0], np.zeros((2, 1024), np.float16)
    gpu.box(0)[1, 1] = 0
    gpu.boxes[0] = Ref(gpu.boxes[0].base + 64)
    with pytest.raises(AssertionError, match="the launch fails"):
        gpu.run(rows, rows, None)


@pytest.mark.parametrize("fault", [None, "no_residual", "norms_exchanged"])
def test_layers_of_several_rows_are_the_formula_s(monkeypatch, fault):
    """The layers around the sums, with the operations of a CPU in place of the kernels."""

    def summed(partial, residual, mailbox, *, norm):
        residual = jnp.zeros_like(residual) if fault == "no_residual" else residual
        return sum_rows(partial, residual, mailbox, norm=norm)

    def layer(rows, pages, weights, norms, **options):
        norms = norms[::-1] if fault == "norms_exchanged" else norms
        return of_rows(rows, pages, weights, norms, **options)

    def opened(rows, width, dtype, *, axis, implementation):
        assert implementation == "hopper"
        return open_mailbox(rows, width, dtype, axis=axis, implementation="reference")

    def appended(heads_BTNH, pages, *, config, positions_BT, rope, is_empty):
        assert not is_empty
        pools = pages.arrays["k"], pages.arrays["v"]
        q, k, v = append_heads(heads_BTNH, *pools, pages.tables_BM, positions_BT, rope)
        return q, {"k": k, "v": v}

    of_rows = decode_layers._layer_of_rows
    for name, stand_in in {
        "MEASURED_ROWS": {device.target().kind: (2,)},
        "refused_rows": lambda *_, **__: None,
        "open_mailbox": opened,
        "sum_rows": summed,
        "append_packed_heads": appended,
        "_layer_of_rows": layer,
    }.items():
        monkeypatch.setattr(decode_layers, name, stand_in)
    case = LayerCase(length=70, D=256, N=8, K=4, H=64, F=256, size=16, layers=2)
    layers, mesh = EqualRows(case=case, rows=3, finite=True), mesh_of(2)
    found = jax.jit(layers.step(mesh))(*layers.arguments(mesh))
    if fault is None:
        layers.assert_right(*found)
    else:
        with pytest.raises(AssertionError, match="times its spread"):
            layers.assert_right(*found)


@pytest.mark.parametrize("calls", [1, 4])
def test_calls_behind_the_first_kernel_are_ordinary_ones(calls):
    """Only the mailbox's kernel gets peers' addresses from XLA, which costs the host a meeting."""
    case, mesh = RowSumCase(rows=2, width=1024, calls=calls), mesh_of(2)
    with device.compiling_for(device.H200):
        traced = jax.jit(case.program(mesh, "hopper")).trace(*case.arguments(mesh))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 + calls
    assert text.count("uses_xla_collective_metadata = true") == 1
    assert "symmetric_memory_parameters" not in text, "multicast, which shared hosts forbid"


def refused(rows: int, width: int, dtype: str, *, sizes: tuple[int, ...] = (2,)) -> str | None:
    axes = (AXIS, "fsdp")[: len(sizes)]
    mesh = jax.make_mesh(
        sizes, axes, (AxisType.Auto,) * len(sizes), devices=jax.devices()[: int(np.prod(sizes))]
    )
    found = []

    def ask(x):
        found.append(refused_rows(rows, width, jnp.dtype(dtype), axis=AXIS))
        return x

    jax.eval_shape(jax.shard_map(ask, mesh=mesh, in_specs=P(), out_specs=P()), jnp.zeros(1))
    return found[0]


def test_what_the_kernel_refuses():
    with device.compiling_for(device.H200):
        assert refused(256, 16_384, "float16") is None
        assert "257 rows" in str(refused(257, 4096, "bfloat16"))
        assert "float32 is neither" in str(refused(2, 4096, "float32"))
        assert "rows of 4000" in str(refused(2, 4000, "bfloat16"))
        assert "rows of 32768" in str(refused(2, 32_768, "bfloat16"))
        assert "a mesh of 4 devices" in str(refused(2, 4096, "bfloat16", sizes=(2, 2)))
    assert "compute capability 9.0" in str(refused(2, 4096, "bfloat16"))


def one_call(how: str = "reference", *, residual: int = 4, scale: int = 8):
    def call(x):
        box = open_mailbox(4, 8, x.dtype, axis=AXIS, implementation=how)
        norm = RmsNorm(scale=jnp.ones(scale), epsilon=EPSILON)
        return sum_rows(x, x[:residual], box, norm=norm).x

    return jax.shard_map(call, mesh=mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False)


def test_calls_that_are_wrong_are_refused():
    x = jnp.ones((4, 8))
    with pytest.raises(InputError, match=r"residual is float32\[3, 8\]; the mailbox"):
        one_call(residual=3)(x)
    with pytest.raises(InputError, match=r"scale is \[7\], not \[8\]"):
        one_call(scale=7)(x)
    with pytest.raises(InputError, match="implementation='nccl' must be"):
        one_call("nccl")(x)
    with pytest.raises(UnsupportedError, match="cannot add 4 rows of 8 float32 over tensor"):
        one_call("hopper")(x)
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(lambda x: jnp.sum(one_call()(x)))(x)
