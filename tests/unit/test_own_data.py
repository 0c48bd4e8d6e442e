"""Batches that a script gives to ``train``: their state, their rows, and what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest

import jaxinfra
from jaxinfra.config.data import OWN_SOURCE
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.training.own_data import OwnBatches, OwnData

CONFIG = jaxinfra.override(
    jaxinfra.preset("tiny"),
    [
        "model.vocab_size=300",
        "data.tokenizer.kind=bytes",
        "training.batch_size=4",
        "training.sequence_length=8",
        "training.steps=6",
    ],
)


def rows(step: int) -> np.ndarray:
    return np.full((4, 9), step)


class Counted:
    """An iterable that knows where it is."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        while True:
            self.step += 1
            yield rows(self.step - 1)

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Grained:
    """An iterable whose iterator knows where it is, as Grain's does."""

    def __iter__(self):
        return self

    def __init__(self):
        self.step = 0

    def __next__(self):
        self.step += 1
        return rows(self.step - 1)

    def get_state(self):
        return {"at": self.step}

    def set_state(self, state):
        self.step = state["at"]


def batches(data, *, share=(0, 1), say=print) -> OwnBatches:
    return OwnBatches(data, CONFIG, share=share, say=say)


@pytest.mark.parametrize("make", [Counted, Grained])
def test_data_with_a_state_goes_on_where_a_step_was(make):
    first = batches(make())
    read = [next(first) for _ in range(3)]
    kept = first.state(2)  # the third batch is read ahead
    later = batches(make())
    later.restore({**kept, "excluded": []})
    np.testing.assert_array_equal(next(later).tokens, read[2].tokens)
    assert later.step == 3
    first.restore(first.state(0))  # and back to the start
    np.testing.assert_array_equal(next(first).tokens, read[0].tokens)


def test_data_without_a_state_is_said_to_begin_anew():
    told = []
    first = batches(map(rows, itertools.count()))
    next(first)
    later = batches(map(rows, itertools.count()), say=told.append)
    later.restore(first.state())
    assert next(later).tokens.max() == 0
    assert "begins from its start: from step 1 on" in told[0]
    with pytest.raises(DataError, match="go back to step 0"):
        later.restore(later.state(0))


def test_processes_take_their_rows_of_a_batch():
    whole = np.arange(36).reshape(4, 9)
    parts = [next(batches([whole], share=(part, 2))).tokens for part in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole[:, :-1])


def test_the_last_batches_are_read_again():
    data = batches(Counted())
    read = [next(data) for _ in range(6)]
    np.testing.assert_array_equal(data.batch(5).tokens, read[5].tokens)
    with pytest.raises(DataError, match="cannot be read again"):
        data.batch(0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (np.zeros((4, 8), np.int32), "rows of 4 x 7 tokens, the config batch_size=4"),
        (np.full((4, 9), 300), r"token ids 300\.\.300, the model's vocabulary is 0\.\.299"),
        ("text", "give whole numbers"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(found, words):
    with pytest.raises(DataError, match=words):
        next(batches([found]))


def test_data_that_end_say_after_how_many_steps():
    data = batches([rows(0)])
    next(data)
    with pytest.raises(DataError, match="ended after 1 of 6 steps"):
        next(data)


class Unwritable(Counted):
    def state_dict(self):
        return {"step": object()}


def test_a_state_that_no_checkpoint_holds_is_refused():
    with pytest.raises(DataError, match="no JSON value"):
        batches(Unwritable())


@pytest.mark.parametrize(
    ("data", "validation", "words"),
    [
        ("texts/", None, "data='texts/' is a str"),
        (3, None, "data=3 is a int"),
        (None, 3, "^validation=3 is a int"),
        (None, {"books": "x"}, "^validation books='x' is a str"),
        (None, iter([rows(0)]), "can be read only once"),
    ],
)
def test_what_is_no_iterable_is_refused(data, validation, words):
    with pytest.raises(ConfigError, match=words):
        OwnData.of(data, validation)


def test_the_config_says_where_the_data_came_from():
    own = OwnData.of([rows(0)], None)
    assert own is not None
    assert own.named_in(CONFIG).data.source == OWN_SOURCE
    bpe = jaxinfra.override(CONFIG, ["data.tokenizer.kind=bpe"])
    with pytest.raises(ConfigError, match="kind=bpe"):
        own.named_in(bpe)
    chat = dataclasses.replace(CONFIG.data, heldout_source="texts/")
    with pytest.raises(ConfigError, match=r"data= with data\.heldout_source"):
        own.named_in(dataclasses.replace(CONFIG, data=chat))
