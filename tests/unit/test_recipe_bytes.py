"""Bytes per parameter of published recipes as our settings: of the arrays, and as planned."""

import dataclasses

import jax
import pytest
from published_figures import RECIPE_BYTES

from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
from jaxinfra.diagnostics.memory.report import bytes_per_parameter
from jaxinfra.planning.formats import CORRESPONDENCES, RECIPES
from jaxinfra.training.job import make_job
from tests.unit.test_recompute import over_fsdp, small_run


def job_of(*settings: str):
    small = dataclasses.replace(small_run(), optimizer=run_preset("small").optimizer)
    return make_job(codec.override(small, ["optimizer.muon=none", *settings]))


def require_planned(name: str, job) -> None:
    """Each role to the byte; moments but for counters and a scale for each layer's array."""
    planned, found = RECIPES[name], bytes_per_parameter(job)
    assert found is not None
    leaves = jax.tree.leaves(job.model.shapes)
    stacked = jax.tree.leaves(job.model.shapes["blocks"])
    scales = len(leaves) - len(stacked) + sum(leaf.shape[0] for leaf in stacked)
    beside = 4 * (4 + 2 * scales) / sum(leaf.size for leaf in leaves)
    assert (found.weights, found.gradients) == (planned.weights + planned.master, planned.gradients)
    assert (found.summed, found.average) == (planned.accumulated, 0)
    assert 0 < found.moments - planned.moments <= beside
    assert found.total - planned.total <= beside


# The default one has every kind of array; the rest are other formats of them.
@pytest.mark.slow
@pytest.mark.parametrize(
    "each",
    [pytest.param(each, id=each.published) for each in CORRESPONDENCES],
)
def test_the_arrays_are_what_the_planner_says(each):
    require_planned(each.ours, job_of(*each.settings))


@pytest.mark.slow  # other formats of what the default case counts
@pytest.mark.parametrize(
    "setting",
    ["training.accumulation=1", "precision.weights=fp32", "optimizer.first_moment=bf16"],
)
def test_other_settings_are_told_apart(setting):
    (each,) = (each for each in CORRESPONDENCES if each.published == "fp8-nanotron")
    with pytest.raises(AssertionError):
        require_planned(each.ours, job_of(*each.settings, setting))


def test_every_published_row_has_its_settings():
    """Where totals differ, it is said in which roles."""
    assert {each.published for each in CORRESPONDENCES} == RECIPE_BYTES.keys() - {"fp16-adam"}
    for each in CORRESPONDENCES:
        published, ours = RECIPES[each.published], RECIPES[each.ours]
        differing = [
            published.weights + published.master != ours.weights + ours.master,
            published.gradients != ours.gradients,
            published.accumulated != ours.accumulated,
            published.moments != ours.moments,
        ]
        assert len(each.differs) == sum(differing), each.published


def test_what_is_not_counted_is_none():
    assert bytes_per_parameter(dataclasses.replace(job_of(), config=over_pipe())) is None


def over_pipe():
    config = over_fsdp()
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=1, pipe=2))
