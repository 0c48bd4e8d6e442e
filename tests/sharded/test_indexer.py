"""Layers with an indexer on meshes: a step and an engine's text as on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxinfra.config.latent import IndexerConfig
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.model import stacked
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.run import Remat
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import by_path
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed
from tests.sharded.cases import OPTIMIZER, build, gradients_of, mla_like, packed_batch
from tests.sharded.pipeline_cases import Case, alone, loss_and_gradients
from tests.sharded.test_engine_meshes import BEGUN, served
from tests.sharded.test_experts_use import decoder

FROZEN = dataclasses.replace(OPTIMIZER, frozen=("*/indexer/*",))


def _config(top_k=3):
    block = mla_like().blocks[0]
    indexer = IndexerConfig(num_heads=6, head_dim=10, top_k=top_k)
    block = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, indexer=indexer))
    return dataclasses.replace(mla_like(), stacks=stacked(block, num_layers=2))


def run(mesh: MeshConfig, *, top_k=3, optimizer: OptimizerConfig = FROZEN, **how):
    """Loss, gradients and parameters around one step of packed documents, by path."""
    built = build(_config(top_k), mesh=mesh, optimizer_config=optimizer, **how)
    before = jax.device_get(built.state().parameters)
    state, metrics = built.step(built.state(), built.put(packed_batch()))
    found = jax.device_get((metrics.loss, gradients_of(state), state.parameters))
    return found[0], *(by_path(tree) for tree in (found[1], before, found[2]))


@functools.cache
def single():
    return run(MeshConfig())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=4", "fsdp=4,tensor=2", "replica=2,fsdp=2,tensor=2"])
def test_a_step_is_that_of_one_device(mesh):
    loss, gradients, before, after = run(parse_mesh(mesh), remat=Remat.FULL)
    want, want_gradients, _, want_after = single()
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for path, x in want_gradients.items():
        np.testing.assert_allclose(gradients[path], x, atol=2e-6, err_msg=path)
    for path, x in want_after.items():
        np.testing.assert_allclose(after[path], x, atol=2e-5, err_msg=path)
        assert ("/indexer/" in path) == np.array_equal(after[path], before[path]), path
    assert abs(run(MeshConfig(), top_k=4)[0] - want) > 1e-4


@pytest.mark.slow
def test_a_pipeline_gives_the_gradients_of_one_device():
    case = Case(model=_config(), mesh=MeshConfig(pipe=2, fsdp=2, tensor=2), micro_batches=2)
    want, got = alone(_config(), 2, Remat.NONE, case.rows), loss_and_gradients(case)
    for path, x in by_path(want).items():
        np.testing.assert_allclose(by_path(got)[path], x, atol=2e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=4", "fsdp=2,tensor=2"])
def test_an_engine_on_a_mesh_gives_the_text_of_one_device(mesh):
    prompts = [BEGUN[:n] + tuple(range(1, m)) for n, m in ((9, 3), (9, 5), (2, 9), (7, 2), (9, 4))]
    want = [[] for _ in prompts]
    one = decoder(MeshConfig(), _config())
    for each in recomputed(one, prompts, max_new_tokens=9, sampling=GREEDY):
        want[each.row].append(each.token)
    assert served(decoder(parse_mesh(mesh), _config()), prompts, new=9) == want


def test_devices_that_share_a_sequence_are_refused():
    built = build(_config(), mesh=MeshConfig(context=2))
    with pytest.raises(UnsupportedError, match="an indexer over the context axis"):
        built.step.lower(built.shapes, built.put(packed_batch()))
