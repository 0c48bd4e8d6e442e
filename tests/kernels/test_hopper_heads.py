"""Backward kernels whose query heads have blocks of their own, all or a part of a group."""

import pytest

from pallas_kernels.flash_attention.hopper import backward_block
from pallas_kernels.flash_attention.hopper.tiles import Geometry
from tests.kernels import test_hopper as kernels


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("least", "parts"), [(1, 1), (4, 2), (100, 4)])
def test_gradients_are_the_oracle_in_any_number_of_parts(least, parts, monkeypatch):
    monkeypatch.setattr(backward_block, "LEAST_BLOCKS", least)
    case = kernels.Case(T=136, N=4, K=1, right=0)
    g = Geometry(B=1, T=136, S=136, N=4, K=1, H=64, Hv=64)
    assert backward_block.split_heads(g, 128)[1] == parts
    got, want = kernels.gradients_of(case, kernels.BY_KEYS, interpretable=True)
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert kernels.relative(gradient, want[name]) < kernels.BF16_ERROR, name
