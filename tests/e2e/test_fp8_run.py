"""A run in 8 bits, with short moments and no master weights: killed, resumed, served."""

import signal

import numpy as np
import pytest
from e2e.faults import signal_at
from e2e.runs import checkpoints, metrics, state_sums, without_times

from jaxinfra.serving.load import load_model

STEPS = 4
SETTINGS = {
    "training__steps": STEPS,
    "training__evaluate_every": STEPS,
    "checkpoint__every": 2,
    "precision__policy": "bf16",
    "precision__weights": "bf16",
    "precision__fp8": '{"scaling": "delayed", "history": 3}',
    "optimizer__muon": "none",
    "optimizer__first_moment": "fp8",
    "optimizer__second_moment": "fp16",
}


def killed_at_the_second_save() -> None:
    """As the checkpoint of step 4 would be complete: that of step 2 is."""
    signal_at("jaxinfra.checkpoint.directory_layout:commit", signal.SIGKILL, call=2)()


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_happened(bench):
    """To the bit: histories, scales of moments, and what was rounded by chance."""
    ended = bench.run(bench.new("whole", **SETTINGS))
    assert (ended.code, ended.stderr) == (0, ""), ended
    killed = bench.run(bench.new("killed", **SETTINGS), before=killed_at_the_second_save)
    assert killed.code == -signal.SIGKILL, killed
    assert checkpoints(bench / "killed") == [2]
    resumed = bench.run(bench.resume("killed"))
    assert resumed.code == 0, resumed
    whole = state_sums(bench / "whole", STEPS)
    assert state_sums(bench / "killed", STEPS) == whole
    assert [name for name in whole if "model_state" in name and "quantization" in name]
    assert [name for name in whole if "nu_scale" in name]
    assert without_times(bench / "killed") == without_times(bench / "whole")
    recorded = [record for record in metrics(bench / "killed") if "loss" in record]
    for record in recorded:
        assert record["fp8/blocks/0/mlp/down/cotangent/largest"] > 0
        assert 0 <= record["fp8/blocks/0/attention/query/x/vanished"] < 1
    # What serves it knows nothing of 8 bits, nor of their histories.
    model = load_model(bench / "killed")
    logits = model(np.zeros((1, 4), np.int32))
    assert np.all(np.isfinite(np.asarray(logits)))
    assert model.blocks[0].mlp.down.quantization is None
