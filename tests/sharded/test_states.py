"""Layers that keep a state, on meshes and in pipelines: the loss and gradients of one device.

Both are fp32 programs of the same formulas, whose sums have other orders.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    BlockConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.config.recurrent import (
    GatedDeltaConfig,
    NoMixer,
    OutputGate,
    SelectiveScanConfig,
    ShortConvolutionConfig,
    StateSpaceConfig,
)
from jaxinfra.config.run import Remat
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.sampling import GREEDY
from tests.generation import recomputed
from tests.sharded import pipeline_cases
from tests.sharded.cases import build, gradients_of, llama_like, packed_batch
from tests.sharded.pipeline_cases import Case, loss_and_gradients
from tests.sharded.test_engine_meshes import served
from tests.sharded.test_experts_use import PROMPTS, decoder

HEADS = {"num_key_heads": 4, "num_value_heads": 8, "key_dim": 6, "value_dim": 5}
MIXERS = {
    "gated_delta": GatedDeltaConfig(**HEADS | {"value_dim": 6}),
    "delta_of_channels": GatedDeltaConfig(
        **HEADS | {"num_key_heads": 8}, channel_decay=True, rank=4, gate=OutputGate.SIGMOID
    ),
    "state_space": StateSpaceConfig(**HEADS, norm_heads=2, bias=True),
    "selective_scan": SelectiveScanConfig(
        num_channels=16, state_dim=5, rank=3, bias=True, norm_epsilon=1e-5
    ),
    "short_convolution": ShortConvolutionConfig(num_heads=4, head_dim=8, bias=True),
}
MIXERS["beside_attention"] = AttentionBesideStateConfig(
    attention=llama_like().blocks[0].mixer, state_space=MIXERS["state_space"]
)


@functools.cache
def model(name: str) -> ModelConfig:
    """A layer with a state, one of attention, and one without a mixer, twice."""
    dense = llama_like()
    (attends,) = dense.blocks
    wide = MlpConfig(hidden_dim=40, kind=MlpKind.RELU_SQUARED)
    pattern = (
        dataclasses.replace(attends, mixer=MIXERS[name], feed_forward=None),
        attends,
        BlockConfig(mixer=NoMixer(), feed_forward=wide),
    )
    return dataclasses.replace(dense, stacks=stacked(*pattern, num_layers=6))


def step(name: str, mesh: MeshConfig, **how):
    built = build(model(name), mesh=mesh, **how)
    state, metrics = built.step(built.state(), built.put(packed_batch(rows=8)))
    return float(metrics.loss), jax.device_get(gradients_of(state))


one_device = functools.cache(lambda name: step(name, MeshConfig()))


def assert_equal_but_for_rounding(got, want):
    (loss, found), (expected, gradients) = got, want
    assert abs(loss - expected) <= 1e-5 * abs(expected)
    largest = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(gradients))
    error = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), found, gradients)
    assert max(jax.tree.leaves(error)) <= 1e-4 * largest, error


WHOLE = ShardingConfig(sequence_parallel=True)
MESHES = {
    "fsdp4": (MeshConfig(fsdp=4), {"remat": Remat.FULL}),
    "replica2-tensor4": (MeshConfig(replica=2, tensor=4), {}),
    "fsdp2-tensor2-sequence": (MeshConfig(fsdp=2, tensor=2), {"sharding": WHOLE}),
    "context2": (MeshConfig(context=2), {}),
    "context2-fsdp2-tensor2": (MeshConfig(context=2, fsdp=2, tensor=2), {"remat": Remat.NAMED}),
    "fsdp4-zero1": (MeshConfig(fsdp=4), {"sharding": ShardingConfig(zero=1), "accumulation": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("case", MESHES)
def test_a_step_on_a_mesh_equals_one_device(case, name):
    mesh, how = MESHES[case]
    assert_equal_but_for_rounding(step(name, mesh, **how), one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("axis", ["fsdp", "context"])
@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.ZB_H1])
def test_a_pipeline_equals_one_device(schedule, axis, name):
    mesh = MeshConfig(pipe=2, **{axis: 2})
    case = Case(model=model(name), mesh=mesh, micro_batches=4, schedule=schedule, rows=16)
    want = pipeline_cases.alone(case.model, case.micro_batches, case.remat, case.rows)
    assert_equal_but_for_rounding(loss_and_gradients(case), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_an_engine_on_a_mesh_draws_what_one_device_draws(name):
    config, new = model(name), 6
    options = EngineOptions(
        max_running=2, page_size=4, num_pages=17, max_step_tokens=24, chunk_sizes=(8,)
    )
    alone = decoder(MeshConfig(), config)
    want = [*recomputed(alone, PROMPTS, max_new_tokens=new, sampling=GREEDY)]
    got = served(decoder(MeshConfig(tensor=4), config), PROMPTS, new=new, options=options)
    texts = [[each.token for each in want if each.row == row] for row in range(len(PROMPTS))]
    assert got == texts
