"""What a packed window holds, against the definition written as a loop."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from numbered_documents import BOS, EOS, numbered_documents

from jaxinfra.data.batch import Batch
from jaxinfra.data.packing import PackedWindows, permute
from jaxinfra.errors import DataError


def epoch_windows(windows: PackedWindows, epoch: int) -> Batch:
    first = epoch * windows.num_windows
    return windows.batch(np.arange(first, first + windows.num_windows))


LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any)


@hypothesis.given(LENGTHS, st.integers(1, 24), st.integers(0, 3), st.integers(0, 5))
@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
def test_an_epoch_is_every_document_once(
    lengths: list[int], sequence_length: int, epoch: int, seed: int
):
    arrays = numbered_documents(lengths)
    windows = PackedWindows(arrays, sequence_length=sequence_length, seed=seed)
    batch = epoch_windows(windows, epoch)
    # The rows in stream order: documents are told apart by their tokens, so the order in which
    # they were concatenated can be read off the epoch's own key.
    order = permute(np.arange(len(lengths)), size=len(lengths), key=f"documents/{seed}/{epoch}")
    place = permute(
        np.arange(windows.num_windows), size=windows.num_windows, key=f"windows/{seed}/{epoch}"
    )
    rows = np.argsort(place)

    tokens, targets, positions, segments = [], [], [], []
    for document in order:
        ids = arrays.document(document).tolist()
        tokens += [BOS, *ids]
        targets += [*ids, EOS]
        positions += range(len(ids) + 1)
        segments += [document] * (len(ids) + 1)
    total = len(tokens)
    assert windows.num_windows == -(-total // sequence_length)

    def stream(field: np.ndarray) -> list[int]:
        return field[rows].ravel().tolist()[:total]

    assert stream(batch.tokens) == tokens
    assert stream(batch.targets) == targets
    assert stream(batch.weights) == [1.0] * total
    for number, row in enumerate(rows):
        begin = number * sequence_length
        inside = slice(begin, min(begin + sequence_length, total))
        num_real = inside.stop - inside.start
        expected_segments = []
        expected_positions = []
        for i in range(inside.start, inside.stop):
            new = i == begin or segments[i] != segments[i - 1]
            expected_positions.append(0 if new else expected_positions[-1] + 1)
            previous = expected_segments[-1] if expected_segments else -1
            expected_segments.append(previous + 1 if new else previous)
        assert batch.segment_ids[row, :num_real].tolist() == expected_segments
        assert batch.positions[row, :num_real].tolist() == expected_positions
        # Padding: only after the last document of the epoch.
        assert (batch.segment_ids[row, num_real:] == -1).all()
        assert (batch.weights[row, num_real:] == 0).all()
        assert (batch.positions[row, num_real:] == 0).all()
        assert (batch.tokens[row, num_real:] == EOS).all()


def test_dtypes():
    batch = PackedWindows(numbered_documents([5]), sequence_length=4, seed=0).batch(np.arange(3))
    assert {batch.tokens.dtype, batch.targets.dtype, batch.segment_ids.dtype} == {np.dtype("i4")}
    assert batch.positions.dtype == np.int32
    assert batch.weights.dtype == np.float32


def test_a_batch_may_span_many_epochs():
    windows = PackedWindows(numbered_documents([3, 4, 5]), sequence_length=4, seed=1)
    samples = np.array([0, 11, 3, 40, 2, 1])
    together = windows.batch(samples)
    for row, sample in enumerate(samples):
        alone = windows.batch(samples[row : row + 1])
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0], err_msg=str(sample))
        np.testing.assert_array_equal(together.segment_ids[row], alone.segment_ids[0])


def test_epochs_and_seeds_differ():
    arrays = numbered_documents([7] * 40)
    streams = [
        epoch_windows(PackedWindows(arrays, sequence_length=16, seed=seed), epoch).tokens.tobytes()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(streams)) == 4


def test_selected_documents_only():
    arrays = numbered_documents([3, 4, 5]).select(np.array([2, 0]))
    batch = epoch_windows(PackedWindows(arrays, sequence_length=5, seed=0), 0)
    seen = batch.tokens[(batch.tokens < BOS) & (batch.weights > 0)]
    assert sorted(seen.tolist()) == [0, 1, 2, 7, 8, 9, 10, 11]


def test_documents_without_tokens_are_refused():
    with pytest.raises(DataError, match="no document has a token"):
        PackedWindows(numbered_documents([0, 0]), sequence_length=4, seed=0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 65_537])
def test_a_permutation_permutes(size: int):
    index = np.arange(size)
    images = [permute(index, size=size, key=key) for key in ("a", "b")]
    for image in images:
        np.testing.assert_array_equal(np.sort(image), index)
    some = permute(index[:: max(1, size // 5)], size=size, key="a")
    np.testing.assert_array_equal(some, images[0][:: max(1, size // 5)])
    if size > 3:
        assert (images[0] != images[1]).any()
    if size >= 1000:
        # Uniform: the mean displacement of a random permutation is size / 3, give or take.
        displacement = np.abs(images[0] - index).mean()
        assert abs(displacement - size / 3) < 4 * size / np.sqrt(size)


def test_the_permutation_is_frozen():
    """A checkpoint of an earlier version must find the same order."""
    small = permute(np.arange(10), size=10, key="windows/0/0")
    assert small.tolist() == [5, 3, 1, 6, 8, 9, 4, 7, 2, 0]
    large = permute(np.array([0, 1, 10**12 - 1]), size=10**12, key="x")
    assert large.tolist() == [522334276401, 168958267647, 559696279537]
