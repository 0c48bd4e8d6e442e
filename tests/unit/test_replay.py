"""A step done again: its pieces, the cause of what is not finite, and the verdict on what a run
recorded.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfra
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.data import OWN_SOURCE
from jaxinfra.config.parts import part
from jaxinfra.data.batch import batch_checksum, rows_checksum
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.diagnostics.bisect import StepPieces, find_nonfinite, first_nonfinite
from jaxinfra.diagnostics.replay import replay_step
from jaxinfra.errors import ConfigError
from jaxinfra.training.describe import record_environment
from jaxinfra.training.examine import examine_step
from jaxinfra.training.gradients import count_targets, count_tokens
from jaxinfra.training.job import make_job
from jaxinfra.training.step import step_key, step_record
from tests.small_run import config_of

DROPS_OUT = ("model.dropout_rate=0.1", "training.z_loss=0.01")


@functools.cache
def job_and_batch(*changes):
    """A job, its first state, and a batch."""
    job = make_job(config_of(*changes))
    tokens = np.random.default_rng(0).integers(0, 300, (4, 9))
    return job, job.initialize(), job.put(jaxinfra.batch_of(tokens))


def with_weights(state, change):
    return dataclasses.replace(state, parameters=change(state.parameters))


def scaled(name, factor, *, layer):
    """Multiplies the arrays of one layer whose path has this in it."""

    def change(parameters):
        def one(path, leaf):
            if name in jax.tree_util.keystr(path, simple=True, separator="/"):
                return leaf.at[layer].multiply(factor)
            return leaf

        return jax.tree_util.tree_map_with_path(one, parameters)

    return change


@pytest.mark.slow
def test_the_pieces_compute_the_step():
    """Loss and gradients are the step's own, each dropout mask included; the gradients' bound is a
    few units in the last place of the largest, for sums in another order.
    """
    job, state, batch = job_and_batch(*DROPS_OUT)
    key = step_key(state)
    want = jax.jit(job.gradient)(
        state.parameters, state.model_state, batch, key=key, loss_scale=jnp.float32(1)
    )
    scale = {"scale": 1.0 / count_targets(batch), "layer_scale": 1.0 / count_tokens(batch)}
    pieces = StepPieces(job.model, job.config.training).of(state.tree, batch, key=key, **scale)
    inputs = [jnp.zeros(())]
    for piece in pieces:
        inputs.append(piece.forward(inputs[-1])[0])
    dx, found = jnp.zeros(()), {}
    for piece, x in zip(reversed(pieces), inputs[-2::-1], strict=True):
        found[piece.name], dx = piece.backward(x, dx)
    for number in range(2):
        got = found[f"layer {number}"]
        stacked = jax.tree.map(lambda leaf, n=number: leaf[n], want.gradients["blocks"][0])
        jax.tree.map(assert_close, got, stacked)
    both = jax.tree.map(jnp.add, found["embedding"], found["loss"])
    jax.tree.map(assert_close, both, {name: want.gradients[name] for name in both})


def assert_close(got, want):
    unit = np.finfo(np.float32).eps
    np.testing.assert_allclose(got, want, rtol=0, atol=64 * unit * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_named():
    job, state, batch = job_and_batch(*DROPS_OUT)
    found = find_nonfinite(job, with_weights(state, scaled("mlp/up", jnp.nan, layer=1)), batch)
    assert (found.phase, found.where) == ("weights", "blocks/0/mlp/up/weight of layer 1")


@pytest.mark.slow
def test_an_overflow_in_attention_is_named():
    """Queries beyond fp16's range: the projection is named, not the softmax."""
    job, state, batch = job_and_batch("precision.policy=fp16", "precision.loss_scaling=static")
    found = find_nonfinite(job, with_weights(state, scaled("attention/q", 6e5, layer=1)), batch)
    assert (found.where, found.phase, found.micro_batch) == ("layer 1", "forward", 0)
    assert found.origin.scope.startswith("attention")
    assert found.origin.inputs[0].startswith("float32[4,8,"), "sums of q, rounded to fp16"
    assert "infinite" in found.origin.made


