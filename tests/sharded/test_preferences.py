"""A step on pairs of answers: equal to the formula on each answer alone, on every mesh."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numbered_documents import numbered_documents

import jaxinfra
from jaxinfra.checkpoint.initial import read_initial
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.data.whole_rows import pair_rows
from jaxinfra.training import preferences
from jaxinfra.training.preferences import preference_loss

MESHES = {
    "one": {},
    "accumulation": {"training.accumulation": 2},
    "fsdp4-tensor2-accumulation": {"mesh.fsdp": 4, "mesh.tensor": 2, "training.accumulation": 2},
    "replica2-context2-fsdp2": {"mesh.replica": 2, "mesh.context": 2, "mesh.fsdp": 2},
    "lora-fsdp8": {"mesh.fsdp": 8, "lora": '{"rank": 2}'},
}
SETTINGS = {
    "model.vocab_size": 300,
    "model.model_dim": 16,
    "model.stacks.0.repeats": 2,
    "model.stacks.0.pattern.0.mixer.num_q_heads": 4,
    "model.stacks.0.pattern.0.mixer.num_kv_heads": 2,
    "model.stacks.0.pattern.0.mixer.head_dim": 4,
    "model.stacks.0.pattern.0.feed_forward.hidden_dim": 32,
    "optimizer.warmup_steps": 0,
    "optimizer.muon": "none",
    "training.steps": 4,
    "training.batch_size": 8,
    "training.sequence_length": 64,
    "data.heldout_fraction": 0.2,
    "data.tokenizer.kind": "bytes",
}
FORMS = {
    "kto": {"data.format": "labelled"},
    "reward": {"data.format": "scored", "model.head": "score"},
}


def config_of(settings) -> jaxinfra.RunConfig:
    changes = [f"{name}={value}" for name, value in settings.items()]
    return jaxinfra.override(jaxinfra.preset("tiny"), changes)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A trained run and a file of pairs."""
    place = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    (place / "text").mkdir()
    for number in range(12):
        words = (f"{n} apples" for n in rng.integers(100, 999, 20))
        (place / "text" / f"{number}.txt").write_text(" ".join(words))
    rows = []
    for _ in range(90):
        number = int(rng.integers(100, 999))
        vague = ["some", "many of them", "a few"][number % 3]
        rows.append({"prompt": f"{number}: ", "chosen": f"{number} apples", "rejected": vague})
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    config = config_of({**SETTINGS, "data.source": place / "text"})
    jaxinfra.train(config, place / "run", cache_dir=place / "cache")
    return place


def steps_of(place, *, loss: str, **settings) -> jaxinfra.Steps:
    config = config_of(
        {
            **SETTINGS,
            **FORMS.get(loss, {"data.format": "preferences"}),
            "data.source": place / ("answers.jsonl" if loss == "kto" else "pairs.jsonl"),
            "preferences": json.dumps({"loss": loss}),
        }
    )
    config = dataclasses.replace(config, init=read_initial(place / "run").init)
    return jaxinfra.Steps(
        jaxinfra.override(config, [f"{name}={value}" for name, value in settings.items()])
    )


