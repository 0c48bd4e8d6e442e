"""The Hopper kernel of scaled matmuls without a GPU: the interpreter, lowering, tiles."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from experiments.bench.kernels.scaled_workloads import LARGE, SMALL, WORKLOADS, ScaledWorkload
from pallas_kernels import UnsupportedError, quantize, scaled_matmul
from pallas_kernels.common import device
from pallas_kernels.common.scales import Scaling
from pallas_kernels.fp8.hopper_matmul import (
    LEAST_STEPS,
    ScaledConfig,
    scaled_config,
    scaled_matmul_hopper,
    shared_memory_bytes,
)
from pallas_kernels.fp8.reference import make_scaled_spec
from pallas_kernels.hopper.machine import SMEM_BYTES
from tests.kernels.test_scaled_matmul import E4M3, E5M2, exact, operands
from tests.tolerance import assert_within_rounding

CASES = {
    "ragged": ((72, 320, 256), ("1x128", "128x128"), ScaledConfig(num_stages=2)),
    "a column has its own scale": (
        (128, 256, 256), ("1x128", "1x128"),
        ScaledConfig(num_stages=2, num_out_slots=1, in_turns=False),
    ),
    "few rows, split": (
        (64, 128, 512), ("1x128", "128x128"),
        ScaledConfig(tile_m=64, tile_n=128, part_n=64, splits=2, num_stages=2, in_turns=False),
    ),
}  # fmt: skip


@pytest.mark.slow_cases("a column has its own scale", "ragged")
@pytest.mark.parametrize("case", list(CASES))
def test_kernels_compute_the_formula(case):
    """The interpreter's sums are in fp32."""
    shape, forms, config = CASES[case]
    arrays = operands(*shape, forms)
    spec = make_scaled_spec(*arrays, out_dtype=jnp.dtype("float32"))
    f = functools.partial(scaled_matmul_hopper, spec=spec, config=config, interpretable=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = jax.jit(f)(*arrays)
    assert_within_rounding(got, exact(*arrays))


def lower(w, forms, dtypes=(E4M3, E4M3), **options):
    f = functools.partial(scaled_matmul, **{"implementation": "hopper"} | options)
    with device.compiling_for(device.H200):
        traced = jax.jit(f).trace(*w.arrays(*map(Scaling, forms), dtypes))
        return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.slow_cases("128x7168x18432", "4096x24576x1536")
@pytest.mark.parametrize("w", [*SMALL, LARGE[2]], ids=lambda w: w.name)
def test_workloads_lower_for_a_gpu(w):
    lower(w, ("1x128", "128x128"))


@pytest.mark.parametrize(
    ("forms", "options"),
    [
        (("128x128", "1x128"), {"dtypes": (E5M2, E4M3), "out_dtype": jnp.float16}),
        (("1x128", "1x128"), {"out_dtype": jnp.float32}),
    ],
    ids=["input gradient", "weight gradient"],
)
def test_forms_lower_for_a_gpu(forms, options):
    lower(ScaledWorkload(M=8, N=192, K=256), forms, **options)


def test_devices_of_a_shard_map_run_it_each():
    """Their results differ."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    rows, by_blocks = PartitionSpec("rows"), PartitionSpec(None, "rows")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(rows, PartitionSpec(), by_blocks, PartitionSpec(), rows),
        out_specs=(rows, (rows, by_blocks)),
    )
    def f(a, b, a_scale, b_scale, x):
        product = scaled_matmul(
            a, b, a_scale, b_scale, out_dtype=jnp.float32, implementation="hopper"
        )
        return product, tuple(quantize(x, "1x128", implementation="hopper"))

    w = ScaledWorkload(M=256, N=64, K=256)
    shapes = w.arrays(Scaling.BLOCK_OF_ROW, Scaling.BLOCK)
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    with device.compiling_for(device.H200):
        jax.jit(f).trace(*shapes, x).lower(lowering_platforms=("cuda",))


def test_tiles_fit_and_fill_the_gpu():
    for w in WORKLOADS:
        for columns_scaled in (False, True):
            c = scaled_config(w.M, w.N, w.K, columns_scaled=columns_scaled)
            assert shared_memory_bytes(c, columns_scaled=columns_scaled) <= SMEM_BYTES
            assert (w.K // 128) % c.splits == 0
            assert c.splits == 1 or w.K // 128 // c.splits >= LEAST_STEPS
            assert c.cluster == (1 if w in SMALL else 2)
            tiles = -(-w.M // c.tile_m) * -(-w.N // c.tile_n) * c.splits
            assert tiles >= 100


def test_tiles_that_do_not_fit_are_refused():
    a, b, a_scale, b_scale = operands(128, 256, 256)
    spec = make_scaled_spec(a, b, a_scale, b_scale, out_dtype=jnp.dtype("float32"))
    with pytest.raises(UnsupportedError, match="use fewer stages or slots"):
        scaled_matmul_hopper(a, b, a_scale, b_scale, spec=spec, config=ScaledConfig(num_stages=5))


def test_the_kernel_says_what_it_cannot():
    w = ScaledWorkload(M=12, N=128, K=256)
    for each, options, reason in [
        (w, {}, "M=12 is not a multiple of 8"),
        (ScaledWorkload(M=8, N=96, K=256), {}, "N=96 is not a multiple of 64"),
        (ScaledWorkload(M=8, N=128, K=200), {}, "K=200 is not a multiple of 128"),
        (ScaledWorkload(M=8, N=128, K=256), {"num_devices": 2}, "spread over 2 devices"),
    ]:
        with pytest.raises(UnsupportedError, match=f"{reason}.*implementation='xla' can"):
            lower(each, ("1x128", "128x128"), **options)
    arrays = operands(8, 128, 256)
    with pytest.raises(UnsupportedError, match="is not a Hopper GPU"):
        scaled_matmul(*arrays, implementation="hopper")


def test_auto_takes_the_kernel_where_it_can():
    for rows, taken in [(8, True), (12, False)]:
        w = ScaledWorkload(M=rows, N=128, K=256)
        text = lower(w, ("1x128", "128x128"), implementation="auto").as_text()
        assert ("mosaic_gpu" in text) == taken
