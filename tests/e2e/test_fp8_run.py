"""A run in 8 bits but for its first layer, with short moments and no master weights: killed,
resumed, served.
"""

import numpy as np
import pytest
from e2e.runs import killed_and_resumed, metrics, state_sums

from jaxinfra.serving.load import load_model

STEPS = 4
SETTINGS = {
    "training__steps": STEPS,
    "training__evaluate_every": STEPS,
    "checkpoint__every": 2,
    "precision__policy": "bf16",
    "precision__weights": "bf16",
    "precision__fp8": '{"scaling": "squares", "first_layers_out": 1}',
    "training__unroll": 2,
    "optimizer__muon": "none",
    "optimizer__first_moment": "fp8",
    "optimizer__second_moment": "fp16",
}


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_happened(bench):
    """To the bit: records, scales of moments, and what was rounded by chance."""
    run = killed_and_resumed(bench, lambda name: bench.new(name, **SETTINGS), STEPS)
    saved = state_sums(run, STEPS)
    assert [name for name in saved if "model_state" in name and "quantization" in name]
    assert [name for name in saved if "nu_scale" in name]
    recorded = [record for record in metrics(run) if "loss" in record]
    for record in recorded:
        assert record["fp8/blocks/0/mlp/down/cotangent/largest"] > 0
        assert 0 <= record["fp8/blocks/0/attention/query/x/vanished"] < 1
    # What serves it knows nothing of 8 bits, nor of their records.
    model = load_model(run)
    logits = model(np.zeros((1, 4), np.int32))
    assert np.all(np.isfinite(np.asarray(logits)))
    assert model.blocks[0].mlp.down.quantization is None
