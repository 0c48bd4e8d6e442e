"""Signals, profile ranges, descriptions, clock and the run directory, each alone."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfra
from jaxinfra.checkpoint.checkpointer import Restored
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.precision import PrecisionConfig
from jaxinfra.config.presets import runs
from jaxinfra.config.run import CheckpointConfig, TrainingConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.numerics.loss_scale import LossScale
from jaxinfra.training.describe import describe_ranking, placement_table
from jaxinfra.training.job import make_job
from jaxinfra.training.optim.muon import is_hidden_matrix
from jaxinfra.training.profile import ProfileRange, parse_profile_range
from jaxinfra.training.progress import Clock, duration, median_step_s
from jaxinfra.training.start import restored_state
from tests.small_run import config_of


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "3:3", "4:3", "a:b", "-1:2", "1:2:3"])
def test_profile_nonsense(text):
    with pytest.raises(ConfigError, match="START:STOP"):
        parse_profile_range(text)


def test_profile_range():
    steps = parse_profile_range("10:13")
    assert steps == ProfileRange(start=10, stop=13)
    steps.require_within(first=10, steps=13)
    for first, count in ((11, 20), (0, 12)):
        with pytest.raises(ConfigError, match="choose a range within"):
            steps.require_within(first=first, steps=count)


@pytest.mark.parametrize(
    ("save", "evaluate", "keep_best", "warned"),
    [(4, 8, 1, False), (4, 6, 1, False), (7, 9, 1, True), (7, 9, 0, False), (7, None, 1, False)],
)
def test_ranking_without_losses_is_told(save, evaluate, keep_best, warned):
    training = TrainingConfig(steps=20, batch_size=1, sequence_length=8, evaluate_every=evaluate)
    checkpoint = CheckpointConfig(every=save, keep_best=keep_best)
    warning = describe_ranking(training, checkpoint)
    assert (warning is not None) == warned
    if warning:
        assert "every 9" in warning
        assert "every 7" in warning


@pytest.fixture(scope="module")
def job():
    return make_job(runs.tiny())


def held_bytes(table: str) -> np.ndarray:
    """Of each row: parameter, gradient and moment bytes, the total's row last."""
    _, *rows, _ = table.splitlines()
    return np.array([[int(cell.replace(",", "")) for cell in row.split()[-3:]] for row in rows])


def elements(job) -> tuple[int, int, int]:
    """Of parameters, gradients and moments: Muon's matrices have one moment, the rest has two."""
    count = job.model.num_parameters
    matrices = sum(
        math.prod(leaf.shape)
        for leaf, named in zip(
            jax.tree.leaves(job.model.shapes), jax.tree.leaves(job.model.dims), strict=True
        )
        if is_hidden_matrix(named.dims)
    )
    assert job.config.optimizer.muon is not None
    return count, count, 2 * count - matrices


def test_placement_table_counts_every_parameter(job):
    table = placement_table(job)
    held = held_bytes(table)
    np.testing.assert_array_equal(held[:-1].sum(axis=0), held[-1])
    assert held[-1].tolist() == [4 * times for times in elements(job)]
    last = table.splitlines()[-1]
    assert last.startswith(f"{job.model.num_parameters:,} parameters; bytes on each of 1 device,")


@pytest.mark.parametrize("name", ["text.jsonl", "*.jsonl"])
def test_a_text_that_is_not_there_is_the_first_thing_said(tmp_path, capsys, name):
    config = config_of(f"data.source={tmp_path / name}")
    with pytest.raises(DataError, match="data source"):
        jaxinfra.train(config, tmp_path / "run", cache_dir=tmp_path / "cache")
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


STATIC = PrecisionConfig(policy="fp16", loss_scaling="static")
DYNAMIC = PrecisionConfig(policy="fp16", loss_scaling="dynamic", initial_loss_scale=64)


