"""Layers of a decode step: the formula, who has which part, refusals, lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import InputError, UnsupportedError, decode_layer, layer_tail
from pallas_kernels.common import device
from pallas_kernels.decode_layer.config import Share, num_stages
from tests.kernels.layer_cases import LayerCase, exact_tail, tail_operands
from tests.tolerance import assert_within_rounding

COUNTER = jnp.zeros(1, jnp.int32)
SMALL = LayerCase(length=37, D=64, N=4, K=2, H=16, F=96, size=16)


@pytest.mark.parametrize("implementation", ["apart", "reference"])
def test_portable_forms_compute_the_formula(implementation):
    is_apart = implementation == "apart"
    given = tail_operands(3, 128, 64, 96)
    y, _ = jax.jit(functools.partial(layer_tail, implementation=implementation))(*given, COUNTER)
    assert_within_rounding(y, exact_tail(given, is_apart=is_apart))
    given = SMALL.arguments()
    f = jax.jit(functools.partial(decode_layer, implementation=implementation))
    *got, _ = f(*given, COUNTER)
    want = SMALL.exact(given, is_apart=is_apart)
    assert_within_rounding(tuple(got), want)
    # Heads turned the other way are no rounding.
    wrong = SMALL.exact((*given[:6], (given[6][0], -given[6][1])), is_apart=is_apart)
    with pytest.raises(AssertionError):
        assert_within_rounding(got[0], wrong[0])


@pytest.mark.parametrize(
    "share",
    [
        Share(K=2048, N=3072), Share(K=2048, N=2048), Share(K=14_336, N=4096),
        Share(K=1408, N=2176), Share(K=256, N=4608, blocks=7),
    ],
)  # fmt: skip
def test_pieces_are_equal_and_parts_are_counted(share):
    starts = [share.start(b) for b in range(share.blocks + 1)]
    assert (starts[0], starts[-1]) == (0, share.line)
    sizes = np.diff(starts)
    assert sizes.min() >= share.most - 1
    assert sizes.max() == share.most
    for column in range(share.N // 64):
        tiles = range(column * share.down, (column + 1) * share.down)
        owners = np.searchsorted(starts, tiles, side="right") - 1
        assert (owners[0], owners[-1]) == (share.first_block(column), share.last_block(column))
        assert owners[-1] - owners[0] < share.parts


def test_rings_fit():
    assert num_stages(2048) >= 12
    assert num_stages(60_000) < 0


def test_what_does_not_fit_is_refused():
    given = list(tail_operands(1, 128, 128, 128))
    with pytest.raises(InputError, match="must be hopper"):
        layer_tail(*given, COUNTER, implementation="triton")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(InputError, match="gate_up is"):
        layer_tail(*given[:4], given[4][:, 1:], given[5], COUNTER, implementation="apart")
    with pytest.raises(InputError, match="counter"):
        layer_tail(*given, jnp.zeros(2, jnp.int32), implementation="apart")
    with pytest.raises(UnsupportedError, match="apart can"):
        layer_tail(*given, COUNTER, implementation="hopper")
    with device.compiling_for(device.H200):
        with pytest.raises(UnsupportedError, match="fewer than 132 blocks"):
            layer_tail(*given, COUNTER, implementation="hopper")
        with pytest.raises(UnsupportedError, match="3 rows"):
            layer_tail(*tail_operands(3, 128, 128, 128), COUNTER, implementation="hopper")
        with pytest.raises(UnsupportedError, match="16 columns"):
            decode_layer(
                *LayerCase(length=5, H=16, N=64).arguments(), COUNTER, implementation="hopper"
            )
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(
            lambda x: jnp.sum(layer_tail(x, *given[1:], COUNTER, implementation="apart")[0] * 1.0)
        )(given[0])
    x, weights, k, *rest = SMALL.arguments()
    with pytest.raises(InputError, match="pages are"):
        decode_layer(x, weights, k[0], *rest, COUNTER, implementation="apart")


@pytest.mark.slow  # lowering takes seconds
@pytest.mark.parametrize("H", [64, 128])
def test_a_layer_lowers_for_a_gpu(H):
    case = LayerCase(length=200, N=2048 // H, H=H)
    f = jax.jit(functools.partial(decode_layer, implementation="hopper"))
    with device.compiling_for(device.H200):
        traced = f.trace(*case.arguments(), COUNTER)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
