"""metrics.jsonl on resumption, with values JSON lacks, and on a full disk; the picture of them."""

import math
import resource

import matplotlib.image
import numpy as np
import pytest

from jaxinfra.model.passes import Sums
from jaxinfra.runtime.files import read_log
from jaxinfra.training.metrics import MetricsLog, finite
from jaxinfra.training.step import StepMetrics, step_record
from jaxinfra.training.summary import draw_loads, draw_loss, learning_curve


@pytest.fixture
def open_log(tmp_path):
    return lambda after_step=0: MetricsLog(
        tmp_path / "metrics.jsonl", tmp_path / "tensorboard", after_step=after_step
    )


@pytest.fixture
def file_size_limit():
    """Sets the limit of this process, as if each file had its own full disk; restores it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_are_there_at_once(open_log, tmp_path):
    with open_log() as log:
        log.write({"step": 1, "loss": 2.5})
        assert read_log(tmp_path / "metrics.jsonl", holds=dict)[0] == [{"step": 1, "loss": 2.5}]


def test_a_resumed_log_drops_what_will_be_repeated(open_log, tmp_path):
    with open_log() as log:
        for step in (1, 2, 3, 4):
            log.write({"step": step, "loss": 1.0 * step})
        log.write({"step": 2, "heldout_loss": 9.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed in the middle of a line
    with open_log(after_step=2) as log:
        assert [record["step"] for record in log.records] == [1, 2, 2]
        log.write({"step": 3, "loss": 3.5})
    assert [r.get("loss") for r in read_log(tmp_path / "metrics.jsonl", holds=dict)[0]] == [
        1,
        2,
        None,
        3.5,
    ]


SPOILT = (b"nonsense\n", b"\xff\xfe\n", b"[[[\n", b"null\n", b'{"step": "3"}\n', b'{"loss": 1}\n')


@pytest.mark.parametrize("spoilt", SPOILT)
def test_spoilt_lines_stop_nothing_and_are_kept(tmp_path, open_log, spoilt):
    """They only tell what happened: the run goes on, and what was there is there."""
    data = b'{"step": 1}\n' + spoilt + b'{"step": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(data)
    with open_log(after_step=3) as log:
        assert [record["step"] for record in log.records] == [1, 3]
    assert (tmp_path / "metrics.damaged-1.jsonl").read_bytes() == data


def test_a_line_that_a_kill_cut_short_is_no_damage(tmp_path, open_log):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \xff')
    with open_log(after_step=3) as log:
        assert [record["step"] for record in log.records] == [1]
    assert not list(tmp_path.glob("metrics.damaged*"))


def test_what_is_not_finite_is_null(open_log, tmp_path):
    with open_log() as log:
        log.write({"step": 1, "loss": math.nan, "gradient_norm": math.inf, "skipped": 1})
        assert log.records == read_log(tmp_path / "metrics.jsonl", holds=dict)[0]
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "loss": null, "gradient_norm": null, "skipped": 1}'
    assert finite({"a": -math.inf, "b": 1.5, "c": None}) == {"a": None, "b": 1.5, "c": None}


def test_find(open_log):
    with open_log() as log:
        for step in (1, 2):
            log.write({"step": step, "loss": 1.0 * step})
        log.write({"step": 2, "heldout_loss": 7.0})
        log.write({"step": 3, "loss": 3.0})
        assert log.find("heldout_loss") == {"step": 2, "heldout_loss": 7.0}
        assert log.find("heldout_loss", step=3) is None
        assert log.find("loss", step=2) == {"step": 2, "loss": 2.0}


def test_what_a_full_disk_refused_is_written_when_there_is_room(
    open_log, tmp_path, file_size_limit, caplog
):
    whole = tmp_path / "whole"
    whole.mkdir()
    with MetricsLog(whole / "metrics.jsonl", whole / "tensorboard", after_step=0) as log:
        for step in (1, 2, 3, 4):
            log.write({"step": step, "loss": 1.0 * step})
    with open_log() as log:
        (events,) = (tmp_path / "tensorboard").iterdir()
        log.write({"step": 1, "loss": 1.0})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        file_size_limit(size + 5)  # room for a part of the second line, and of the first event
        for step in (2, 3):
            log.write({"step": step, "loss": 1.0 * step})
        assert (tmp_path / "metrics.jsonl").stat().st_size == size + 5
        log.sync()
        file_size_limit(resource.RLIM_INFINITY)
        log.write({"step": 4, "loss": 4.0})
    (want,) = (whole / "tensorboard").iterdir()
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert events.stat().st_size == want.stat().st_size, "equal but for the times"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "one for each file, not one a step"
    assert all("kept in memory" in warning for warning in warnings)


def test_lines_that_stay_unwritten_are_an_error_at_the_end(open_log, file_size_limit):
    log = open_log()
    file_size_limit(1)
    log.write({"step": 1, "loss": 1.0})
    with pytest.raises(OSError, match=r"metrics.jsonl"):
        log.close()


def test_picture_with_gaps(tmp_path):
    losses = [5.0, None, 4.0, None, None, 3.0]
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    draw_loss([*records, {"step": 6, "heldout_loss": 3.2}], tmp_path / "loss.png")
    assert matplotlib.image.imread(tmp_path / "loss.png").std() > 0.05


def test_losses_of_pairs_are_not_called_nats_per_token():
    assert learning_curve([{"step": 1, "loss": 5.0}]) == ("loss", "loss, nats per token")
    pairs = [{"step": 1, "loss": 0.7, "preferences/accuracy": 0.5}]
    assert learning_curve(pairs) == ("loss", "loss, per pair")
    assert learning_curve([{"step": 1, "loss": 0.0, "rl/reward": 0.5}])[0] == "rl/reward"


def test_picture_of_nothing_finite(tmp_path):
    draw_loss([{"step": 1, "loss": None}], tmp_path / "loss.png")
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[0] > 300


def test_picture_of_loads(tmp_path):
    name = "layers/expert_tokens"
    records = [
        {f"{name}/least": 1.0, f"{name}/mean": 4.0, f"{name}/imbalance": 9.0 / step, "step": step}
        for step in (1, 2, 3)
    ]
    draw_loads([{"step": 1, "loss": 2.0}], tmp_path / "loads.png")
    assert not (tmp_path / "loads.png").exists()
    draw_loads([record | {"layers/dropped": 3.0} for record in records], tmp_path / "loads.png")
    assert matplotlib.image.imread(tmp_path / "loads.png").std() > 0.05


def test_what_layers_emit_is_recorded_by_name(open_log, tmp_path):
    """Over layers: losses per token read, counts as sums, arrays of counts by their extremes."""
    first = Sums(
        losses={"balance": np.float32([2.0, 4.0])},
        added={"dropped": np.float32([1.0, 0.0]), "load": np.float32([[8.0, 2.0], [5.0, 5.0]])},
        largest={"input": np.float32([0.5, 3.0])},
    )
    second = Sums(losses={"balance": np.float32([6.0])}, largest={"input": np.float32([4.0])})
    zero = np.float32(0.0)
    metrics = StepMetrics(
        loss=zero,
        gradient_norm=zero,
        learning_rate=zero,
        loss_scale=zero,
        tokens=np.float32(2.0),
        tokens_read=np.float32(8.0),
        skipped=np.int32(0),
        skipped_in_a_row=np.int32(0),
        sums=(first, Sums(), second),
        fp8={},
    )
    record = step_record(metrics)
    assert record["tokens"] == 2
    expected = {
        "layers/balance": 1.5,
        "layers/dropped": 1.0,
        "layers/load/least": 2.0,
        "layers/load/most": 8.0,
        "layers/load/mean": 5.0,
        "layers/load/imbalance": float(np.float32(8.0) / np.float32(5.0)),
        "layers/input": 4.0,
    }
    assert {name: value for name, value in record.items() if "/" in name} == expected
    with open_log() as log:
        log.write({"step": 1, **record})
        (events,) = (tmp_path / "tensorboard").iterdir()
    assert expected.items() <= read_log(tmp_path / "metrics.jsonl", holds=dict)[0][0].items()
    assert all(name.encode() in events.read_bytes() for name in expected)
