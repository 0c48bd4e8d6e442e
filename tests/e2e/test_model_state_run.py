"""Runs of a model whose layers emit losses and have state: killed, resumed, moved, evaluated.

The kind of layer is the tests' own (``tests/tally.py``), which their configs name.
"""

import functools
import json

import numpy as np
import pytest
from e2e.runs import killed_and_resumed, metrics, state_sums

from jaxinfra.serving.load import load_model

STEPS = 4
FEED_FORWARD = json.dumps({"type": "tests.tally:TallyConfig", "hidden_dim": 64, "num_gains": 4})
SETTINGS = {
    "training__steps": STEPS,
    "training__evaluate_every": STEPS,
    "checkpoint__every": 2,
    "model__stacks__0__pattern__0__feed_forward": FEED_FORWARD,
}
# Of the layer that the feed-forward layer of these runs replaces.
REPLACED = "model.stacks.0.pattern.0.feed_forward.hidden_dim"


def new(bench, name: str) -> list[object]:
    arguments = bench.new(name, **SETTINGS)
    return [each for each in arguments if not str(each).startswith(f"--set={REPLACED}=")]


def own(directory) -> dict[str, np.ndarray]:
    """The state of the layers of a run's newest checkpoint, as a server reads it."""
    layer = load_model(directory).blocks[0].mlp
    return {name: np.asarray(getattr(layer, name)[...]) for name in ("bias", "history")}


# Kills are `test_training_interrupted.py`'s; `sharded/test_experts_use.py` restores a state, and
# `unit/test_training_metrics.py` has what layers say in the records.
@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_happened(bench):
    run = killed_and_resumed(bench, functools.partial(new, bench), STEPS)
    assert [name for name in state_sums(run, STEPS) if "model_state" in name and "bias" in name]
    recorded = [record for record in metrics(run) if "loss" in record]
    assert all(record["layers/router_z"] > 0 for record in recorded)
    assert all(record["layers/tokens/most"] > 0 for record in recorded)
    state = own(run)
    assert np.any(state["bias"] != 0)
    assert np.all(state["history"] > 0)
