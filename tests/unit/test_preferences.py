"""Losses of pairs of answers, the rows that hold them, and the lines that they come from."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from chat_model import CHATML as TEMPLATE
from chat_model import write_tokenizer
from numbered_documents import numbered_documents

from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig, DataFormat, TokenizerConfig, TokenizerKind
from jaxinfra.config.preferences import PreferenceConfig, PreferenceLoss
from jaxinfra.config.presets import run_preset
from jaxinfra.config.validate import validate
from jaxinfra.data.batch import Batch
from jaxinfra.data.chat import ChatEncoder
from jaxinfra.data.chat_template import ChatTemplate
from jaxinfra.data.corpora import open_corpora
from jaxinfra.data.pairs import PairEncoder
from jaxinfra.data.readers import Document
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.data.whole_rows import MOST_PAIRS, pair_pieces, pair_rows
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.training.preferences import count_pairs, pair_sums, preference_loss

EPSILON = float(np.finfo(np.float32).eps)
CONFIGS = [
    PreferenceConfig(),
    PreferenceConfig(beta=0.7, label_smoothing=0.2, likelihood=0.3),
    PreferenceConfig(loss=PreferenceLoss.IPO, beta=0.25),
    PreferenceConfig(loss=PreferenceLoss.SIMPO),
    PreferenceConfig(loss=PreferenceLoss.SIMPO, beta=2.5, margin=0.4, label_smoothing=0.1),
    PreferenceConfig(loss=PreferenceLoss.ORPO),
    PreferenceConfig(loss=PreferenceLoss.CPO, beta=0.2),
]


def plain_loss(config, c, r, nc, nr, c_ref, r_ref):
    """The formulas as the papers print them, in Python's floats."""

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x)) if x > -30 else x - math.log1p(math.exp(x))

    def log_odds(mean):
        p = math.exp(mean)
        return math.log(p / (1 - p))

    name = config.loss.value
    beta = config.beta or (2.0 if name == "simpo" else 0.1)
    if name == "ipo":
        loss = ((c - c_ref) - (r - r_ref) - 1 / (2 * beta)) ** 2
    elif name == "orpo":
        loss = -beta * log_sigmoid(log_odds(c / nc) - log_odds(r / nr))
    else:
        gamma = config.margin if config.margin is not None else beta / 2
        x = {
            "dpo": beta * (c - c_ref) - beta * (r - r_ref),
            "simpo": beta / nc * c - beta / nr * r - gamma,
            "cpo": beta * c - beta * r,
        }[name]
        e = config.label_smoothing
        loss = -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)
    weight = config.likelihood
    if weight is None:
        weight = 1.0 if name in ("orpo", "cpo") else 0.0
    return loss - weight * c / nc


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.loss.value}-{c.beta}")
def test_losses_and_gradients_are_the_papers(config):
    rng = np.random.default_rng(3)
    nc, nr = rng.integers(1, 40, 9), rng.integers(1, 40, 9)
    c, c_ref = -rng.uniform(0.05, 3, 9) * nc, -rng.uniform(0.05, 3, 9) * nc
    r, r_ref = -rng.uniform(0.05, 3, 9) * nr, -rng.uniform(0.05, 3, 9) * nr
    given = [x.astype(np.float32) for x in (c, r, nc, nr, c_ref, r_ref)]

    def loss(c, r, nc, nr, c_ref, r_ref):
        found = preference_loss(
            c,
            r,
            config,
            chosen_tokens=nc,
            rejected_tokens=nr,
            chosen_reference=c_ref,
            rejected_reference=r_ref,
        ).loss
        return found.sum(), found

    evaluate = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    gradients, found = jax.device_get(evaluate(*given))
    exact = [np.asarray(x, np.float64) for x in given]
    for i in range(9):
        c, r, *rest = (x[i] for x in exact)
        want = plain_loss(config, c, r, *rest)
        # A loss is a function of sums of the inputs, each rounded a few times: its error is theirs
        # times its slope, and a few roundings of its own. IPO squares, so its slope is twice a sum.
        size = sum(abs(x[i]) for x in (exact[0], exact[1], exact[4], exact[5])) + 10.0
        slope = 2.0 * size if config.loss is PreferenceLoss.IPO else 1.0 + config.strength
        assert abs(float(found[i]) - want) <= 8 * EPSILON * size * slope
        # Central differences of the plain form: their own error is h^2 times a third derivative.
        h = 1e-4
        for which, gradient in enumerate(gradients):
            up, down = [c, r], [c, r]
            up[which] += h
            down[which] -= h
            slope_here = plain_loss(config, *up, *rest) - plain_loss(config, *down, *rest)
            assert float(gradient[i]) == pytest.approx(slope_here / (2 * h), rel=2e-4, abs=2e-6)


