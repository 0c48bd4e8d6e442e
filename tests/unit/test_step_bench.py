"""What the step's benchmarks make of their measurements."""

import jax
import pytest

from experiments.bench.step_bound import product
from experiments.bench.step_curve import WINDOW, compare
from jaxinfra.planning.operations import Matmul


def curves(*levels: float, wave: float = 0.01) -> list[list[float]]:
    """A loss that falls, for each seed at its level; steps differ by ``wave``."""
    return [
        [level + 10 / (1 + i) + wave * (-1) ** i for i in range(4 * WINDOW)] for level in levels
    ]


def test_curves_are_compared_seed_by_seed_over_windows():
    found = compare({"plain": curves(5.0, 5.3, 5.1), "ours": curves(5.02, 5.32, 5.12, wave=0.5)})
    assert found["rms_difference_of_sides"] == pytest.approx(0.02)
    assert found["mean_signed_difference"] == pytest.approx(0.02)
    assert found["largest_difference_of_seeds"] == pytest.approx(0.3)
    assert found["within_noise"]


@pytest.mark.parametrize("ours", [(5.5, 5.8, 5.6), (5.0, 5.3, 5.5)])
def test_a_side_or_a_seed_that_learns_less_is_no_noise(ours):
    assert not compare({"plain": curves(5.0, 5.3, 5.1), "ours": curves(*ours)})["within_noise"]


@pytest.mark.parametrize(("name", "out"), [("up", 2), ("up dx", 2), ("up dw", 4)])
def test_products_have_the_steps_shapes_and_results(name, out):
    function, *operands = product(Matmul(name, 24, 16, 8, out=out))
    result = jax.eval_shape(function, *operands)
    assert (result.shape, result.dtype.itemsize) == ((24, 16), out)
