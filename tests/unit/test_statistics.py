"""Statistics of each layer: what they say, on every mesh, and that the ordinary step has none."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfra
from jaxinfra.diagnostics.bisect import StepPieces
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import by_path
from jaxinfra.runtime.files import read_log
from jaxinfra.training.gradients import count_targets
from jaxinfra.training.job import StepPrograms, lower_step, make_job
from jaxinfra.training.metrics import MetricsLog
from jaxinfra.training.step import step_key, step_record
from tests.small_run import config_of

ASKED = "statistics.every=2"
# A sum of n fp32 terms in any order is off by at most n units in the last place of what it adds up.
UNIT = float(np.finfo(np.float32).eps)


def batch_for(job):
    tokens = np.random.default_rng(0).integers(0, 300, (job.config.training.batch_size, 9))
    return job.put(jaxinfra.batch_of(tokens))


def asked(config):
    """The state after, and the record of, a step that says more."""
    job = make_job(config)
    state, metrics = job.statistics_step(job.initialize(), batch_for(job))
    return jax.device_get(state), step_record(jax.device_get(metrics))


@pytest.mark.slow
def test_the_ordinary_step_is_the_same_program():
    """Asked for or not, the other steps run this."""
    texts = [lower_step(make_job(config_of(*more))).as_text() for more in ((), (ASKED,))]
    assert texts[0] == texts[1]
    assert make_job(config_of()).statistics_step is None


def test_programs_are_chosen_by_step():
    job = make_job(config_of(ASKED))
    programs = StepPrograms(job)
    assert [programs.wants_statistics(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert programs.phase(2) == "compile"
    with pytest.raises(ConfigError, match="every=0 must be at least 1"):
        config_of("statistics.every=0")


def test_they_are_what_the_arrays_are():
    """Beside the layers run one by one, and gradients and weights read on the host."""
    config = config_of(ASKED, "training.z_loss=0.01")
    job = make_job(config)
    state, batch = job.initialize(), batch_for(job)
    before = jax.device_get(by_path(state.parameters))
    key, how = step_key(state), {"scale": 1.0 / count_targets(batch), "layer_scale": jnp.float32(1)}
    x, streams = jnp.zeros(()), {}
    for piece in StepPieces(job.model, config.training).of(state.tree, batch, key=key, **how):
        x, _ = piece.forward(x)
        streams[piece.name] = np.asarray(x, np.float64)
    learned = jax.jit(job.gradient)(
        state.parameters, state.model_state, batch, key=key, loss_scale=jnp.float32(1)
    )
    after, metrics = job.statistics_step(state, batch)
    record = step_record(jax.device_get(metrics))
    found = record["statistics"]
    stream = found["activations"]["blocks/0/stream"]
    for layer in range(2):
        want = streams[f"layer {layer}"]
        near(stream["rms"][layer], np.sqrt(np.mean(want**2)), want.size)
        near(stream["largest"][layer], np.abs(want).max(), 64)
    assert stream["nonfinite"] == [0.0, 0.0]
    assert found["activations"].keys() == {
        f"blocks/0/{site}" for site in ("stream", "attention", "mlp", "mlp_hidden")
    }
    gradients, moved = by_path(learned.gradients), jax.device_get(by_path(after.parameters))
    assert found["parameters"].keys() == before.keys()
    for path, values in found["parameters"].items():
        over = tuple(range(path.startswith("blocks/"), before[path].ndim))
        g, w = np.asarray(gradients[path], np.float64), before[path].astype(np.float64)
        step = moved[path].astype(np.float64) - w
        near(values["gradient_rms"], np.sqrt(np.mean(g**2, axis=over)), g.size)
        near(values["weight_largest"], np.abs(w).max(axis=over), 1)
        ratio = np.sqrt(np.mean(step**2, axis=over)) / np.sqrt(np.mean(w**2, axis=over))
        near(values["update_ratio"], ratio, 64 * g.size)
    assert not [name for name in record if "statistics/" in name]


def near(got, want, count):
    np.testing.assert_allclose(got, want, rtol=4 * count * UNIT, atol=4 * count * UNIT)


def test_they_have_a_file_of_their_own(tmp_path):
    """Each line counts for its step; what is done again is said again."""
    table = {"activations": {"blocks/0/stream": {"rms": [1.0, None]}}, "parameters": {}}
    open_log = lambda after: MetricsLog(  # noqa: E731
        tmp_path / "metrics.jsonl", tmp_path / "tensorboard", after_step=after
    )
    with open_log(0) as log:
        log.write({"step": 1, "loss": 2.0})
        assert not (tmp_path / "statistics.jsonl").exists()
        log.write({"step": 2, "loss": 2.0, "statistics": table})
    assert read_log(tmp_path / "statistics.jsonl", holds=dict)[0] == [{"step": 2, **table}]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {
        "step": 2,
        "loss": 2.0,
    }
    events = b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())
    assert b"statistics/blocks/0/stream/rms/0" in events
    assert b"statistics/blocks/0/stream/rms/1" not in events


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 2, "tensor": 2, "replica": 2}, {"pipe": 2, "fsdp": 4}, {"context": 2, "fsdp": 4}],
    ids=str,
)
def test_they_are_the_same_on_every_mesh(mesh):
    config = config_of(ASKED, "training.batch_size=8", "training.accumulation=2")
    config = dataclasses.replace(config, mesh=jaxinfra.MeshConfig(**mesh))
    if "fsdp" in mesh and mesh["fsdp"] == 4:
        training = dataclasses.replace(config.training, batch_size=16)
        config = dataclasses.replace(config, training=training)
    alone = dataclasses.replace(config, mesh=jaxinfra.MeshConfig())
    (_, found), (_, want) = asked(config), asked(alone)
    for table in ("activations", "parameters"):
        assert found["statistics"][table].keys() == want["statistics"][table].keys()
        for path, values in want["statistics"][table].items():
            for name, value in values.items():
                got = found["statistics"][table][path][name]
                np.testing.assert_allclose(got, value, rtol=2e-3, atol=1e-6, err_msg=path + name)
