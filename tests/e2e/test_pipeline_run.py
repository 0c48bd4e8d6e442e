"""The train command on a pipeline: its losses are one device's, and its run goes on there."""

import jax
import numpy as np
import pytest
from e2e.runs import checkpoints, metrics


def two_devices() -> None:
    """Before the backend starts: the server that forks these processes has imported JAX already."""
    jax.config.update("jax_num_cpu_devices", 2)


SETTINGS = {"training__steps": 4, "training__accumulation": 4, "checkpoint__every": 2}
SHORT = {**SETTINGS, "training__evaluate_every": 4}


def losses(directory) -> list[float]:
    return [record["loss"] for record in metrics(directory) if "loss" in record]


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_pipeline_trains_resumes_on_one_device_and_back(bench, num_layers):
    """Four steps in a pipeline, two on one device, two in a pipeline of another schedule: losses
    of a run that never saw a pipeline, as near as rounding leaves them after eight steps.
    """
    settings = {**SHORT, "model__stacks__0__repeats": num_layers}
    piped = bench.new("run", **settings)
    ended = bench.run([*piped, "--mesh", "pipe=2", "--schedule", "zb_h1"], before=two_devices)
    assert ended.code == 0, ended
    ended = bench.run(bench.resume("run", "--mesh", "pipe=1", "--steps", 6))
    assert ended.code == 0, ended
    ended = bench.run(
        bench.resume("run", "--mesh", "pipe=2", "--schedule", "1f1b", "--steps", 8),
        before=two_devices,
    )
    assert ended.code == 0, ended
    assert checkpoints(bench / "run")[-1] == 8
    alone = bench.new("alone", **{**settings, "training__steps": 8})
    assert bench.run(alone).code == 0
    # The learning rate's schedule ends with the run, so only the first steps are the same.
    got, want = losses(bench / "run"), losses(bench / "alone")
    assert len(got) == len(want) == 8
    # Rounding alone: sums of some hundred fp32 terms in another order.
    np.testing.assert_allclose(got[:2], want[:2], rtol=100 * np.finfo(np.float32).eps)
    assert np.all(np.isfinite(got))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "pipe=2", "--schedule", "interleaved"], "too few for pipe=2 stages x 2"),
        (["--mesh", "pipe=2", "--schedule", "dual"], "1f1b"),
        (["--mesh", "pipe=2", "--set=training.unroll=2"], "unroll=2 with pipe=2"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(bench, options, message):
    ended = bench.run([*bench.new("run", **SHORT), *options], before=two_devices)
    assert ended.code == 1
    assert len(ended.lines()) == 1
    assert message in ended.stderr
