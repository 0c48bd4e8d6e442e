"""The bench of caches at length: its model reads what its formula says, from its cache."""

import numpy as np
import pytest

from experiments.bench.cache_quality import (
    DEPTHS,
    VOCABULARY,
    built,
    chain_texts,
    measured,
    rare_needles,
    scores,
    with_needle,
)
from jaxinfra.config.cache import CacheFormat

# A bench that is not shipped; its caches are held to their formats in test_cache_formats.
pytestmark = pytest.mark.slow


def test_the_built_model_predicts_what_followed_before():
    """Against a loop over earlier positions: weights e ** 14 of those behind the same token."""
    (ids_T,) = with_needle(chain_texts(1, 96), rare_needles(1), 0.5)
    nll_BT, _ = scores(built(outlier=8.0).decoder(CacheFormat.PLAIN), ids_T[None])
    for t in range(1, 95):
        behind = np.array([ids_T[max(s - 1, 0)] == ids_T[t] for s in range(t + 1)])
        weights = np.where(behind, np.exp(14.0), 1.0)
        found = np.bincount(ids_T[: t + 1], weights / weights.sum(), minlength=VOCABULARY)
        logits = 12.0 * found * 2.0 / np.sqrt(3.0 + np.sum(found**2))
        want = np.log(np.exp(logits).sum()) - logits[ids_T[t + 1]]
        # The first layer's head leaves e ** -10 beside the position before; norms have an epsilon
        # of 1e-5 beside a mean square of 5e-3.
        assert abs(nll_BT[0, t] - want) < 0.02 + 0.005 * abs(want), t


def test_needles_are_found_in_all_of_the_plain_cache():
    rows = {row["cache"]: row for row in measured(built(outlier=8.0), 128, 2)}
    assert all(rows["plain"][f"needle_tokens_{depth}"] == 1.0 for depth in DEPTHS)
    assert rows["int4"]["needle_nll_0.5"] > rows["int8"]["needle_nll_0.5"]
    assert rows["plain"]["nll_shift"] == 0.0
    assert rows["int4"]["nll_shift"] > rows["fp8"]["nll_shift"] > rows["int8"]["nll_shift"] > 0.0