@part
def loss_without_a_slope(logits, targets, *, weights):
    """sqrt(0) of each token: 0, and a derivative of 1 / 0."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sqrt(chosen - chosen)


@pytest.mark.slow
def test_an_infinite_gradient_is_named():
    name = f"{__name__}:loss_without_a_slope"
    job, state, batch = job_and_batch(f"training.loss={name}")
    found = find_nonfinite(job, state, batch)
    assert (found.where, found.phase) == ("loss", "backward")
    assert found.origin.operation == "div"
    assert "loss_without_a_slope" in found.origin.source


@pytest.mark.slow
def test_gradients_that_overflow_only_in_their_norm_are_told():
    job, state, batch = job_and_batch()
    scale = dataclasses.replace(state.loss_scale, value=jnp.float32(1e26))
    found = find_nonfinite(job, dataclasses.replace(state, loss_scale=scale), batch)
    assert (found.phase, found.where) == ("sum", "the sum of their squares")
    assert find_nonfinite(job, state, batch) is None


def test_an_infinity_that_a_mask_writes_is_no_fault():
    def attend(x, lowest):
        masked = jnp.where(x > lowest, x, -jnp.inf)
        return jax.nn.softmax(masked)

    x = jnp.arange(3.0)
    assert first_nonfinite(attend, x, jnp.float32(0)) is None
    assert first_nonfinite(attend, x, jnp.float32(9)).operation == "sub"  # -inf - -inf


def test_a_loop_is_looked_into_turn_by_turn():
    def doubling(x):
        def body(carry, column):
            with jax.named_scope("grow"):
                return carry * column, carry

        return jax.lax.scan(body, x, jnp.full(5, 1e20))

    found = first_nonfinite(doubling, jnp.float32(1))
    assert (found.operation, found.scope) == ("mul", "grow")
    assert "1e+20" in found.inputs[0]  # the second turn's


@pytest.mark.slow
def test_a_step_is_examined_by_sample_and_layer(tmp_path):
    """On a mesh, in micro-batches: each row has its own loss, all of them add up to the batch's,
    and the layers' norms to the whole gradient's.
    """
    config = config_of(
        f"data.source={text_in(tmp_path)}", "training.accumulation=2", "training.batch_size=8"
    )
    config = dataclasses.replace(config, mesh=jaxinfra.MeshConfig(fsdp=2, tensor=2, replica=2))
    steps = jaxinfra.Steps(config)
    batches, state = steps.batches(cache_dir=tmp_path), steps.initial_state()
    job = make_job(config)
    found = examine_step(job, state, batches, bytes_tokenizer(), step=3, usual_step=2)
    batch = batches.batch(2)
    samples = {each.sample: each for each in found.samples}
    assert [*sorted(samples)] == [*range(16, 24)]
    for row in (0, 3, 7):
        alone = np.zeros_like(batch.weights)
        alone[row] = batch.weights[row]
        nll, count = job.evaluation_step(
            state.evaluated, job.put(dataclasses.replace(batch, weights=alone))
        )
        np.testing.assert_allclose(samples[16 + row].loss, float(nll) / float(count), rtol=1e-5)
    _, metrics = steps(state, batch)
    norm = np.sqrt(sum(each.norm**2 for each in found.layers))
    np.testing.assert_allclose(norm, float(metrics.gradient_norm), rtol=1e-5)
    batches.close()


def text_in(place):
    text = place / "text"
    text.mkdir()
    for number in range(6):
        (text / f"{number}.txt").write_text(f"{number} the cat sat on the mat " * (20 + number))
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with a checkpoint after the second, as ``train`` leaves it."""
    place = tmp_path_factory.mktemp("replayed")
    config = config_of(f"data.source={text_in(place)}")
    run = RunDirectory(place / "run")
    run.create(config)
    steps = jaxinfra.Steps(config)
    state, lines = steps.initial_state(), []
    batches = steps.batches(cache_dir=place)
    for number, batch in zip((1, 2, 3), batches, strict=False):
        if number == 3:
            steps.save(state, run.path)
        state, metrics = steps(state, batch)
        sums = batch_checksum([rows_checksum(batch.tokens, first=0)], copies=1)
        lines.append({"step": number, **step_record(jax.device_get(metrics)), "batch": sums})
    batches.close()
    write(run, lines)
    record_environment(run.environments_file, make_job(config), step=0)
    return run, lines, place


def write(run, lines):
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_reproduces_to_the_last_bit(run):
    directory, lines, place = run
    write(directory, lines)
    found = replay_step(directory.path, step=3, cache_dir=place)
    assert found.first == 2
    assert found.is_equal
    assert found.reproduces
    assert "equal to the last bit" in found.verdict()


def test_a_bit_that_differs_is_the_hardware(run):
    """The same program on the same kind of device: one unit in the last place is enough."""
    directory, lines, place = run
    other = {**lines[2], "loss": float(np.nextafter(np.float32(lines[2]["loss"]), 9))}
    write(directory, [*lines[:2], other])
    found = replay_step(directory.path, step=3, cache_dir=place)
    assert found.reproduces is False
    assert "suspect hardware" in found.verdict()


@pytest.mark.slow
def test_another_layout_is_allowed_its_rounding(run):
    directory, lines, place = run
    kept = directory.environments_file.read_text()
    directory.environments_file.write_text(kept.replace('"fsdp": 1', '"fsdp": 2'))
    near = {**lines[2], "loss": float(np.nextafter(np.float32(lines[2]["loss"]), 9))}
    far = {**lines[2], "loss": lines[2]["loss"] * 1.001}
    try:
        for line, word in ((near, "within what rounding may change"), (far, "suspect hardware")):
            write(directory, [*lines[:2], line])
            assert word in replay_step(directory.path, step=3, cache_dir=place).verdict()
    finally:
        directory.environments_file.write_text(kept)


@pytest.mark.slow
def test_other_data_are_said_to_be_so(run):
    directory, lines, place = run
    write(directory, [*lines[:2], {**lines[2], "batch": "000000"}])
    found = replay_step(directory.path, step=3, cache_dir=place)
    assert found.reproduces is None
    assert "no longer those" in found.verdict()


def test_batches_that_no_config_names_are_refused(tmp_path):
    start = config_of()
    data = dataclasses.replace(start.data, source=OWN_SOURCE)
    changed = dataclasses.replace(start, data=data)
    (tmp_path / "config.json").write_text(codec.to_json(changed))
    with pytest.raises(ConfigError, match="or jaxinfra rl sampled them"):
        replay_step(tmp_path, step=1, cache_dir=tmp_path)
