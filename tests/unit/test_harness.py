"""Tasks of lm-evaluation-harness: what it asks of a model, and that it is not needed otherwise."""

import sys
import types

import jax
import numpy as np
import pytest

from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import DataError, UnsupportedError
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.harness import (
    evaluate_tasks,
    harness_model,
    rolling_pairs,
    score_continuations,
)
from jaxinfra.serving.load import LoadedModel

LENGTH = 32  # positions of the model
TOKENIZER = bytes_tokenizer()
LOGITS = jax.jit(lambda decoder, ids_BT: decoder(ids_BT))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = codec.override(
        run_preset("tiny"),
        [
            "model.vocab_size=300",
            "model.model_dim=16",
            f"model.max_positions={LENGTH}",
            "model.stacks.0.repeats=1",
            "model.stacks.0.pattern.0.mixer.num_q_heads=2",
            "model.stacks.0.pattern.0.mixer.num_kv_heads=2",
            "model.stacks.0.pattern.0.mixer.head_dim=8",
            "model.stacks.0.pattern.0.feed_forward.hidden_dim=32",
            "model.init_std=0.3",
        ],
    )
    definition = define_model(config.model, execution_on())
    return LoadedModel(
        definition=definition,
        parameters=definition.initialize(jax.random.key(0)),
        tokenizer=TOKENIZER,
        config=config,
        step=None,
    )


@pytest.fixture
def harness(monkeypatch):
    """A stand-in for the package: its base class, and an evaluator that asks what it asks."""

    class LM:
        def __init__(self):
            self.rank = 0

    def simple_evaluate(*, model, tasks, **_):
        request = types.SimpleNamespace(args=("size = ", "1"))
        ((value, _),) = model.loglikelihood([request])
        figures = {"alias": tasks[0], "acc,none": value, "acc_stderr,none": "N/A"}
        return {"results": {tasks[0]: figures}}

    class TaskManager:
        all_tasks = ("sizes",)

        def __init__(self, *, include_path):
            del include_path

    for name, values in {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.evaluator": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return LM


def asked(*args: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(args=args)


def plain_score(loaded: LoadedModel, context: list[int], continuation: list[int]):
    """One row alone, in double precision from the logits on."""
    row = [*context, *continuation][-(LENGTH + 1) :]
    padded = np.zeros((1, LENGTH), np.int32)  # one program for all rows
    padded[0, : len(row) - 1] = row[:-1]
    logits = np.asarray(LOGITS(loaded.decoder, padded), np.float64)[0, : len(row) - 1]
    logits = logits[-len(continuation) :]
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    each = logits[np.arange(len(continuation)), continuation] - norm
    return each.sum(), bool((logits.argmax(-1) == continuation).all())


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).tolist()


def test_scores_of_a_batch_are_those_of_each_row(loaded):
    pairs = [(ids(a), ids(b)) for a, b in (("a", "bc"), ("the cat ", "sat"), ("x" * 40, "y"))]
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, :3] = ids("the")
    best = int(np.argmax(np.asarray(LOGITS(loaded.decoder, padded))[0, 2]))
    pairs.append((ids("the"), [best]))
    for found, pair in zip(score_continuations(loaded.decoder, pairs), pairs, strict=True):
        value, greedy = plain_score(loaded, *pair)
        # fp32 logits of size up to 30, each rounded at 2^-24, over at most 3 tokens.
        assert found.log_probability == pytest.approx(value, abs=30 * 3 * 2.0**-20)
        assert found.is_greedy == greedy
    assert score_continuations(loaded.decoder, pairs[-1:])[0].is_greedy


def test_texts_that_cannot_be_scored_are_refused(loaded):
    with pytest.raises(DataError, match=r"text 1: 0 tokens of context"):
        score_continuations(loaded.decoder, [([1], [2]), ([], [2])])
    with pytest.raises(DataError, match=r"33 to be scored.* at most max_positions=32"):
        score_continuations(loaded.decoder, [([1], [2] * 33)])
    with pytest.raises(DataError, match=r"text 0 has token ids 1\.\.300.*vocabulary is 0\.\.299"):
        score_continuations(loaded.decoder, [([1], [300])])


def test_windows_score_each_token_once():
    for length in (1, 4, 5, 11):
        pairs = rolling_pairs(range(length), first=99, max_positions=4)
        assert [token for _, part in pairs for token in part] == list(range(length))
        assert all(len(before) >= 1 and len(before) + len(part) <= 5 for before, part in pairs)
        for before, part in pairs[1:]:
            assert before[-1] == part[0] - 1


def test_what_the_harness_asks(loaded, harness):
    model = harness_model(loaded)
    assert isinstance(model, harness)
    begin = TOKENIZER.bos_id
    found = model.loglikelihood([asked("size =", " 12"), asked("size = ", "12"), asked("", "ab")])
    want = plain_score(loaded, [begin, *ids("size =")], ids(" 12"))
    assert found[0] == (pytest.approx(want[0], abs=1e-3), want[1])
    assert found[1] == found[0]  # the space is the word's
    assert found[2][0] == pytest.approx(plain_score(loaded, [begin], ids("ab"))[0], abs=1e-3)
    text = "a text of more than thirty-two tokens, in two windows."
    (rolled,) = model.loglikelihood_rolling([asked(text)])
    parts = rolling_pairs(ids(text), first=begin, max_positions=LENGTH)
    assert rolled == pytest.approx(sum(plain_score(loaded, *p)[0] for p in parts), abs=1e-2)


@pytest.mark.slow
def test_texts_end_where_a_task_says(loaded, harness):
    model = harness_model(loaded)
    (whole,) = model.generate_until([asked("ab", {"max_gen_toks": 8})])
    assert whole
    until = whole[2]
    settings = {"max_gen_toks": 8, "until": [until]}
    found = model.generate_until([asked("ab", settings), asked("ab", {"max_gen_toks": 8})])
    assert found == [whole.split(until)[0], whole]


def test_tasks_are_evaluated_by_name(loaded, harness):
    found = evaluate_tasks(loaded, ["sizes"])
    value = harness_model(loaded).loglikelihood([asked("size =", " 1")])[0][0]
    assert found == {"sizes": {"acc,none": pytest.approx(value)}}
    with pytest.raises(Exception, match="knows no task 'size'"):
        evaluate_tasks(loaded, ["size"])


def test_without_the_package_it_is_named(loaded, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UnsupportedError, match="pip install lm_eval"):
        harness_model(loaded)
    assert main(["evaluate", "nowhere", "--shots", "2"]) == 1
    assert "--shots is of tasks" in capsys.readouterr().err