def plain_objective(steps: jaxinfra.Steps, batch):
    """Mean loss of the pairs as a function of parameters, each answer in a row of its own."""
    model, config = steps._job.model, steps.config.preferences
    answers = []
    for row in range(len(batch.tokens)):
        segments = batch.segment_ids[row]
        for segment in range(segments.max() + 1):
            inside = segments == segment
            fields = (batch.tokens, batch.targets, batch.weights, batch.reference)
            answers.append([None if x is None else x[row][inside] for x in fields])

    def log_p(parameters, answer):
        tokens, targets, weights, reference = answer
        logits = model.bind(parameters)(jnp.asarray(tokens[None]))[0]
        each = jax.nn.log_softmax(logits)[jnp.arange(len(targets)), targets]
        known = 0.0 if reference is None else float((reference * weights).sum())
        return (each * weights).sum(), float(weights.sum()), known

    def objective(parameters):
        total = jnp.zeros(())
        for chosen, rejected in zip(answers[0::2], answers[1::2], strict=True):
            (c, nc, c_ref), (r, nr, r_ref) = log_p(parameters, chosen), log_p(parameters, rejected)
            total += preference_loss(
                c,
                r,
                config,
                chosen_tokens=jnp.float32(nc),
                rejected_tokens=jnp.float32(nr),
                chosen_reference=jnp.float32(c_ref),
                rejected_reference=jnp.float32(r_ref),
            ).loss
        return total / (len(answers) // 2)

    return objective


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo"])
def test_a_step_learns_what_the_formula_says(place, loss, monkeypatch):
    """Packed in rows with logits in parts, as without: the gradient is that of the formula."""
    monkeypatch.setattr(preferences, "_CHUNK_LOGITS", 300 * 8 * 16)  # 16 positions at a time
    steps = steps_of(place, loss=loss)
    state = steps.initial_state()
    batch = next(iter(steps.batches(cache_dir=place / "cache")))
    objective = plain_objective(steps, batch)
    value, gradient = jax.value_and_grad(objective)(state.parameters)
    learned = steps._job.gradient(
        state.parameters,
        state.model_state,
        jax.tree.map(jnp.asarray, batch),
        key=jax.random.key(0),
        loss_scale=jnp.ones(()),
    )
    # About 20 sums of 64 terms of size 6 behind each figure, in fp32.
    assert float(learned.loss) == pytest.approx(float(value), rel=2e-5)
    norm = float(optax.tree_utils.tree_norm(gradient))
    difference = jax.tree.map(jnp.subtract, learned.gradients, gradient)
    assert float(optax.tree_utils.tree_norm(difference)) <= 1e-4 * norm
    if loss == "dpo":  # the model is its own reference yet
        assert float(value) == pytest.approx(np.log(2.0), rel=1e-6)
        assert abs(float(learned.figures["margin"])) < 1e-4


@pytest.fixture(scope="module")
def on_one(place):
    return curve(steps_of(place, loss="dpo"), place)


def curve(steps: jaxinfra.Steps, place) -> list[tuple[float, float, float]]:
    state, found = steps.initial_state(), []
    for batch in steps.batches(cache_dir=place / "cache"):
        state, metrics = steps(state, batch)
        figures = metrics.figures
        found.append(
            (
                float(metrics.loss),
                float(metrics.gradient_norm),
                float(figures["margin"] if "margin" in figures else figures["divergence"]),
            )
        )
        if len(found) == 3:
            return found
    raise AssertionError("batches end")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one"])
def test_meshes_agree(place, on_one, mesh):
    settings = MESHES[mesh]
    found = curve(steps_of(place, loss="dpo", **settings), place)
    if "lora" in settings:  # other parameters: the same loss at first, then a falling one
        assert found[0][0] == pytest.approx(np.log(2.0), rel=1e-5)
        assert found[2][0] < found[0][0]
        return
    np.testing.assert_allclose(found, on_one, rtol=5e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "reward"])
def test_scores_and_single_answers_agree_over_devices(place, loss):
    """kto compares all rows of a micro-batch, whichever device they are on."""
    mesh = {"mesh.replica": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    one, many = (
        curve(steps_of(place, loss=loss, **settings, **{"training.accumulation": 2}), place)
        for settings in ({}, mesh)
    )
    np.testing.assert_allclose(many, one, rtol=5e-4, atol=2e-5)
    # At first the model is its own reference, and all scores are 0.
    assert one[0][0] == pytest.approx(0.5 if loss == "kto" else np.log(2.0), rel=1e-5)
    assert one[2][0] < one[0][0]


def test_rows_are_the_same_for_any_number_of_processes():
    """As those of text: contiguous parts of one batch."""
    windows = pair_rows(numbered_documents([3, 4] * 20), sequence_length=16, seed=2)
    settings = {"sequence_length": 16, "batch_size": 4, "seed": 2, "num_threads": 0}
    whole = next(TrainIterator(windows, **settings))
    halves = [
        next(TrainIterator(windows, **settings, process_index=i, process_count=2)) for i in (0, 1)
    ]
    joined = np.concatenate([each.tokens for each in halves])
    np.testing.assert_array_equal(joined, whole.tokens)
