"""Steps for loops of one's own, on a mesh: trained, saved, restored, and refused in words."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxinfra
from jaxinfra.config import codec
from jaxinfra.config.parts import part
from jaxinfra.errors import ConfigError
from jaxinfra.training.step import step_record
from tests.small_run import config_of


@part
def half_cross_entropy(logits, targets, *, weights):
    """Half of each token's nll."""
    chosen = jax.numpy.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return 0.5 * (jax.nn.logsumexp(logits, axis=-1) - chosen)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    place = tmp_path_factory.mktemp("text")
    for number in range(6):
        (place / f"{number}.txt").write_text(f"{number} the cat sat on the mat " * (20 + number))
    return place


@pytest.fixture(scope="module")
def config(text):
    run = config_of(
        "model.stacks.0.repeats=1",
        "training.batch_size=8",
        "training.sequence_length=16",
        "training.accumulation=2",
        f"data.source={text}",
    )
    return dataclasses.replace(run, mesh=jaxinfra.MeshConfig(fsdp=4, tensor=2))


@pytest.fixture(scope="module")
def steps(config):
    return jaxinfra.Steps(config)


@pytest.fixture(scope="module")
def trained(steps, tmp_path_factory):
    """A loop of one's own: states, losses, and the directory of its save."""
    place = tmp_path_factory.mktemp("loop")
    batches = steps.batches(cache_dir=place / "cache")
    state, losses = steps.initial_state(), []
    for _ in range(3):
        state, metrics = steps(state, next(batches))
        losses.append(float(metrics.loss))
    steps.save(state, place / "run")
    batches.close()
    return state, losses, place


def test_a_loop_of_ones_own_trains(trained):
    assert trained[1][-1] < trained[1][0]


def test_a_saved_state_is_the_same_and_goes_on_with_the_same_batches(steps, trained):
    state, _, place = trained
    restored = steps.restore(place / "run")
    assert int(restored.step) == 3
    first, second = (
        np.asarray(each.parameters["embedding"]["table"]) for each in (state, restored)
    )
    np.testing.assert_array_equal(first, second)
    batches = steps.batches(first=3, cache_dir=place / "cache")
    fourth = next(batches)
    batches.close()
    assert steps.loss(restored, fourth) == pytest.approx(steps.loss(state, fourth), rel=1e-6)


@pytest.mark.slow
def test_what_was_saved_is_a_run(trained):
    loaded = jaxinfra.load(trained[2] / "run")
    found = jaxinfra.generate(loaded, ["the cat ", "sat"], max_new_tokens=3, temperature=0)
    assert [each.prompt for each in found] == ["the cat ", "sat"]
    assert all(len(each.tokens) == 3 for each in found)
    alone = jaxinfra.generate(loaded, ["sat"], max_new_tokens=3, temperature=0)
    assert alone[0].text == found[1].text


def test_a_run_is_written_for_other_libraries(trained, tmp_path):
    loaded = jaxinfra.load(trained[2] / "run")
    jaxinfra.save(loaded, tmp_path / "hf")
    tokens = np.array([[1, 2, 3]], np.int32)
    again = jaxinfra.load_model(tmp_path / "hf")
    np.testing.assert_allclose(again(tokens), loaded.decoder(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "words"),
    [((2, 17), "a multiple of 2"), ((4, 15), "a multiple of 4"), ((4, 4097), "max_pos")],
    ids=["rows", "chunks", "positions"],
)
def test_a_batch_that_does_not_divide_is_refused_in_words(config, shape, words):
    mesh = jaxinfra.MeshConfig(fsdp=2, tensor=2, context=2)
    steps = jaxinfra.Steps(dataclasses.replace(config, mesh=mesh))  # compiles nothing
    with pytest.raises(ConfigError, match=words):
        steps(None, jaxinfra.batch_of(np.zeros(shape, np.int32)))


def test_a_model_on_a_mesh_refuses_rows_that_do_not_divide(trained):
    mesh = jaxinfra.MeshConfig(fsdp=4, tensor=2)
    model = jaxinfra.load_model(trained[2] / "run", mesh=mesh)
    with pytest.raises(ConfigError, match="multiple of 4 rows"):
        model(np.zeros((3, 8), np.int32))


@pytest.mark.parametrize("tokens", [[1, 2], [[1.0, 2.0]], [[1]]], ids=["1-D", "float", "one"])
def test_tokens_of_other_shapes_are_refused(tokens):
    with pytest.raises(ConfigError, match="length"):
        jaxinfra.batch_of(tokens)


class Heard(jaxinfra.Callback):
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    def on_begin(self, run, config):
        self.told.append(("begin", run.name, config.training.steps))

    def on_step(self, record):
        self.told.append(("step", record["step"], record["loss"]))

    def on_evaluation(self, record):
        self.told.append(("evaluation", record["step"], record["heldout_loss"]))

    def on_save(self, step):
        self.told.append(("save", step, None))

    def on_end(self, summary):
        self.told.append(("end", summary["steps"], summary["final_loss"]))


