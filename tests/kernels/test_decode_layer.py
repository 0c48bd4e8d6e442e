"""Layers of a decode step: the formula, who has which part, refusals, lowering.

``test_decode_layer_threads`` runs what threads do between them.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import InputError, UnsupportedError, decode_layers
from pallas_kernels.common import device
from pallas_kernels.decode_layer.config import Share, num_stages
from tests.kernels.layer_cases import LayerCase
from tests.tolerance import assert_within_rounding

SMALL = LayerCase(length=37, D=64, N=4, K=2, H=16, F=96, size=16, layers=2)


@pytest.mark.parametrize("implementation", ["apart", "reference"])
def test_portable_forms_compute_the_formula(implementation):
    is_apart = implementation == "apart"
    given = SMALL.arguments()
    y, pages = jax.jit(functools.partial(decode_layers, implementation=implementation))(*given)
    want, pools = SMALL.exact(given, is_apart=is_apart)
    assert_within_rounding((y, jax.tree.leaves(pages)), (want, pools))
    # Heads turned the other way are no rounding.
    cos, sin = given[-1]
    wrong, _ = SMALL.exact((*given[:-1], (cos, -sin)), is_apart=is_apart)
    with pytest.raises(AssertionError):
        assert_within_rounding(y, wrong)


@pytest.mark.parametrize(
    ("K", "N", "busiest"),
    [
        (2048, 3072, 6), (2048, 2048, 4), (2048, 16_384, 32), (8192, 2048, 16),
        (4096, 6144, 24), (4096, 4096, 16), (4096, 28_672, 112), (14_336, 4096, 56),
    ],
)  # fmt: skip
def test_units_are_dealt_out_evenly(K, N, busiest):
    """Sizes of Llama-3.2-1B and Llama-3-8B: no block has 4% more tiles than all have on average."""
    share = Share(K=K, N=N)
    assert share.unsupported() is None
    assert share.most * share.down == busiest
    assert busiest * share.blocks * 16_384 <= 1.04 * 2 * K * N
    assert share.units * share.down * 16_384 == 2 * K * N
    assert share.parts <= 8


def test_rings_fit():
    assert num_stages(4 * 2048) >= 12
    assert num_stages(4 * 60_000) < 0


def test_what_does_not_fit_is_refused():
    x, layers, pages, *rest = SMALL.arguments()
    with pytest.raises(InputError, match="must be hopper"):
        decode_layers(x, layers, pages, *rest, implementation="triton")  # pyrefly: ignore
    with pytest.raises(InputError, match="2 layers and pages of 1"):
        decode_layers(x, layers, pages[:1], *rest, implementation="apart")
    wrong = [pages[0], (pages[1][0][:1], pages[1][1])]
    with pytest.raises(InputError, match="keys' pages of layer 1"):
        decode_layers(x, layers, wrong, *rest, implementation="apart")
    with pytest.raises(InputError, match="qkv of layer 0"):
        decode_layers(x[:, :32], layers[:1], pages[:1], *rest, implementation="apart")
    with pytest.raises(UnsupportedError, match="apart can"):
        decode_layers(x, layers, pages, *rest, implementation="hopper")
    with device.compiling_for(device.H200):
        for case, why in (
            (SMALL, "no multiple of 128"),
            (LayerCase(length=5, H=16, N=64), "16 columns"),
        ):
            with pytest.raises(UnsupportedError, match=why):
                decode_layers(*case.arguments(), implementation="hopper")
        mixed = list(LayerCase(length=5, layers=2, form="int4").arguments())
        mixed[1] = [mixed[1][0], LayerCase(length=5).arguments()[1][0]]
        with pytest.raises(UnsupportedError, match="some in 16"):
            decode_layers(*mixed, implementation="hopper")
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(
            lambda x: jnp.sum(
                decode_layers(x, layers, pages, *rest, implementation="apart")[0] * 1.0
            )
        )(jnp.asarray(x))


@pytest.mark.slow  # lowering takes seconds
@pytest.mark.parametrize(("H", "form"), [(64, None), (128, None), (64, "int4"), (128, "e4m3")])
def test_layers_lower_for_a_gpu(H, form):
    case = LayerCase(length=200, N=2048 // H, H=H, layers=2, form=form)
    f = jax.jit(functools.partial(decode_layers, implementation="hopper"))
    with device.compiling_for(device.H200):
        lowered = f.trace(*case.arguments()).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