def test_orpo_of_certain_answers_is_finite():
    config = PreferenceConfig(loss=PreferenceLoss.ORPO)

    @jax.jit
    @jax.value_and_grad
    def loss(c, tokens):
        return preference_loss(
            c, -tokens, config, chosen_tokens=tokens, rejected_tokens=tokens
        ).loss.sum()

    value, slope = loss(np.float32([0.0]), np.float32([1.0]))  # probability 1: infinite odds
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


def pairs_of(num: int, seed: int = 0):
    """Token arrays of pairs, with what counts and reference log probabilities."""
    rng = np.random.default_rng(seed)
    arrays = numbered_documents(rng.integers(3, 9, 2 * num).tolist())
    total = len(arrays.tokens)
    counted = np.ones(total, np.uint8)
    counted[arrays.starts] = counted[arrays.starts + 1] = 0  # prompts of two tokens
    reference = -rng.uniform(0, 3, total).astype(np.float32)
    return dataclasses.replace(arrays, counted=counted, reference=reference)


def test_every_pair_lies_in_one_row_as_two_segments():
    arrays = pairs_of(40)
    windows = pair_rows(arrays, sequence_length=40, seed=1)
    batch = windows.batch(np.arange(windows.num_windows))
    seen = []
    for row in range(windows.num_windows):
        segments = batch.segment_ids[row]
        for pair in range((segments.max() + 1) // 2):
            numbers = []
            for side in (0, 1):
                inside = segments == 2 * pair + side
                tokens, targets = batch.tokens[row][inside], batch.targets[row][inside]
                document = int(np.searchsorted(arrays.starts, targets[0]))
                numbers.append(document)
                np.testing.assert_array_equal(targets, arrays.document(document))
                np.testing.assert_array_equal(tokens, [arrays.bos_id, *targets[:-1]])
                np.testing.assert_array_equal(batch.weights[row][inside][:2], [0.0, 0.0])
                assert batch.weights[row][inside][2:].all()
                np.testing.assert_array_equal(
                    batch.reference[row][inside], arrays.reference[targets]
                )
                np.testing.assert_array_equal(batch.positions[row][inside], np.arange(inside.sum()))
            assert numbers == [numbers[0], numbers[0] + 1]
            seen.append(numbers[0] // 2)
    assert sorted(seen) == list(range(40))
    assert (batch.weights[batch.segment_ids < 0] == 0).all()
    filled = (batch.segment_ids >= 0).mean()
    assert filled > 0.85
    again = windows.batch(np.arange(windows.num_windows, 2 * windows.num_windows))
    assert not np.array_equal(again.tokens, batch.tokens)  # another order
    assert sorted(map(bytes, again.tokens)) == sorted(map(bytes, batch.tokens))


def test_no_row_has_more_pairs_than_the_loss_has_room_for():
    pieces = pair_pieces(numbered_documents([1] * 300), sequence_length=4096)
    assert np.bincount(pieces.row).max() == 2 * MOST_PAIRS


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(
        DataError, match=r"1 of 2 pairs do not fit .*=10 tokens: the longest has 12"
    ):
        pair_pieces(numbered_documents([2, 3, 6, 6]), sequence_length=10)


@pytest.mark.parametrize("config", CONFIGS[::3], ids=lambda c: c.loss.value)
def test_sums_of_packed_rows_are_those_of_the_pairs(config):
    arrays = pairs_of(12, seed=5)
    if not config.has_reference:
        arrays = dataclasses.replace(arrays, reference=None)
    windows = pair_rows(arrays, sequence_length=48, seed=0)
    batch = windows.batch(np.arange(windows.num_windows))
    log_p = -np.random.default_rng(9).uniform(0.1, 3, len(arrays.tokens)).astype(np.float32)
    each_BT = np.where(batch.segment_ids >= 0, log_p[np.minimum(batch.targets, len(log_p) - 1)], 7)
    each_BT = each_BT.astype(np.float32)
    summed, counted = jax.jit(pair_sums, static_argnums=2), jax.jit(count_pairs)
    found = jax.device_get(summed(each_BT, batch, config))

    def answer(values, document):
        start, length = arrays.starts[document], arrays.lengths[document]
        return float(np.float64(values[start + 2 : start + length]).sum())

    losses = []
    for pair in range(12):
        sides = (2 * pair, 2 * pair + 1)
        c, r = (answer(log_p, each) for each in sides)
        counts = [int(arrays.lengths[each]) - 2 for each in sides]
        reference = [0.0, 0.0]
        if arrays.reference is not None:
            reference = [answer(arrays.reference, each) for each in sides]
        losses.append(plain_loss(config, c, r, *counts, *reference))
    assert float(found.loss) == pytest.approx(sum(losses), rel=1e-5)
    assert float(found.figures["pairs"]) == float(counted(batch)) == 12
    margin = found.figures["chosen_reward"] - found.figures["rejected_reward"]
    assert float(found.figures["margin"]) == pytest.approx(float(margin), rel=1e-4, abs=1e-4)
    empty = jax.tree.map(np.zeros_like, batch)
    empty = dataclasses.replace(empty, segment_ids=empty.segment_ids - 1)
    assert float(summed(each_BT, empty, config).loss) == 0.0


TOKENIZER = bytes_tokenizer()
CHATML = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def encoded(row, *, chat: bool = False):
    encoder = PairEncoder(TOKENIZER, None)
    if chat:
        template = ChatTemplate(CHATML, variables={"bos_token": "#"})
        encoder = PairEncoder(TOKENIZER, ChatEncoder(template, TOKENIZER))
    (pair,) = encoder.encode_batch([Document(name="x:1", text=json.dumps(row))])
    return pair


def test_a_text_answer_follows_its_prompt_and_ends():
    chosen, rejected = encoded({"prompt": "ab", "chosen": "cd", "rejected": "e"})
    assert chosen.tokens.tolist() == [*b"abcd", TOKENIZER.eos_id]
    assert chosen.counted.tolist() == [False, False, True, True, True]
    assert rejected.tokens.tolist() == [*b"abe", TOKENIZER.eos_id]
    assert (chosen.text, rejected.text) == ("cd", "e")


USER, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
MORE, NO = {"role": "user", "content": "so?"}, {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER, SAID, MORE], "chosen": [SAID], "rejected": "no"},
        {"prompt": [USER, SAID, MORE], "chosen": "yo", "rejected": NO},
        {"chosen": [USER, SAID, MORE, SAID], "rejected": [USER, SAID, MORE, NO]},
        {"prompt": "so?", "chosen": [USER, SAID, MORE, SAID], "rejected": [USER, SAID, MORE, NO]},
    ],
)
def test_forms_of_conversations(row):
    """The model's earlier turn is given: only the answer counts."""
    chosen, rejected = encoded(row, chat=True)
    whole = "#<user>hi</><assistant>yo</><user>so?</><assistant>"
    assert bytes(chosen.tokens.tolist()).decode() == (whole + "yo</>")[1:]
    assert (chosen.text, rejected.text) == ("yo</>", "no</>")
    assert chosen.counted.sum() == len("yo</>")
    assert not chosen.counted[: len(whole) - 1].any()


