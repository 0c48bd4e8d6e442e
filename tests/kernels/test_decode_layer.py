"""Layers of a decode step: the formula, who has which part, refusals, lowering.

``test_decode_layer_threads`` runs what threads do between them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import InputError, UnsupportedError, decode_layers
from pallas_kernels.common import device
from pallas_kernels.decode_layer.config import WorkSplit, num_stages
from tests.kernels.layer_cases import LayerCase, bits, over_devices, pair
from tests.tolerance import assert_within_rounding

SMALL = LayerCase(length=37, D=64, N=4, K=2, H=16, F=96, size=16, layers=2)


reference = jax.jit(functools.partial(decode_layers, implementation="reference"))


def test_reference_computes_the_formula():
    given = SMALL.arguments()
    found = reference(*given)
    assert_within_rounding(found, SMALL.exact(given))
    SMALL.assert_nothing_else_written(given, found[1])
    # Heads turned the other way are no rounding.
    cos, sin = given[-1]
    wrong, _ = SMALL.exact((*given[:-1], (cos, -sin)))
    with pytest.raises(AssertionError):
        assert_within_rounding(found[0], wrong)


def test_devices_share_heads_and_hidden_columns():
    mesh, given = pair(), SMALL.arguments()
    found = jax.jit(over_devices(mesh, "reference"))(*SMALL.over(mesh, given))
    assert_within_rounding(found, SMALL.exact(given))
    np.testing.assert_array_equal(*(bits(shard.data) for shard in found[0].addressable_shards))


@pytest.mark.parametrize("page", [-1, 6])
def test_what_is_no_page_of_a_layer_is_none_of_its_neighbors(page):
    x, layers, pages, table, *rest = SMALL.arguments()
    assert pages[0].shape[1] == 6
    table[0, (SMALL.length - 1) // SMALL.size] = page
    _, after = reference(x, layers, pages, table, *rest)
    for pool, before in zip(after, pages, strict=True):
        np.testing.assert_array_equal(bits(pool), bits(before))


@pytest.mark.slow  # `test_decode_layer_threads.py` has tiles of codes
def test_quantized_layers():
    case = LayerCase(length=70, D=256, N=4, K=2, H=64, F=128, layers=3, form="int4")
    given = case.arguments()
    found = reference(*given)
    assert_within_rounding(found, case.exact(given))


@pytest.mark.parametrize(
    ("K", "N", "busiest"),
    [
        (2048, 3072, 6), (2048, 2048, 4), (2048, 16_384, 32), (8192, 2048, 16),
        (4096, 6144, 24), (4096, 4096, 16), (4096, 28_672, 112), (14_336, 4096, 56),
    ],
)  # fmt: skip
def test_units_are_dealt_out_evenly(K, N, busiest):
    """Sizes of Llama-3.2-1B and Llama-3-8B: no block has 4% more tiles than all have on average."""
    split = WorkSplit(K=K, N=N)
    assert split.unsupported() is None
    assert split.most * split.down == busiest
    assert busiest * split.blocks * 16_384 <= 1.04 * 2 * K * N
    assert split.units * split.down * 16_384 == 2 * K * N
    assert split.parts <= 8


def test_rings_fit():
    assert num_stages(4 * 2048) >= 12
    assert num_stages(4 * 60_000) < 0


def test_what_does_not_fit_is_refused(monkeypatch):
    x, layers, pages, *rest = SMALL.arguments()
    with pytest.raises(InputError, match="must be hopper"):
        decode_layers(x, layers, pages, *rest, implementation="triton")  # pyrefly: ignore
    k, v = pages
    with pytest.raises(InputError, match=r"qkv of all layers are \[2, 64, 128\]"):
        decode_layers(x, layers, (k[:1], v[:1]), *rest, implementation="reference")
    with pytest.raises(InputError, match="of a layer or more"):
        decode_layers(x, layers, (k[:0], v[:0]), *rest, implementation="reference")
    with pytest.raises(InputError, match="of a layer or more"):
        decode_layers(x, layers, (k[0], v[0]), *rest, implementation="reference")
    with pytest.raises(InputError, match="values' pages of all layers"):
        decode_layers(x, layers, (k, v[:, :1]), *rest, implementation="reference")
    with pytest.raises(InputError, match="qkv of all layers"):
        decode_layers(x[:, :32], layers, pages, *rest, implementation="reference")
    norm = dataclasses.replace(layers.mlp_norm, scale=layers.mlp_norm.scale[0])
    wrong = dataclasses.replace(layers, mlp_norm=norm)
    with pytest.raises(InputError, match=r"must be \[2, 64\]"):
        decode_layers(x, wrong, pages, *rest, implementation="reference")
    with pytest.raises(UnsupportedError, match="one after another"):
        decode_layers(x, layers, pages, *rest, implementation="hopper")
    with device.compiling_for(device.H200):
        for case, why in (
            (SMALL, "no multiple of 128"),
            (LayerCase(length=5, H=16, N=64), "16 columns"),
        ):
            with pytest.raises(UnsupportedError, match=why):
                decode_layers(*case.arguments(), implementation="hopper")
        plain, few_bits = (
            LayerCase(length=5, layers=2, D=512, F=512, form=form).arguments()
            for form in (None, "int4")
        )
        mixed = dataclasses.replace(few_bits[1], out=plain[1].out)
        with pytest.raises(UnsupportedError, match="some in 16"):
            decode_layers(plain[0], mixed, *plain[2:], implementation="hopper")
        one = jax.tree.map(lambda leaf: leaf[:1], few_bits[1])
        with pytest.raises(InputError, match=r"qkv of all layers are \[1, .* int4 in groups"):
            decode_layers(plain[0], one, *plain[2:], implementation="hopper")
        four = jax.make_mesh(
            (2, 2), ("tensor", "other"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
        )
        for mesh, given, why in (
            (pair(), few_bits, "quantized weights over several devices"),
            (four, plain, "a mesh of 4 devices, of which tensor has 2"),
        ):
            share = functools.partial(decode_layers, implementation="hopper", axis="tensor")
            alike = jax.shard_map(share, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            with pytest.raises(UnsupportedError, match=why):
                jax.eval_shape(alike, *given)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: 2)
            with pytest.raises(UnsupportedError, match="devices of several processes"):
                jax.eval_shape(over_devices(pair(), "hopper"), *SMALL.arguments())
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.eval_shape(
            jax.grad(
                lambda x: jnp.sum(
                    decode_layers(x, layers, pages, *rest, implementation="reference")[0] * 1.0
                )
            ),
            jnp.asarray(x),
        )


@pytest.mark.slow  # lowering takes seconds
def test_layers_lower_for_two_gpus():
    case, mesh = LayerCase(length=200, N=32, K=8, layers=2, F=2048), pair()
    with device.compiling_for(device.H200):
        traced = jax.jit(over_devices(mesh, "hopper")).trace(*case.arguments())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "uses_xla_collective_metadata = true" in text
    assert "symmetric_memory_parameters" not in text, "multicast, which shared hosts forbid"


@pytest.mark.slow  # lowering takes seconds
@pytest.mark.parametrize(
    ("H", "form", "layers"), [(64, None, 2), (128, None, 40), (64, "int4", 2), (128, "e4m3", 2)]
)
def test_layers_lower_for_a_gpu(H, form, layers):
    case = LayerCase(length=200, N=2048 // H, H=H, layers=layers, form=form)
    f = jax.jit(functools.partial(decode_layers, implementation="hopper"))
    with device.compiling_for(device.H200):
        lowered = f.trace(*case.arguments()).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1
