"""Held-out windows count every token of every document exactly once."""

import gzip
import lzma

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from numbered_documents import BOS, numbered_documents

from jaxinfra.data.baseline import compressed_bits_per_byte
from jaxinfra.data.heldout import HeldoutBatches
from jaxinfra.errors import DataError

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=10)


@hypothesis.given(LENGTHS, st.integers(1, 16), st.integers(1, 5), st.data())
@hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
def test_every_token_counts_once_with_its_context(
    lengths: list[int], sequence_length: int, batch_size: int, data: st.DataObject
):
    stride = data.draw(st.integers(1, sequence_length))
    arrays = numbered_documents(lengths)
    batches = HeldoutBatches(
        arrays, sequence_length=sequence_length, batch_size=batch_size, stride=stride
    )
    counted: list[int] = []
    for batch in batches:
        assert batch.tokens.shape == (batch_size, sequence_length)
        for row in range(batch_size):
            segments = batch.segment_ids[row]
            real = segments >= 0
            assert (np.diff(segments[real]) >= 0).all()
            assert (batch.weights[row][~real] == 0).all()
            for segment in np.unique(segments[real]):
                here = segments == segment
                tokens, targets = batch.tokens[row][here], batch.targets[row][here]
                weights = batch.weights[row][here]
                np.testing.assert_array_equal(batch.positions[row][here], np.arange(here.sum()))
                # Tokens are unique in these arrays: a run of successors is one document's.
                document = np.searchsorted(np.cumsum(lengths), targets, side="right")
                assert (document == document[0]).all()
                start = sum(lengths[: document[0]])
                np.testing.assert_array_equal(tokens[1:], targets[:-1])
                np.testing.assert_array_equal(np.diff(targets), 1)
                begins = targets[0] == start
                assert tokens[0] == (BOS if begins else targets[0] - 1)
                context = 0 if begins else sequence_length - stride
                np.testing.assert_array_equal(weights, np.arange(len(weights)) >= context)
                counted += targets[weights > 0].tolist()
    assert sorted(counted) == list(range(arrays.num_tokens))
    assert sum(float(batch.weights.sum()) for batch in batches) == arrays.num_tokens


def test_small_documents_share_rows():
    arrays = numbered_documents([3, 5, 2, 6, 8, 1, 7])
    batches = HeldoutBatches(arrays, sequence_length=8, batch_size=2)
    assert len(batches) == 2  # 32 tokens in four rows of 8
    assert all((batch.weights == 1).all() for batch in batches)
    again = HeldoutBatches(arrays, sequence_length=8, batch_size=2)
    chex.assert_trees_all_equal(list(batches), list(again))


def test_the_last_batch_is_filled_with_weightless_rows():
    (batch,) = HeldoutBatches(numbered_documents([5]), sequence_length=8, batch_size=3)
    assert batch.weights.sum() == 5
    assert (batch.segment_ids[1:] == -1).all()
    with pytest.raises(IndexError, match="batch 1 of 1"):
        HeldoutBatches(numbered_documents([5]), sequence_length=8, batch_size=3)[1]


def test_processes_split_the_rows():
    arrays = numbered_documents([30, 9, 4, 17])
    settings = {"sequence_length": 8, "batch_size": 4}
    whole = list(HeldoutBatches(arrays, **settings))
    parts = [
        list(HeldoutBatches(arrays, **settings, process_index=i, process_count=2)) for i in range(2)
    ]
    for batch, first, second in zip(whole, *parts, strict=True):
        merged = jax.tree.map(lambda *p: np.concatenate(p), first, second)
        chex.assert_trees_all_equal(merged, batch)


@pytest.mark.parametrize("stride", [0, 9, -1])
def test_a_stride_that_skips_is_refused(stride: int):
    with pytest.raises(DataError, match="must be between 1 and sequence_length=8"):
        HeldoutBatches(numbered_documents([5]), sequence_length=8, batch_size=1, stride=stride)


def test_the_compression_baseline_is_that_of_the_tools():
    documents = [f"def f_{i}(x):\n    return x * {i}\n".encode() * (i % 5 + 1) for i in range(99)]
    whole = b"".join(documents)
    baseline = compressed_bits_per_byte(documents)
    assert baseline.num_bytes == len(whole)
    assert baseline.xz_all == 8 * len(lzma.compress(whole, preset=9)) / len(whole)
    assert baseline.gzip_all == 8 * len(gzip.compress(whole, 9)) / len(whole)
    assert baseline.gzip_each > baseline.gzip_all > baseline.xz_all
    with pytest.raises(DataError, match="nothing to compress"):
        compressed_bits_per_byte([b""])
