"""Order, restart and sharding of training batches."""

import json
import time

import chex
import jax
import numpy as np
import pytest
from numbered_documents import numbered_documents

from jaxinfra.data.batch import MODULUS, Batch, batch_checksum, rows_checksum
from jaxinfra.data.packing import PackedWindows
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.train_iterator import TrainIterator, sample_ids
from jaxinfra.errors import DataError

ARRAYS = numbered_documents([13, 40, 1, 0, 7, 22, 5, 9])
SETTINGS = {"sequence_length": 8, "batch_size": 4, "seed": 5}
NUM_WINDOWS = PackedWindows(ARRAYS, sequence_length=8, seed=5).num_windows
STEPS = 3 * NUM_WINDOWS // 4 + 2  # more than three epochs, and batches across their ends


def iterate(arrays: TokenArrays = ARRAYS, **changes: int) -> TrainIterator:
    return TrainIterator(arrays, **(SETTINGS | {"num_threads": 0} | changes))


def take(iterator: TrainIterator, count: int) -> list[Batch]:
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def merge(shards: list[list[Batch]]) -> list[Batch]:
    """Each step's rows of all processes, in process order."""
    return [
        jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        for parts in zip(*shards, strict=True)
    ]


WHOLE = take(iterate(), STEPS)


def test_the_order_is_frozen():
    """If this changes, ORDER_VERSION must: checkpoints would otherwise resume on other data."""
    first_tokens = [batch.tokens[:, 0].tolist() for batch in WHOLE[:4]]
    assert first_tokens[:2] == [[77, 1000, 89, 36], [61, 1000, 20, 4]]
    assert first_tokens[2:] == [[69, 1000, 12, 44], [28, 52, 45, 7]]


def test_threads_do_not_change_the_order():
    chex.assert_trees_all_equal(take(iterate(num_threads=3, prefetch=5), STEPS), WHOLE)


def test_sample_ids_are_a_ledger_of_the_batches():
    windows = PackedWindows(ARRAYS, sequence_length=8, seed=5)
    iterator = iterate()
    chex.assert_trees_all_equal(
        [windows.batch(iterator.sample_ids(step)) for step in range(STEPS)], WHOLE
    )
    iterator.close()
    ids = np.concatenate([sample_ids(step, batch_size=4) for step in range(STEPS)])
    np.testing.assert_array_equal(ids, np.arange(STEPS * 4))


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("step", [0, 1, NUM_WINDOWS // 4, STEPS - 1])
def test_restart_continues_bitwise(step: int, threads: int):
    first = iterate(num_threads=threads)
    for _ in range(step):
        next(first)
    state = json.loads(json.dumps(first.state()))
    first.close()
    second = iterate(num_threads=2 - threads)
    next(second)  # a restart may follow other use
    second.restore(state)
    assert second.step == step
    chex.assert_trees_all_equal(take(second, STEPS - step), WHOLE[step:])


def test_a_run_grows_from_one_to_two_to_four_processes():
    done, state = 0, iterate().state()
    for count, steps in ((1, 3), (2, 4), (4, 5)):
        shards = []
        for index in range(count):
            iterator = iterate(process_index=index, process_count=count)
            iterator.restore(state)
            shards.append([next(iterator) for _ in range(steps)])
            new_state = iterator.state()
            iterator.close()
        chex.assert_trees_all_equal(merge(shards), WHOLE[done : done + steps])
        done, state = done + steps, new_state


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sequence_length": 9}, "sequence_length=9, this run has 8"),
        ({"batch_size": 8}, "batch_size=8, this run has 4"),
        ({"seed": 6}, "seed=6, this run has 5"),
    ],
)
def test_another_order_is_not_resumed(changes: dict[str, int], what: str):
    other = iterate(**changes).state()
    with pytest.raises(DataError, match=what):
        iterate().restore(other)


def test_other_data_are_not_resumed():
    other = iterate(ARRAYS.select(np.array([0, 1]))).state()
    with pytest.raises(DataError, match="the saved data order had data="):
        iterate().restore(other)
    with pytest.raises(DataError, match="the saved data order had data=None"):
        iterate().restore({"step": 1})
    for bad in (-1, "1", None):
        with pytest.raises(DataError, match="must be a step number"):
            iterate().restore(iterate().state() | {"step": bad})


def test_a_failed_restore_leaves_the_iterator_usable():
    iterator = iterate()
    next(iterator)
    with pytest.raises(DataError):
        iterator.restore({"step": 3})
    chex.assert_trees_all_equal(take(iterator, 2), WHOLE[1:3])


@pytest.mark.parametrize(("count", "index"), [(3, 0), (2, 2), (2, -1)])
def test_a_batch_that_does_not_divide_is_refused(count: int, index: int):
    with pytest.raises(DataError, match=f"does not divide over {count} processes"):
        iterate(process_count=count, process_index=index)


def test_batches_that_wait_are_counted():
    iterator = iterate(num_threads=1, prefetch=3)
    assert iterator.num_ready == 0
    next(iterator)
    deadline = time.monotonic() + 60
    while iterator.num_ready < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert iterator.num_ready == 3
    iterator.restore(iterator.state())
    assert iterator.num_ready == 0
    iterator.close()


def test_the_sum_of_a_batch_is_that_of_its_parts():
    tokens = WHOLE[0].tokens
    whole = batch_checksum([rows_checksum(tokens, first=0)], copies=1)
    for count in (2, 4):
        parts = [
            rows_checksum(rows, first=number * len(rows))
            for number, rows in enumerate(np.split(tokens, count))
        ]
        assert batch_checksum(parts, copies=1) == whole
        assert batch_checksum([*parts, *parts], copies=2) == whole, (
            "each part held by two processes"
        )
    swapped, changed = tokens[[1, 0, 2, 3]], tokens.copy()
    changed[2, 5] ^= 1
    others = [
        batch_checksum([rows_checksum(other, first=0)], copies=1) for other in (swapped, changed)
    ]
    assert whole not in others


def test_a_sum_passes_through_float32_unchanged():
    assert {int(np.float32(value)) - value for value in (MODULUS - 1, MODULUS - 2, 1)} == {0}