def test_callbacks_hear_of_every_step_and_an_own_loss_is_what_is_minimized(config, tmp_path):
    run = dataclasses.replace(config, mesh=jaxinfra.MeshConfig())
    run = jaxinfra.customize(run, loss=half_cross_entropy)
    heard, log = Heard(), jaxinfra.JsonLinesLogger(tmp_path / "log.jsonl")
    outcome = jaxinfra.train(
        run, tmp_path / "run", cache_dir=tmp_path / "cache", callbacks=[heard, log]
    )
    names = [name for name, *_ in heard.told]
    assert names == ["begin", *["step"] * 4, "evaluation", "save", "end"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in metrics]
    assert [line["step"] for line in lines] == [record["step"] for record in recorded]
    assert recorded[1]["tokens_per_s"] == pytest.approx(8 * 16 / recorded[1]["step_s"])
    assert lines[0]["loss"] == recorded[0]["loss"] == heard.told[1][2]
    # Half the nll of 300 nearly equal ids, where what is held out is judged by the whole.
    assert abs(recorded[0]["loss"] - 0.5 * np.log(300)) < 0.1
    assert outcome.summary["heldout_loss"] > 4.0
    evaluated = jaxinfra.evaluate(tmp_path / "run", cache_dir=tmp_path / "cache")
    assert evaluated.evaluation.loss == pytest.approx(outcome.summary["heldout_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_mean_of_the_weights_is_kept_evaluated_saved_and_read(config, tmp_path):
    """Against the mean taken here, from the parameters of each step."""
    optimizer = dataclasses.replace(config.optimizer, average=0.75)
    steps = jaxinfra.Steps(dataclasses.replace(config, optimizer=optimizer))
    batches = steps.batches(cache_dir=tmp_path / "cache")
    state = steps.initial_state()

    def table(tree) -> np.ndarray:
        return np.asarray(tree["embedding"]["table"], np.float64)

    mean = table(state.parameters)
    np.testing.assert_array_equal(table(state.average), mean)
    for _ in range(2):
        state, _ = steps(state, next(batches))
        mean = 0.75 * mean + 0.25 * table(state.parameters)
    np.testing.assert_allclose(table(state.average), mean, rtol=1e-6, atol=1e-8)
    assert np.max(np.abs(mean - table(state.parameters))) > 1e-4
    steps.save(state, tmp_path / "run")
    restored = steps.restore(tmp_path / "run")
    np.testing.assert_array_equal(table(restored.average), table(state.average))
    held = next(batches)
    batches.close()
    plain = steps.loss(dataclasses.replace(state, average={}), held)
    assert steps.loss(state, held) != pytest.approx(plain, rel=1e-5)
    read = jaxinfra.load_model(tmp_path / "run")
    np.testing.assert_array_equal(
        np.asarray(read.embedding.table[...], np.float64), table(state.average)
    )


def test_a_hook_that_nothing_would_call_is_refused():
    with pytest.raises(ConfigError, match=r"Late\.on_stepp: .* did you mean 'on_step'"):

        class Late(jaxinfra.Callback):
            def on_stepp(self, record):
                pass


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2, "expert": 2}, {"pipe": 2, "fsdp": 4}])
def test_losses_of_layers_weigh_alike_whatever_counts(mesh):
    """The balance of experts is a mean over all tokens: neither masked targets nor padding nor
    micro-batches of other counts change its share of the objective, or of the gradients.
    """
    sizes = ("vocab_size=64", "model_dim=16", "stacks.0.repeats=2")
    small = ["training.batch_size=8", "training.sequence_length=8", "training.accumulation=2"]
    small += [f"model.{size}" for size in sizes] + ["precision.policy=fp32", "optimizer.muon=none"]
    run = codec.override(jaxinfra.preset("tiny_moe"), small)
    run = dataclasses.replace(run, mesh=jaxinfra.MeshConfig(**mesh))
    place = "model.stacks.0.pattern.0.feed_forward.balance"
    rows = np.random.default_rng(0).integers(0, 64, (8, 9))
    all_count, few_count = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)
    few_count[:3, -2:] = 1.0
    padded = np.where(np.arange(8) < 6, 0, -1) * np.ones((8, 1), int)
    state, parts, records = None, [], []
    for weight in (0.0, 0.5):
        settings = [f"{place}.switch_loss={weight}", f"{place}.z_loss={weight}"]
        steps = jaxinfra.Steps(codec.override(run, settings))
        state = steps.initial_state()
        for weights in (all_count, few_count):
            batch = dataclasses.replace(
                jaxinfra.batch_of(rows, weights=weights * (padded >= 0)),
                segment_ids=padded.astype(np.int32),
                positions=np.tile(np.arange(8, dtype=np.int32), (8, 1)),
            )
            found = steps.gradients(state, batch).gradients["blocks"][0]
            parts.append(np.asarray(found["mlp"]["router"]["weight"], np.float64))
            _, metrics = steps(steps.initial_state(), batch)
            records.append(step_record(jax.device_get(metrics)))
    plain, few_plain, balanced, few_balanced = parts
    of_all, of_few = balanced - plain, few_balanced - few_plain
    size = np.abs(of_all).max()
    assert size > 1e-4
    # Differences of fp32 gradients: some units in the last place of the larger of them.
    np.testing.assert_allclose(of_few, of_all, rtol=0, atol=1e-5 * np.abs(few_balanced).max())
    for name in ("layers/balance", "layers/router_z"):
        assert records[3][name] == pytest.approx(records[2][name], rel=1e-6)
        assert records[2][name] > 0.01
