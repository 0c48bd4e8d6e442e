"""Single answers that are good or bad (kto), and the scores of a reward model."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numbered_documents import numbered_documents
from small_models import dense

from jaxinfra.config import codec
from jaxinfra.config.data import DataFormat
from jaxinfra.config.finetune import InitConfig
from jaxinfra.config.kinds import Head
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.preferences import PreferenceConfig, PreferenceLoss
from jaxinfra.config.presets import run_preset
from jaxinfra.config.presets.runs import finetuning
from jaxinfra.config.validate import validate
from jaxinfra.data.pairs import BAD, PairEncoder
from jaxinfra.data.readers import Document
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.data.whole_rows import pair_rows
from jaxinfra.errors import ConfigError, DataError, UnsupportedError
from jaxinfra.hf import from_hf_config, to_hf_config, weight_map
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training import preferences
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.preferences import kto_loss, pair_sums, preference_loss, target_values

KTO = PreferenceConfig(loss=PreferenceLoss.KTO, beta=0.3, undesirable_weight=1.5)
REWARD = PreferenceConfig(loss=PreferenceLoss.REWARD)
TOKENIZER = bytes_tokenizer()


def plain_kto(answers, others, good) -> list[float]:
    """Equation 8 of the paper, with math alone: lambda_y - v(x, y)."""
    z, beta = max(0.0, math.fsum(others) / len(others)), 0.3
    return [
        1.0 - 1.0 / (1.0 + math.exp(-beta * (a - z)))
        if is_good
        else 1.5 - 1.5 / (1.0 + math.exp(-beta * (z - a)))
        for a, is_good in zip(answers, good, strict=True)
    ]


@pytest.mark.parametrize("shift", [2.0, -4.0], ids=["apart", "below-zero"])
def test_kto_is_the_papers_formula(shift):
    rng = np.random.default_rng(3)
    answers, others = rng.normal(0, 4, 6), rng.normal(shift, 1, 6)
    good = jnp.array([True, False, True, True, False, False])
    there = jnp.ones(6, bool)

    @jax.jit
    def losses(answers, others):
        return kto_loss(answers, others, KTO, is_good=good, is_there=there)

    given = answers.astype(np.float32), others.astype(np.float32)
    found = losses(*given)
    np.testing.assert_allclose(found.loss, plain_kto(answers, others, good), rtol=2e-5)
    np.testing.assert_allclose(found.reward, 0.3 * answers, rtol=1e-6)
    slopes = jax.grad(lambda *x: losses(*x).loss.sum(), argnums=(0, 1))(*given)
    assert not slopes[1].any()  # z has no gradient
    h = 1e-5
    for place in range(6):
        step = h * (np.arange(6) == place)
        up, down = (plain_kto(answers + sign * step, others, good) for sign in (1, -1))
        want = (math.fsum(up) - math.fsum(down)) / (2 * h)
        assert float(slopes[0][place]) == pytest.approx(want, rel=1e-4, abs=1e-7)


def test_a_reward_is_the_logistic_loss_of_scores():
    chosen, rejected = np.float32([1.5, -2.0, 30.0]), np.float32([0.5, 1.0, -30.0])
    ones = jnp.ones(3)

    def total(c, r):
        return preference_loss(c, r, REWARD, chosen_tokens=ones, rejected_tokens=ones).loss.sum()

    value, (up, down) = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(chosen, rejected)
    apart = [float(c) - float(r) for c, r in zip(chosen, rejected, strict=True)]
    assert float(value) == pytest.approx(sum(math.log1p(math.exp(-d)) for d in apart), rel=1e-6)
    np.testing.assert_allclose(up, [-1 / (1 + math.exp(d)) for d in apart], rtol=1e-5)
    np.testing.assert_allclose(up, -down, rtol=1e-6)


def test_packed_rows_give_the_losses_of_their_answers():
    rng = np.random.default_rng(5)
    arrays = numbered_documents(rng.integers(3, 9, 16).tolist())
    counted = np.ones(len(arrays.tokens), np.uint8)
    good = [True, False, False, True, True, False, True, False]
    for answer, is_good in enumerate(good):
        start, length = arrays.starts[2 * answer], arrays.lengths[2 * answer]
        counted[start : start + length] = 1 if is_good else BAD
    counted[arrays.starts] = 0  # prompts of a token
    reference = -rng.uniform(0, 3, len(arrays.tokens)).astype(np.float32)
    arrays = dataclasses.replace(arrays, counted=counted, reference=reference)
    assert arrays.num_counted == (counted != 0).sum()
    rows = pair_rows(arrays, sequence_length=40, seed=0)
    batch = rows.batch(np.arange(rows.num_windows))
    log_p = -rng.uniform(0.1, 3, len(arrays.tokens)).astype(np.float32)
    each_BT = log_p[np.minimum(batch.targets, len(log_p) - 1)]
    found = jax.device_get(jax.jit(pair_sums, static_argnums=2)(each_BT, batch, KTO))

    def ratio(document: int) -> float:
        start, end = arrays.starts[document] + 1, arrays.starts[document] + arrays.lengths[document]
        return float((log_p[start:end].astype(np.float64) - reference[start:end]).sum())

    answers, others = ([ratio(2 * n + side) for n in range(8)] for side in (0, 1))
    losses = plain_kto(answers, others, good)
    assert float(found.loss) == pytest.approx(math.fsum(losses), rel=1e-5)
    figures = found.figures
    assert (float(figures["answers"]), float(figures["good"])) == (8.0, 4.0)
    want = math.fsum(0.3 * a for a, is_good in zip(answers, good, strict=True) if is_good)
    assert float(figures["good_reward"]) == pytest.approx(want, rel=1e-5)
    model = define_model(dense(), execution_on())
    gradient = AccumulatedGradient(model, training=run_preset("tiny").training, preferences=KTO)
    assert float(gradient.counted(batch)) == counted.astype(bool).sum()  # marks are no weights


def encoded(form: DataFormat, rows, encoder=None):
    encoder = encoder or PairEncoder(TOKENIZER, None, form=form)
    documents = [
        Document(name=f"x:{n}", text=json.dumps(row)) for n, row in enumerate(rows, start=1)
    ]
    return encoder.encode_batch(documents)


def test_an_answer_is_beside_the_one_of_the_row_before():
    encoder = PairEncoder(TOKENIZER, None, form=DataFormat.LABELLED)
    rows = [
        {"prompt": "a", "completion": "bc", "label": True},
        {"prompt": "d", "completion": "e", "label": False},
    ]
    first, second = encoded(DataFormat.LABELLED, rows, encoder)
    texts = [[bytes(each.tokens[:-1].tolist()) for each in pair] for pair in (first, second)]
    assert texts == [[b"abc", b"ae"], [b"de", b"dbc"]]
    assert first[0].counted.tolist() == [0, 1, 1, 1]
    assert second[0].counted.tolist() == [0, BAD, BAD]
    assert second[1].counted.tolist() == [0, 1, 1, 1]
    ((_, other),) = encoded(DataFormat.LABELLED, rows[:1], encoder)  # a later batch goes on
    assert bytes(other.tokens[:-1].tolist()) == b"ae"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, "no label; each line must be"),
        ({"prompt": "a", "completion": "b", "label": 1}, "label=1 is no true or false"),
        ({"prompt": "a", "completion": "", "label": True}, "the answer has no token"),
    ],
)
def test_rows_that_are_no_labelled_answers_are_named(row, words):
    with pytest.raises(DataError, match=f"x:1: .*{words}"):
        encoded(DataFormat.LABELLED, [row])


def test_a_score_is_read_after_an_answers_last_token():
    row = {"prompt": "a", "chosen": "bc", "rejected": "d"}
    ((chosen, _),) = encoded(DataFormat.SCORED, [row])
    end = TOKENIZER.eos_id
    assert chosen.tokens.tolist() == [*b"abc", end, end]
    assert chosen.counted.tolist() == [False] * 4 + [True]


@pytest.fixture(scope="module")
def rewarding():
    model = dataclasses.replace(dense(), head=Head.SCORE)
    return define_model(model, execution_on())


def test_a_reward_model_scores_the_text_so_far(rewarding):
    tree = rewarding.initialize(jax.random.key(0))
    assert tree["unembedding"]["table"].shape == (1, rewarding.config.model_dim)
    decoder, ids = rewarding.bind(tree), np.array([[1, 2, 3, 4]], np.int32)
    scores = decoder(ids)
    assert scores.shape == (1, 4, 1)
    hidden = np.asarray(decoder.hidden(jnp.asarray(ids)), np.float64)
    want = hidden @ np.asarray(tree["unembedding"]["table"], np.float64).T
    np.testing.assert_allclose(scores, want, rtol=1e-4, atol=1e-6)
    found = target_values(rewarding, tree, decoder.hidden(jnp.asarray(ids)), jnp.asarray(ids))
    np.testing.assert_array_equal(found, scores[..., 0])
    with pytest.raises(UnsupportedError, match="scores texts and has no next token"):
        rewarding.config.require_logits()


def test_logits_of_a_length_without_divisors_are_computed_in_few_chunks(monkeypatch):
    model, length = define_model(dense(), execution_on()), 13
    tree = model.initialize(jax.random.key(0))
    ids, targets = jax.random.randint(jax.random.key(1), (2, 2, length), 0, model.config.vocab_size)
    hidden = model.bind(tree).hidden(ids)

    def summed(hidden):
        weights = jnp.arange(length, dtype=jnp.float32)[None]
        return jnp.sum(target_values(model, tree, hidden, targets) * weights)

    want = jax.value_and_grad(summed)(hidden)
    monkeypatch.setattr(preferences, "_CHUNK_LOGITS", 2 * length * model.config.vocab_size / 2.5)
    chunked = jax.value_and_grad(lambda hidden: summed(hidden))  # traced anew
    assert {*re.findall(r"length=(\d+)", str(jax.make_jaxpr(chunked)(hidden)))} == {"3"}
    for new, old in zip(chunked(hidden), want, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def test_chunks_are_at_least_as_many_as_asked_and_none_is_empty():
    for length in (1, 2, 3, 12, 13, 97, 128):
        for parts in np.linspace(0.1, length + 1, 50):
            count, size = preferences._chunks(length, parts)
            assert (count - 1) * size < length <= count * size
            assert min(length, parts) <= count <= max(1.0, 2 * np.ceil(parts))


def test_a_reward_model_is_a_sequence_classifier_of_one_label(rewarding):
    values = to_hf_config(rewarding.config, model_type="llama")
    assert values["architectures"] == ["LlamaForSequenceClassification"]
    assert from_hf_config(values) == rewarding.config
    names = weight_map("llama", rewarding.config, rewarding.arrays).tensors
    assert names["score.weight"].shape == (1, rewarding.config.model_dim)
    assert "lm_head.weight" not in names
    with pytest.raises(ConfigError, match=r"num_labels=2: .*of one label is needed"):
        from_hf_config({**values, "id2label": {"0": "no", "1": "yes"}})


def test_settings():
    run = finetuning(
        dense(),
        init=InitConfig(path="m", sha256="0"),
        policy=PolicyName.FP32,
        preferences=REWARD,
    )
    validate(run)
    assert run.model.head is Head.SCORE
    assert run.data.format is DataFormat.SCORED
    tiny = run_preset("tiny")
    for config, changes, words in [
        (run, ["model.head=logits"], "head=logits with preferences loss=reward"),
        (run, ['lora={"rank": 2}'], "adapters have no head of scores"),
        (tiny, ["model.head=score"], "head=score with preferences none"),
        (run, ["data.format=preferences"], r"set data\.format=scored"),
    ]:
        with pytest.raises(ConfigError, match=words):
            validate(codec.override(config, changes))
    for given, words in [
        ({"loss": "reward", "beta": 0.1}, "scores have no scale"),
        ({"loss": "dpo", "desirable_weight": 2.0}, "only kto has them"),
        ({"loss": "kto", "likelihood": 1.0}, "and no likelihood"),
    ]:
        with pytest.raises(ConfigError, match=words):
            PreferenceConfig(**given)