@pytest.mark.parametrize(
    ("row", "chat", "what"),
    [
        ({"prompt": "a", "chosen": "b"}, False, "no rejected; each line must be"),
        ({"prompt": "a", "chosen": [SAID], "rejected": "b"}, False, "give --chat for messages"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, False, "the chosen answer has no token"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, True, "an answer is neither"),
        ({"chosen": "b", "rejected": "c"}, True, "no prompt"),
        ({"chosen": [USER, SAID], "rejected": [USER, SAID]}, True, "says nothing"),
        ({"prompt": [MORE], "chosen": [USER], "rejected": [SAID]}, True, "says nothing"),
    ],
)
def test_lines_that_are_no_pairs_are_named(row, chat, what):
    with pytest.raises(DataError, match=f"x:1: .*{what}"):
        encoded(row, chat=chat)


def test_pairs_from_a_file_to_rows(tmp_path):
    """By a model's template; both answers of a pair on one side of the split."""
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": "what?"} for n in range(40)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "model" / "tokenizer.json")
    config = DataConfig(
        source=str(file),
        heldout_fraction=0.3,
        format=DataFormat.PREFERENCES,
        chat_template=str(tmp_path / "model"),
        tokenizer=TokenizerConfig(kind=TokenizerKind.FILE, path=path),
    )
    corpora = open_corpora(config, vocab_size=300, cache_dir=tmp_path / "cache")
    corpus = corpora.sources["own"]
    assert corpus.train.num_documents + corpus.heldout.num_documents == 80
    assert corpus.heldout_names[0::2] == corpus.heldout_names[1::2]
    chosen, rejected = corpora.ranking_documents()[:2]
    assert chosen.startswith(b"!", -len(b"!<|im_end|>\n"))
    assert rejected == b"what?<|im_end|>\n"
    training = dataclasses.replace(run_preset("tiny").training, sequence_length=96)
    windows = corpora.train_source(training)
    batch = windows.batch(np.arange(windows.num_windows))
    assert batch.weights.sum() == corpus.train.num_counted
    assert float(jax.jit(count_pairs)(batch)) == corpus.train.num_documents // 2


