"""Orders of the loop of the backward of heads of 192/128, against fp32 arithmetic on a GPU."""

import concurrent.futures

import pytest

from experiments.bench import attention_latent as bench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", bench.CHECKED, ids=lambda case: case.name)
def test_every_order_has_the_gradients_of_fp32(case):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = bench.check(case, bench.compile_all(case, pool))
    assert [row["form"] for row in rows if not row["right"]] == []
