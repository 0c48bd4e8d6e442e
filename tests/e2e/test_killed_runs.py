"""Runs of every kind of state, killed and resumed: they end as if nothing had happened.

Each at its second save; ``test_training_interrupted`` has all other moments.
"""

import json

import numpy as np
import pytest
from e2e.runs import killed_and_resumed, metrics, state_sums

from jaxinfra.serving.load import load_model

STEPS = 4
SHORT = {
    "training__steps": STEPS,
    "training__evaluate_every": STEPS,
    "checkpoint__every": 2,
}
FP8 = SHORT | {
    "precision__policy": "bf16",
    "precision__weights": "bf16",
    "precision__fp8": '{"scaling": "squares", "first_layers_out": 1}',
    "training__unroll": 2,
    "optimizer__first_moment": "fp8",
    "optimizer__second_moment": "fp16",
}


@pytest.mark.slow
def test_in_8_bits_with_short_moments_and_no_master_weights(bench):
    """Records, scales of moments, and what was rounded by chance."""
    run = killed_and_resumed(bench, lambda name: bench.new(name, **FP8), STEPS)
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


@pytest.mark.slow
def test_layers_that_emit_losses_and_have_state(bench):
    """A run with the tests' own layer (``tests/tally.py``), which its config names."""
    layer = json.dumps({"type": "tests.tally:TallyConfig", "hidden_dim": 64, "num_gains": 4})
    settings = SHORT | {"model__stacks__0__pattern__0__feed_forward": layer}
    replaced = "--set=model.stacks.0.pattern.0.feed_forward.hidden_dim="

    def new(name: str) -> list[object]:
        return [each for each in bench.new(name, **settings) if not str(each).startswith(replaced)]

    run = killed_and_resumed(bench, new, STEPS)
    assert [name for name in state_sums(run, STEPS) if "model_state" in name and "bias" in name]
    recorded = [record for record in metrics(run) if "loss" in record]
    assert all(record["layers/router_z"] > 0 for record in recorded)
    assert all(record["layers/tokens/most"] > 0 for record in recorded)
    layer = load_model(run).blocks[0].mlp  # as a server reads it
    assert np.any(np.asarray(layer.bias[...]) != 0)
    assert np.all(np.asarray(layer.history[...]) > 0)
