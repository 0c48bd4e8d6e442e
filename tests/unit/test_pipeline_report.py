"""The report of a schedule: its figures and its picture."""

import pytest

from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.planning.pipeline_schedule import report


@pytest.mark.parametrize("name", PipelineSchedule)
def test_report_names_the_bubble_and_draws_the_picture(name, tmp_path):
    file = tmp_path / "schedule.svg"
    result = report(name, stages=4, micro_batches=8, chunks=2, out=file)
    assert result.time >= 8 * (1 + result.bubble_formula) * (1 - 1e-12)
    assert result.time == pytest.approx(8 * (1 + result.bubble))
    assert max(result.peak_activations) == (8 if name is PipelineSchedule.GPIPE else 4)
    text = "\n".join(result.lines())
    assert f"{result.bubble:.1%}" in text
    assert file.read_text().count("<path") > 4 * 8 * 2  # a box an action, at least
    assert list(tmp_path.iterdir()) == [file]