def parse_preferences(text):
    return codec.parse_record(PreferenceConfig, text, what="preferences", first="loss")


def test_settings_on_the_command_line():
    assert parse_preferences("dpo") == PreferenceConfig()
    simpo = parse_preferences("simpo, beta=2.5, margin=1")
    assert simpo == PreferenceConfig(loss=PreferenceLoss.SIMPO, beta=2.5, margin=1.0)
    assert (parse_preferences("loss=orpo").likelihood_weight, simpo.likelihood_weight) == (1.0, 0.0)
    for text, what in (
        ("dpp", "'dpp' is no PreferenceLoss; did you mean 'dpo'"),
        ("dpo,bet=1", "did you mean 'beta'"),
        ("dpo,beta=x", "'x' is a str, expected float"),
        ("dpo,beta=-1", "beta=-1.0 must be 0 or more"),
        ("dpo,margin=1", "only simpo has one"),
        ("ipo,label_smoothing=0.1", "defined for dpo, cpo, simpo and reward"),
        ("dpo,label_smoothing=0.5", "below 0.5"),
    ):
        with pytest.raises(ConfigError, match=what):
            parse_preferences(text)


PAIRS = [
    "data.format=preferences",
    "data.tokenizer.kind=bytes",
    'preferences={"loss": "simpo"}',
]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (["data.format=text"], "go together"),
        (["preferences=none"], "go together"),
        (["training.z_loss=0.1"], "preferences with z_loss"),
        (["mesh.pipe=2"], "preferences with pipe=2"),
        (['preferences={"loss": "dpo"}'], "name it with --init DIR, or choose simpo"),
        (['data.mixture=[{"name": "a", "source": "a"}]'], "pairs are read from one source"),
    ],
)
def test_runs_that_cannot_learn_from_pairs_are_refused(changes, what):
    config = codec.override(run_preset("tiny"), PAIRS)
    validate(config)
    with pytest.raises(ConfigError, match=what):
        validate(codec.override(config, changes))


def test_a_batch_of_pairs_may_have_no_reference():
    arrays = dataclasses.replace(pairs_of(6), reference=None)
    batch = pair_rows(arrays, sequence_length=48, seed=0).batch(np.arange(2))
    assert batch.reference is None
    assert isinstance(batch, Batch)
