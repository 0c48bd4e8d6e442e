"""Norms, products and sums in one: the formula, lowering, tiles, the choice and refusals.

``test_resident_rows`` runs what the kernel does before and after its products, thread by thread.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import InputError, UnsupportedError, fused_matmul, quantized_matmul
from pallas_kernels.common import device, tables
from pallas_kernels.common.row_inputs import RmsNorm
from pallas_kernels.fused_matmul import hopper
from pallas_kernels.fused_matmul.choice import (
    OP,
    case_of,
    measured_config,
    measured_in_few_bits,
    question_of,
)
from pallas_kernels.fused_matmul.config import FusedConfig, config_for, configs
from pallas_kernels.fused_matmul.reference import FusedCall
from pallas_kernels.hopper.cluster_sums import ClusterSums
from pallas_kernels.hopper.machine import SMEM_BYTES
from pallas_kernels.hopper.resident_rows import DEPTH, ResidentRows
from pallas_kernels.quantized_matmul import WeightCode, WeightFormat, arranged, round_weight
from pallas_kernels.quantized_matmul.config import QuantizedConfig
from tests.kernels.fused_cases import OPTIONS, exact, operands
from tests.tolerance import assert_within_rounding

STATIC = ("swiglu", "swiglu_input", "implementation")
computed = jax.jit(fused_matmul, static_argnames=STATIC)


@pytest.mark.parametrize("implementation", ["apart", "reference"])
@pytest.mark.parametrize("case", list(OPTIONS))
def test_portable_forms_compute_the_formula(case, implementation):
    x, w, given = operands(3, 128, 64, OPTIONS[case])
    true = exact(x, w, given, is_apart=implementation == "apart")
    assert_within_rounding(computed(x, w, implementation=implementation, **given), true)
    # A norm's epsilon, or a residual, left out are no rounding.
    wrong = dict(given)
    if "residual" in given:
        del wrong["residual"]
    else:
        wrong["norm"] = dataclasses.replace(given["norm"], epsilon=0.3)
    with pytest.raises(AssertionError):
        assert_within_rounding(computed(x, w, implementation=implementation, **wrong), true)


def placed_by_copies(rows, gmem, smem, x_smem, first, group, *, transforms) -> None:
    """``ResidentRows.place`` of plain rows, as the interpreter can."""
    del smem, group, transforms
    steps, _, depth = x_smem.shape
    for i in range(steps):
        columns = pl.ds(first * DEPTH + i * depth, depth)
        x_smem[i, pl.ds(0, rows.M)] = gmem.x[:, columns]


def finished_in_registers(sums, accumulators, gmem, smem, group) -> None:
    """``ClusterSums.finish`` of one block, of accumulators [columns, 8]."""
    del smem, group
    product = jnp.concatenate(accumulators).T[: sums.rows]
    if sums.gated:
        gate, up = jnp.split(product, 2, axis=1)
        product = jax.nn.silu(gate) * up
    columns = pl.ds(lax.axis_index("columns") * sums.width, sums.width)
    gmem.out[:, columns] = product.astype(sums.out_dtype)


DOWN = 14_336, 4096


def in_16_bits() -> Any:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, DOWN[0]), DOWN))
    return jax.make_jaxpr(functools.partial(fused_matmul, implementation="hopper"))(x, w)


def in_few_bits(rows: int) -> Any:
    whole = jax.ShapeDtypeStruct(DOWN, jnp.float32)
    form = WeightFormat(code=WeightCode.INT4, group_rows=128)
    weight = jax.eval_shape(lambda w: arranged(round_weight(w, form)), whole)
    x = jax.ShapeDtypeStruct((rows, DOWN[0]), jnp.bfloat16)
    return jax.make_jaxpr(functools.partial(quantized_matmul, implementation="hopper"))(x, weight)


KERNELS: dict[str, Callable[[], Any]] = {
    "16 bits": in_16_bits,
    "few bits": functools.partial(in_few_bits, 1),
    "few bits, x in stages": functools.partial(in_few_bits, 16),
}


def equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """All, whatever they are in."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(part)


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_no_request_is_without_a_wait(kernel):
    """``hopper.ring`` has the reason; ``test_fused_matmul_gpu`` has the size that went wrong."""
    with device.compiling_for(device.H200):
        traced = KERNELS[kernel]()
    found = 0
    for loop in equations(traced.jaxpr):
        if loop.primitive.name not in ("scan", "while"):
            continue
        (*_, body) = jax.extend.core.jaxprs_in_params(loop.params)
        names = [each.primitive.name for each in equations(body)]
        if "copy_gmem_to_smem" in names:
            found += 1
            assert names.index("barrier_wait") < names.index("copy_gmem_to_smem")
            assert "cond" not in names
    assert found == 1


