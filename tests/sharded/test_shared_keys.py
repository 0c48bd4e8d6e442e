"""Layers that share keys, with inputs of their own and experts, on meshes: as on one device."""

import dataclasses
import functools
import json

import jax
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.run import Remat
from jaxinfra.errors import UnsupportedError
from jaxinfra.hf.config import from_hf_config
from tests.golden_families import GOLDEN
from tests.sharded.cases import build, gradients_of, packed_batch
from tests.sharded.pipeline_cases import Case, loss_and_gradients
from tests.sharded.test_states import assert_equal_but_for_rounding

MESHES = {
    "fsdp4": (MeshConfig(fsdp=4), {"remat": Remat.FULL}),
    "context2": (MeshConfig(context=2), {}),
    "fsdp2-tensor2": (MeshConfig(fsdp=2, tensor=2), {"remat": Remat.NAMED}),
}


@functools.cache
def model(name):
    return from_hf_config(json.loads((GOLDEN / f"{name}.json").read_text())["config"])


@functools.cache
def step(name, case=None):
    mesh, how = MESHES[case] if case else (MeshConfig(), {})
    config = dataclasses.replace(model(name), max_positions=64)
    built = build(config, mesh=mesh, **how)
    state, metrics = built.step(built.state(), built.put(packed_batch(rows=8)))
    return float(metrics.loss), jax.device_get(gradients_of(state))


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("name", ["gemma3n", "gemma4_shared", "gemma4_experts_odd"])
def test_a_step_on_a_mesh_equals_one_device(name, case):
    assert_equal_but_for_rounding(step(name, case), step(name))


@pytest.mark.slow
def test_a_pipeline_is_refused():
    case = Case(model=model("gemma4_shared"), mesh=MeshConfig(pipe=2), micro_batches=2, rows=4)
    with pytest.raises(UnsupportedError, match="as in a pipeline"):
        loss_and_gradients(case)
