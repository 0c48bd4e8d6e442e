"""Whole conversations in rows: by each method, each from its beginning, and what is left out."""

import bisect
import dataclasses
import logging

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from numbered_documents import BOS, numbered_documents

from jaxinfra.config.data import DataConfig, Packing, TooLong
from jaxinfra.data.pieces import best_fit
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.data.whole_rows import conversation_rows
from jaxinfra.errors import ConfigError, DataError

WHOLE = [Packing.AUTO, Packing.BEST_FIT, Packing.IN_ORDER, Packing.ALONE]
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=30)


def marked(lengths, counted=None):
    arrays = numbered_documents(lengths)
    marks = np.ones(len(arrays.tokens), np.uint8)
    for document in () if counted is None else np.flatnonzero(~np.array(counted)):
        start = arrays.starts[document]
        marks[start : start + lengths[document]] = 0
    return dataclasses.replace(arrays, counted=marks)


def rows(arrays, length=20, packing=Packing.AUTO, too_long=TooLong.DROP, seed=0):
    return conversation_rows(
        arrays, sequence_length=length, seed=seed, packing=packing, too_long=too_long
    )


def conversations(batch):
    """Each segment's targets."""
    found = []
    for row in range(len(batch.tokens)):
        for segment in range(int(batch.segment_ids[row].max()) + 1):
            here = batch.segment_ids[row] == segment
            assert batch.tokens[row][here][0] == BOS
            assert batch.positions[row][here].tolist() == [*range(here.sum())]
            assert batch.weights[row][here].any()
            found.append(batch.targets[row][here].tolist())
        assert not batch.weights[row][batch.segment_ids[row] == -1].any()
    return found


@pytest.mark.parametrize("packing", WHOLE)
@pytest.mark.parametrize("too_long", TooLong)
@hypothesis.given(lengths=LENGTHS, epoch=st.integers(0, 2), length=st.integers(1, 24))
@hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
def test_an_epoch_is_every_conversation_whole(packing, too_long, lengths, epoch, length):
    counted = [number % 4 > 0 for number in range(len(lengths))]
    arrays = marked(lengths, counted)
    wanted = [
        arrays.document(number).tolist()[:length]
        for number, num in enumerate(lengths)
        if counted[number] and num and (num <= length or too_long is TooLong.CUT)
    ]
    if not wanted:
        with pytest.raises(DataError, match="no conversation is left"):
            rows(arrays, length, packing, too_long)
        return
    made = rows(arrays, length, packing, too_long)
    first = epoch * made.num_windows
    batch = made.batch(np.arange(first, first + made.num_windows))
    assert sorted(conversations(batch)) == sorted(wanted)
    assert made.num_read(first + 1) == epoch * sum(map(len, wanted)) + int(
        (batch.segment_ids[0] >= 0).sum()
    )


def plain_best_fit(lengths, capacity, most):
    """As the rule reads: the fullest row that holds it, the first of equals."""
    free, held, row, column = [], {}, [0] * len(lengths), [0] * len(lengths)
    for index in np.argsort(-np.array(lengths), kind="stable"):
        place = bisect.bisect_left(free, (lengths[index], -1))
        left, number = free.pop(place) if place < len(free) else (capacity, len(held))
        row[index], column[index] = number, capacity - left
        held[number] = held.get(number, 0) + 1
        if left > lengths[index] and held[number] != most:
            bisect.insort(free, (left - lengths[index], number))
    return row, column


@hypothesis.given(LENGTHS.filter(any), st.none() | st.integers(1, 3))
@hypothesis.settings(deadline=None, derandomize=True, max_examples=100)
def test_best_fit_is_the_rule(lengths, most):
    lengths = [max(each, 1) for each in lengths]
    row, column = best_fit(np.array(lengths), 20, most=most)
    assert (row.tolist(), column.tolist()) == plain_best_fit(lengths, 20, most)


def test_rows_are_filled_by_the_method(caplog):
    arrays = marked([12, 12, 8, 8, 10, 10])
    assert [rows(arrays, packing=each).num_windows for each in WHOLE] == [3, 3, 4, 6]


def test_what_is_left_out_is_said(caplog):
    caplog.set_level(logging.INFO)
    rows(marked([5, 30, 5, 40], [True, False, False, True]))
    (said,) = caplog.messages
    assert "1 conversations in 1 rows, 25.0% full" in said
    assert "2 of 4 conversations are longer than sequence_length=20 and dropped" in said
    assert "1 without a token that counts are left out" in said


def test_another_packing_does_not_resume_a_run():
    arrays = marked([5, 6, 7, 8])
    settings = dict(sequence_length=20, batch_size=2, seed=0, num_threads=0)
    sources = [rows(arrays), rows(arrays, packing=Packing.ALONE), arrays]
    first, *others = (TrainIterator(source, **settings) for source in sources)
    state = first.state(1)
    first.restore(state)
    with pytest.raises(DataError, match="the saved data order had packing"):
        others[0].restore(state)


def test_text_is_cut_into_windows():
    with pytest.raises(ConfigError, match="packing=alone"):
        DataConfig(packing=Packing.ALONE)