@pytest.mark.parametrize(
    ("saved", "now", "scale"),
    [
        (PrecisionConfig(), STATIC, 2.0**15),
        (STATIC, DYNAMIC, 64.0),
        (DYNAMIC, PrecisionConfig(policy="bf16"), 1.0),
        (DYNAMIC, dataclasses.replace(DYNAMIC, growth_interval=7), 8.0),
    ],
)
def test_a_loss_scale_begins_anew_where_its_settings_changed(job, saved, now, scale):
    kept = LossScale(value=jnp.float32(8.0), finite_steps=jnp.int32(5))
    restored = Restored(
        step=3,
        state=dataclasses.replace(job.abstract_state(), loss_scale=kept),
        data_state={},
        heldout_loss=None,
        settings=codec.to_dict(dataclasses.replace(job.config, precision=saved)),
        quarantined=(),
    )
    config = dataclasses.replace(job.config, precision=now)
    found = restored_state(dataclasses.replace(job, config=config), restored)
    assert float(found.loss_scale.value) == scale


@pytest.mark.parametrize(("zero", "shards"), [(1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_placement_table_of_each_stage(zero, shards):
    config = dataclasses.replace(
        runs.tiny(), mesh=MeshConfig(fsdp=8), sharding=ShardingConfig(zero=zero)
    )
    job = make_job(config)
    held = held_bytes(placement_table(job))[-1]
    whole = 4 * np.array(elements(job))
    assert held.tolist() == (whole / np.array(shards)).tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["sharding.zero=4"], "zero=4 is no stage"),
        (["sharding.zero=1"], "zero=1 shards over the fsdp axis, which has one device"),
        (["sharding.sequence_parallel=true"], "the tensor axis, which has one device"),
        (["sharding.keep_gathered=true"], "with fsdp=1, zero=3 none are"),
        (["sharding.keep_gathered=true", "mesh.fsdp=2", "sharding.zero=2"], "zero=2 none are"),
        (
            ["sharding.keep_gathered=true", "mesh.fsdp=2", "mesh.pipe=2"],
            "keep_gathered with pipe=2",
        ),
    ],
)
def test_sharding_that_shards_nothing_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        validate(codec.override(runs.tiny(), settings))


def test_a_sequence_that_does_not_divide_is_refused():
    config = dataclasses.replace(
        runs.tiny(),
        mesh=MeshConfig(tensor=2),
        sharding=ShardingConfig(sequence_parallel=True),
    )
    odd = dataclasses.replace(config.training, sequence_length=33)
    with pytest.raises(ConfigError, match="sequence_length=33 does not divide over"):
        validate(dataclasses.replace(config, training=odd))


def test_clock_leaves_compilation_and_pauses_out(job, monkeypatch):
    now = 7.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(job, [{"step": 3, "elapsed_s": 100.0}], began=now)
    now += 2.0
    assert clock.elapsed_s == 102.0
    assert clock.lap() is None, "it compiled"
    now += 0.25
    with clock.paused():
        now += 5.0
    now += 0.25
    assert clock.lap() == 0.5
    assert clock.step_s == 0.5
    tokens = job.config.training.batch_size * job.config.training.sequence_length
    assert clock.tokens_per_s(0.5) == 2 * tokens
    assert clock.tokens_per_s(None) is None
    assert clock.mfu(0.5) is None, "a CPU's peak is not in the table"


def test_median_step_is_over_all_sessions_without_their_first_steps():
    laps = [None, 3.0, 1.0, None, 2.0]
    records = [{"step": step, "step_s": lap} for step, lap in enumerate(laps)]
    assert median_step_s([*records, {"step": 2, "heldout_loss": 1.0}]) == 2.0
    assert median_step_s([{"step": 1, "step_s": None}]) is None


def test_durations():
    assert [duration(s) for s in (0.4, 61.2, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_discarding_frees_the_directory_and_spares_what_is_not_ours(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(runs.tiny())
    with pytest.raises(ConfigError, match="not an empty directory"):
        run.create(runs.tiny())
    run.discard()
    assert not run.path.exists()
    run.create(runs.tiny())
    (run.path / "notes.txt").write_text("mine")
    run.discard()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


def test_a_changed_config_keeps_the_one_before(tmp_path):
    run, config = RunDirectory(tmp_path / "run"), runs.tiny()
    run.create(config)
    run.update_config(config)
    assert [path.name for path in run.path.iterdir()] == ["config.json"]
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=1000))
    run.update_config(longer)
    assert run.read_config() == longer
    assert (run.path / "config.before-1.json").exists()