@pytest.mark.slow  # the interpreter takes seconds; a GPU runs the same in test_fused_matmul_gpu
@pytest.mark.parametrize(("tiles", "swiglu"), [(1, False), (2, True), (4, True)])
def test_ring_and_products_in_the_interpreter(tiles, swiglu, monkeypatch):
    def load(kernel, gmem, smem) -> None:
        loaded(kernel, gmem, smem)
        # The interpreter wants every arrival seen.
        steps = kernel.c.steps(kernel.K)
        for i in range(max(0, steps - kernel.num_stages), steps - 1):
            plgpu.barrier_wait(smem.empty.at[i % kernel.num_stages])

    loaded = hopper._FusedKernel.load
    monkeypatch.setattr(hopper._FusedKernel, "load", load)
    monkeypatch.setattr(hopper._FusedKernel, "together", lambda kernel, sums: sums)
    monkeypatch.setattr(ResidentRows, "place", placed_by_copies)
    monkeypatch.setattr(ClusterSums, "finish", finished_in_registers)
    monkeypatch.setattr(ClusterSums, "meet_as_bystander", lambda sums: None)
    x, w, given = operands(5, 1536, 512, {"swiglu": swiglu})
    config = FusedConfig(tiles=tiles, split=1)
    f = jax.jit(
        lambda x, w: hopper.fused_matmul_hopper(FusedCall(x=x, weight=w, **given), config=config)
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        got = f(x, w)
    assert_within_rounding(got, exact(x, w, given))


@pytest.mark.slow  # lowering takes seconds; test_decode_launches traces the same kernels
def test_shapes_of_models_lower_for_a_gpu():
    shapes = (1, 2048), (2048, 16_384), (2048,)
    x, w, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    norm = RmsNorm(scale=scale, epsilon=1e-5)
    f = functools.partial(fused_matmul, swiglu=True, implementation="hopper")
    with device.compiling_for(device.H200):
        traced = jax.jit(lambda x, w, norm: f(x, w, norm=norm)).trace(x, w, norm)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_tiles_fit_whatever_the_size():
    for K, N in ((128, 64), (2048, 3072), (4096, 28_672), (14_336, 4096), (28_672, 8192)):
        for swiglu in (False, True):
            for config in configs(N, K, swiglu=swiglu):
                ring = config.num_stages(N, K) * config.stage_bytes
                assert ring + 16 * K // config.split < SMEM_BYTES
                assert config.num_stages(N, K) >= min(2, config.steps(K))
    chosen = config_for(4096, 14_336, swiglu=False)
    assert chosen is not None
    assert chosen.num_blocks(4096) >= 100  # most multiprocessors have one
    assert config_for(100, 128, swiglu=False) is None


FUSED, IN_FEW_BITS = FusedConfig(tiles=2, split=2), QuantizedConfig(split=2, groups=4, stages=8)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Calls with tables whose kernel takes a tenth of the time."""
    x, w, given = operands(1, 256, 512, OPTIONS["norm"])
    calls = [FusedCall(x=jnp.asarray(x), weight=each, **given) for each in (w, in_int4(w))]
    monkeypatch.setenv(tables.USER_FOLDER_VARIABLE, str(tmp_path))
    with device.compiling_for(device.H200):
        for call, config in zip(calls, (FUSED, IN_FEW_BITS), strict=True):
            choices = {"apart": ({}, 1.0), "hopper": (dataclasses.asdict(config), 0.1)}
            choices["hopper"][0].pop("quads", None)
            rows = [
                tables.Row.of(case=case_of(call), choice={"implementation": name, **tiles}, ms=ms)
                for name, (tiles, ms) in choices.items()
            ]
            facts, question = device.target(), question_of(call)
            environment = tuple((n, "") for n in ("clocks", "command", "date", "jax", "jaxlib"))
            table = tables.Table(
                op=OP, question=question, device_kind=facts.kind, environment=environment,
                rows=tuple(rows),
            )  # fmt: skip
            tables.save(table, tmp_path / OP / f"{question}-{facts.slug}.json")
        yield calls


def in_int4(w: np.ndarray):
    return arranged(round_weight(jnp.asarray(w), WeightFormat(code=WeightCode.INT4, group_rows=64)))


def test_auto_takes_few_bits_that_were_measured_to_be_faster(measured):
    call = measured[1]
    assert measured_in_few_bits(call) == IN_FEW_BITS
    computed = jax.make_jaxpr(functools.partial(fused_matmul, norm=call.norm))
    assert "rsqrt" not in str(computed(call.x, call.weight)).partition("mpmd_map")[0]
    # Neither of another format nor of a residual was anything measured.
    int8 = arranged(round_weight(jnp.ones((256, 512)), WeightFormat(code=WeightCode.INT8)))
    added = dataclasses.replace(call, residual=jnp.ones((1, 512), jnp.bfloat16))
    for other in (dataclasses.replace(call, weight=int8), added):
        assert measured_in_few_bits(other) is None
    assert "rsqrt" in str(computed(call.x, int8)).partition("mpmd_map")[0]


def test_auto_takes_what_was_measured_to_be_faster(measured):
    measured = measured[0]
    assert measured_config(measured) == FUSED
    traced = jax.make_jaxpr(functools.partial(fused_matmul, norm=measured.norm))
    assert "mpmd_map" in str(traced(measured.x, measured.weight))
    # Nine rows are beyond the kernel, and of a residual nothing was measured.
    nine = jnp.zeros((9, 256), jnp.bfloat16)
    assert "rsqrt" in str(traced(nine, measured.weight)).partition("mpmd_map")[0]
    added = FusedCall(x=measured.x, weight=measured.weight, residual=measured.weight[:1])
    assert measured_config(added) is None


def test_what_does_not_fit_is_refused():
    x, w, given = operands(4, 128, 64, OPTIONS["norm"])
    with pytest.raises(InputError, match="must be"):
        fused_matmul(x, w, swiglu_input=True)
    with pytest.raises(InputError, match="not \\[64\\]"):
        fused_matmul(x[:, :64], w[:64], **given)
    with pytest.raises(InputError, match="normalized"):
        fused_matmul(np.tile(x, 2), w, swiglu_input=True, **given)
    with pytest.raises(InputError, match="residual is"):
        fused_matmul(x, w, residual=x)
    with pytest.raises(InputError, match="half of them"):
        fused_matmul(x, w[:, :63], swiglu=True)
    with pytest.raises(InputError, match="triton"):
        fused_matmul(x, w, implementation="triton")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(UnsupportedError, match="apart can"):
        fused_matmul(x, w, implementation="hopper")
    with device.compiling_for(device.H200), pytest.raises(UnsupportedError, match="1 to 8"):
        fused_matmul(np.tile(x, (3, 1)), w, implementation="hopper")
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(lambda x: jnp.sum(fused_matmul(x, w).astype(jnp.float32)))(x)
