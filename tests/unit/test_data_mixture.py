"""Several sources: whose a row is, in which order each is read, and what may change later."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
from numbered_documents import numbered_documents

from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig
from jaxinfra.config.mixture import MixtureBetween, MixtureSource, MixtureUnit, ValidationSet
from jaxinfra.config.presets import run_preset
from jaxinfra.data.mixture import MixedWindows, MixtureSchedule
from jaxinfra.data.packing import PackedWindows, permute
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.training.summary import mixture_cells, mixture_read

BATCH, LENGTH, SEED = 6, 8, 5
LENGTHS = {"a": [13, 40, 1, 0, 7, 22, 5, 9], "b": [30, 3, 11], "c": [17, 17, 17, 17]}
# Tokens and separators of a source lie in a range of their own.
ARRAYS = {
    name: dataclasses.replace(
        arrays := numbered_documents(lengths),
        tokens=arrays.tokens + 200 * number,
        fingerprint=name,
        bos_id=200 * number + 190,
        eos_id=200 * number + 191,
    )
    for number, (name, lengths) in enumerate(LENGTHS.items())
}
SOURCES = (
    MixtureSource(name="a", source="a", weight=((0, 0.9), (40, 0.1))),
    MixtureSource(name="b", source="b", weight=1),
    MixtureSource(name="c", source="c", weight=((10, 0.0), (30, 2.0))),
)


def schedule(sources=SOURCES, **changes) -> MixtureSchedule:
    settings = {
        "between": MixtureBetween.LINEAR,
        "unit": MixtureUnit.STEPS,
        "batch_size": BATCH,
        "sequence_length": LENGTH,
        "seed": SEED,
    }
    return MixtureSchedule(sources, **(settings | changes))


def mixed(sources=SOURCES, **changes) -> MixedWindows:
    return MixedWindows(
        {each.name: ARRAYS[each.name] for each in sources},
        schedule(sources, **changes),
        sequence_length=LENGTH,
        seed=SEED,
    )


def iterate(mixture: MixedWindows | None = None, **changes: int):
    settings = {"sequence_length": LENGTH, "batch_size": BATCH, "seed": SEED, "num_threads": 0}
    return TrainIterator(mixture or mixed(), **(settings | changes))


def take(iterator, count: int):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


STEPS = 50
WHOLE = take(iterate(), STEPS)
FROZEN_ROWS = [[3, 3, 0], [3, 3, 0], [1, 3, 2], [1, 1, 4]]
FROZEN_TOKENS = [[208, 463, 440, 216, 224, 38], [8, 400, 14, 234, 242, 416]]


@pytest.mark.parametrize("between", MixtureBetween)
@pytest.mark.parametrize("unit", MixtureUnit)
def test_shares_are_the_weights_over_their_sum(between, unit):
    scale = 1 if unit is MixtureUnit.STEPS else BATCH * LENGTH
    sources = tuple(
        dataclasses.replace(each, weight=tuple((t * scale, w) for t, w in each.points))
        for each in SOURCES
    )
    found = schedule(sources, between=between, unit=unit).shares(np.arange(60))
    for step in range(60):
        weights = np.array([each.weight_at(step, between) for each in SOURCES])
        np.testing.assert_allclose(found[step], weights / weights.sum(), rtol=1e-12, atol=1e-15)


def test_weights_between_points():
    linear, hold = MixtureBetween.LINEAR, MixtureBetween.HOLD
    c = SOURCES[2]
    assert [c.weight_at(t, linear) for t in (0, 10, 15, 30, 99)] == [0.0, 0.0, 0.5, 2.0, 2.0]
    assert [c.weight_at(t, hold) for t in (0, 29, 30, 99)] == [0.0, 0.0, 2.0, 2.0]


def test_every_batch_is_full_and_follows_the_shares():
    steps = np.arange(20_000)
    rows, shares = schedule().rows(steps), schedule().shares(steps)
    assert (rows >= 0).all()
    assert (rows.sum(axis=1) == BATCH).all()
    assert (np.abs(rows - shares * BATCH) < 1.0 + 1e-9).all()  # of each step
    # The golden ratio's discrepancy grows as the logarithm of the steps (Niederreiter 1992).
    lag = np.abs(np.cumsum(rows - shares * BATCH, axis=0)).max()
    assert lag < np.log2(len(steps))
    np.testing.assert_array_equal(schedule().rows_before(3_000), rows[:3_000].sum(axis=0))
    np.testing.assert_allclose(schedule().mean_shares(3_000), shares[:3_000].mean(axis=0))


def test_rows_of_a_source_that_weighs_nothing_are_never_read():
    assert schedule().rows(np.arange(10))[:, 2].sum() == 0
    last = (MixtureSource(name="a", source="a"), MixtureSource(name="b", source="b", weight=0))
    assert schedule(last).rows(np.arange(5_000))[:, 1].sum() == 0


def test_the_mixture_is_frozen():
    """If this changes, MIXTURE_VERSION must: checkpoints would otherwise resume on other data."""
    assert schedule().rows(np.array([0, 1, 20, 39])).tolist() == FROZEN_ROWS
    assert [batch.tokens[:, 1].tolist() for batch in WHOLE[20:22]] == FROZEN_TOKENS


def test_each_source_is_read_in_its_own_order_without_replacement():
    """Rows of a source, over all steps, are its windows of epoch 0, 1, ... in their order."""
    for number, arrays in enumerate(ARRAYS.values()):
        windows = PackedWindows(arrays, sequence_length=LENGTH, seed=SEED)
        count = schedule().rows_before(STEPS)[number]
        assert count > windows.num_windows  # into the next epoch
        own = windows.batch(np.arange(count))
        theirs = [
            row.tobytes() for batch in WHOLE for row in batch.targets if row[0] // 200 == number
        ]
        assert sorted(theirs) == sorted(row.tobytes() for row in own.targets)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_share_the_batch_of_one(count: int):
    shards = [take(iterate(process_index=i, process_count=count), 12) for i in range(count)]
    merged = [
        jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
        for parts in zip(*shards, strict=True)
    ]
    chex.assert_trees_all_equal(merged, WHOLE[:12])


@pytest.mark.parametrize("step", [0, 7, 33])
def test_a_restart_continues_bitwise(step: int):
    first = iterate(num_threads=2)
    for _ in range(step):
        next(first)
    state = json.loads(json.dumps(first.state()))
    assert state == first.state(step)
    first.close()
    second = iterate()
    second.restore(state)
    chex.assert_trees_all_equal(take(second, 5), WHOLE[step : step + 5])


def test_weights_may_change_after_the_step_and_not_before():
    state = iterate().state(20)
    later = dataclasses.replace(SOURCES[0], weight=((0, 0.9), (20, 0.5), (21, 7.0)))
    other = iterate(mixed((later, *SOURCES[1:])))
    other.restore(state)
    assert other.read(20) == iterate().read(20)
    before = dataclasses.replace(SOURCES[0], weight=((0, 0.9), (10, 0.1)))
    with pytest.raises(DataError, match=r"source 'a': step 20 was reached with \d+ .* past must"):
        iterate(mixed((before, *SOURCES[1:]))).restore(state)
    with pytest.raises(DataError, match="step 20 was reached"):
        iterate(mixed((SOURCES[0], SOURCES[2]))).restore(state)
    fresh = iterate(mixed(SOURCES[:2]))  # nothing was read of the third by then
    fresh.restore(iterate().state(10))
    state["mixture"]["b"]["data"] = "x"
    with pytest.raises(DataError, match="other text"):
        iterate().restore(state)
    with pytest.raises(DataError, match="mixture_version"):
        iterate().restore({"step": 3})


def test_what_was_read_is_counted():
    read, tokens = iterate().read(STEPS), dict.fromkeys(ARRAYS, 0)
    for batch in WHOLE:
        for row in range(BATCH):
            name = list(ARRAYS)[int(batch.targets[row, 0]) // 200]
            tokens[name] += int((batch.segment_ids[row] >= 0).sum())
    assert {name: read[f"mixture/{name}/tokens"] for name in ARRAYS} == tokens
    assert sum(read[f"mixture/{name}/sequences"] for name in ARRAYS) == STEPS * BATCH


def test_the_inverse_of_a_permutation():
    for size in (1, 2, 97, 1000):
        there = permute(np.arange(size), size=size, key="k")
        np.testing.assert_array_equal(
            permute(there, size=size, key="k", inverse=True), np.arange(size)
        )


def test_the_table_of_what_a_run_read():
    config = codec.override(
        run_preset("tiny"),
        [
            f"training.batch_size={BATCH}",
            f"training.sequence_length={LENGTH}",
            f"training.seed={SEED}",
        ],
    )
    config = dataclasses.replace(config, data=DataConfig(mixture=SOURCES))
    assert mixture_read(config, [{"step": 3, "loss": 1.0}]) == ()
    rows = mixture_read(config, [{"step": STEPS, **iterate().read(STEPS)}, {"step": STEPS}])
    assert [each.sequences for each in rows] == schedule().rows_before(STEPS).tolist()
    assert sum(each.read for each in rows) == pytest.approx(1.0)
    for each in rows:
        assert abs(each.read - each.wanted) < 2 / (STEPS * BATCH)
    assert mixture_cells(rows)[0] == [
        *("source", "wanted", "read", "sequences", "tokens", "epochs")
    ]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ('data.mixture.0.weight=-1', "weight -1.0 must be 0 or more"),
        ('data.mixture.0.weight=[[5,1],[5,2]]', r"times \[5, 5\]; give at least one point"),
        ('data.mixture.0.weight=[]', "give at least one point"),
        ('data.mixture.0.weight=heavy', "'heavy' is a str, expected float"),
        ('data.mixture.0.name=b', "the name 'b' is given to 2"),
        ('data.mixture.0.name=a/b', "names are letters"),
        ('data.mixture.0.name=own', "not 'own'"),
        ('data.best_by=bb', "best_by='bb' is no set .*did you mean 'b'"),
        ('data.source=x', "takes their place"),
        ('data.mixture.0.wight=1', "did you mean 'weight'"),
        ('data.mixture.1.weight=0', "all weights of the mixture are 0 at 7, so nothing"),
    ],
)  # fmt: skip
def test_mixtures_that_cannot_be_read_are_refused(changes: str, what: str):
    data = DataConfig(
        mixture=(
            MixtureSource(name="a", source="a", weight=((0, 1.0), (7, 0.0), (9, 1.0))),
            MixtureSource(name="b", source="b"),
        ),
        validation=(ValidationSet(name="v", source="v"),),
    )
    config = dataclasses.replace(run_preset("tiny"), data=data)
    assert codec.from_dict(type(config), json.loads(codec.to_json(config))) == config
    with pytest.raises(ConfigError, match=what):
        codec.override(config, [changes])


def test_a_source_shorter_than_a_sequence_is_refused():
    with pytest.raises(DataError, match=r"'b' has 44 tokens .* fewer than a sequence of 64"):
        MixedWindows(
            {name: ARRAYS[name] for name in "ab"},
            schedule(SOURCES[:2], sequence_length=64),
            sequence_length=64,
            seed=SEED,
        )
