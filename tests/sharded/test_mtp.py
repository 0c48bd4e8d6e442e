"""Multi-token prediction on meshes: the loss, gradients and drafts of one device."""

import dataclasses

import jax
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.run import Remat
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed
from tests.sharded.cases import build, gradients_of, llama_like, packed_batch
from tests.sharded.test_engine_meshes import served
from tests.sharded.test_experts_use import CONFIG, PROMPTS, decoder
from tests.sharded.test_states import assert_equal_but_for_rounding

WHOLE = ShardingConfig(sequence_parallel=True)
DENSE = dataclasses.replace(llama_like(), mtp=True)
ROUTED = dataclasses.replace(CONFIG, mtp=True)


def step(mesh, **how):
    built = build(DENSE, mesh=mesh, **how)
    state, metrics = built.step(built.state(), built.put(packed_batch(rows=8)))
    assert float(metrics.sums[-1].losses["mtp"][0]) > 0.0
    return float(metrics.loss), jax.device_get(gradients_of(state))


@pytest.mark.slow
def test_a_step_on_a_mesh_equals_one_device():
    alone = step(MeshConfig())
    for mesh, how in (
        (MeshConfig(fsdp=4), {"remat": Remat.FULL}),
        (MeshConfig(fsdp=2, tensor=2), {"sharding": WHOLE}),
        (MeshConfig(fsdp=4), {"sharding": ShardingConfig(zero=1), "accumulation": 2}),
    ):
        assert_equal_but_for_rounding(step(mesh, **how), alone)


@pytest.mark.slow
def test_an_engine_on_a_mesh_draws_what_one_device_draws():
    options = EngineOptions(
        max_running=1,
        page_size=4,
        num_pages=17,
        max_step_tokens=24,
        chunk_sizes=(8,),
        num_drafts=2,
        share_prefixes=False,
    )
    alone = decoder(MeshConfig(), ROUTED)
    want = [*recomputed(alone, PROMPTS, max_new_tokens=6, sampling=GREEDY)]
    got = served(decoder(MeshConfig(tensor=2), ROUTED), PROMPTS, new=6, options=options)
    assert got == [[each.token for each in want if each.row == row] for row in range(len(PROMPTS))]
