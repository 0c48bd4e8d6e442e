"""A training step with sequences spread over devices: one device's loss and gradients.

Bounds as in ``test_meshes``, which holds the update too: it goes by element. Sequences here are 16
tokens, so that chunks are 4 or 2 tokens and a window of 5 reaches over one or two of them.
"""

import dataclasses
import math

import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import stacked
from jaxinfra.config.presets.runs import tiny
from jaxinfra.config.run import ContextMethod, Remat
from jaxinfra.config.validate import validate
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.hlo.program import collectives
from jaxinfra.parallel.context.methods import context_bytes
from jaxinfra.training.job import batch_in_zigzag
from tests.sharded.cases import build, llama_like, mla_like, packed_batch
from tests.sharded.test_meshes import assert_as_one_device, run

MESHES = {
    "context4": MeshConfig(context=4),
    "context2-fsdp2": MeshConfig(context=2, fsdp=2),
    "context2-tensor2": MeshConfig(context=2, tensor=2),
    "replica2-context2-tensor2": MeshConfig(replica=2, context=2, tensor=2),
}
RING, ULYSSES, ALL_GATHER = ContextMethod.RING, ContextMethod.ULYSSES, ContextMethod.ALL_GATHER
# ``test_matrix`` has the ring and gathered keys on every mesh.
STEPS = [
    ("tied", "context4", RING, {"remat": Remat.NAMED}),
    ("latent", "replica2-context2-tensor2", ALL_GATHER, {"remat": Remat.NAMED}),
    ("tied", "context2-tensor2", ULYSSES, {}),
    ("capped", "context2-fsdp2", ULYSSES, {}),
]


@pytest.mark.slow  # `test_context_attention.py` holds attention, the tests below what is sent
@pytest.mark.parametrize(
    ("case", "mesh", "method", "how"),
    STEPS,
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_step_equals_one_device(case, mesh, method, how):
    _, result = run(case, MESHES[mesh], context_method=method, **how)
    assert_as_one_device(result[:3], case, what=f"{case} on {mesh} by {method}")


@pytest.mark.slow
def test_a_step_sends_keys_round_and_sums_gradients_and_nothing_else():
    """The loss among others leaves its tokens where they are."""
    built = build(llama_like(), mesh=MeshConfig(context=2))
    lowered = built.step.lower(built.shapes, built.put(packed_batch()))
    found = [each for each in collectives(lowered.compile()) if each.shape]
    sends = [each for each in found if each.kind == "collective-permute"]
    assert all("attention/core" in each.scope for each in sends)
    layers, tokens = llama_like().num_layers, 8 * 16 // 2
    attention = llama_like().blocks[0].mixer
    expected = context_bytes(
        RING,
        num_shards=2,
        tokens=tokens,
        q_width=attention.num_q_heads * attention.head_dim,
        kv_width=2 * attention.num_kv_heads * attention.head_dim,
        itemsize=4,
        is_packed=True,
    )
    assert sum(x.sent_bytes for x in sends) == layers * sum(expected)
    # Each gradient once (the tied table is summed in two places, embedding and loss).
    summed = [each for each in found if each.kind != "collective-permute"]
    assert {each.kind for each in summed} == {"all-reduce"}
    table = llama_like().vocab_size * llama_like().model_dim
    elements = sum(math.prod(each.shape) * each.times for each in summed)
    assert elements == built.model.num_parameters + table


BAD = {
    "length": ({"sequence_length": 20}, "sequence_length=20 does not divide into 2 x context=4"),
    "heads": (
        {"sequence_length": 16, "context_method": ULYSSES},
        r"num_kv_heads=4, which does not divide over tensor=2 x context=4",
    ),
}


@pytest.mark.slow  # what keys cost is held below by the same formula
def test_latents_go_to_other_devices_and_heads_do_not():
    config = dataclasses.replace(mla_like(), stacks=stacked(mla_like().blocks[0], num_layers=2))
    built = build(config, mesh=MeshConfig(context=2))
    lowered = built.step.lower(built.shapes, built.put(packed_batch()))
    found = [each for each in collectives(lowered.compile()) if each.shape]
    latents = [each for each in found if each.kind != "all-reduce"]
    assert {each.kind for each in latents} == {"all-gather", "reduce-scatter"}
    assert all("attention/core" in each.scope for each in latents)
    mixer = config.blocks[0].mixer
    tokens = 8 * 16 // 2
    expected = context_bytes(
        ALL_GATHER,
        num_shards=2,
        tokens=tokens,
        q_width=mixer.score_width,
        kv_width=mixer.cache.elements,
        itemsize=4,
        is_packed=False,
    )
    layers, documents = config.num_layers, 4 * tokens  # gathered once for all layers
    sent = sum(each.sent_bytes for each in latents)
    assert sent == documents + layers * sum(expected)
    summed = sum(math.prod(e.shape) * e.times for e in found if e.kind == "all-reduce")
    assert summed == built.model.num_parameters


def test_latents_meet_no_other_method():
    with pytest.raises(UnsupportedError, match="context_method=ring with latent attention"):
        run("latent", MeshConfig(context=2), context_method=RING)


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_cannot_be_split_is_refused(name):
    changes, message = BAD[name]
    base = tiny()
    config = dataclasses.replace(
        base,
        model=llama_like(),
        mesh=MeshConfig(context=4, tensor=2),
        training=dataclasses.replace(base.training, **changes),
    )
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_positions_are_given_where_a_batch_has_none():
    """A row of one document may leave them out; by index they would be wrong."""
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    batch = Batch(
        tokens=tokens, targets=tokens + 1, segment_ids=None, positions=None, weights=tokens + 0.5
    )
    ordered = batch_in_zigzag(batch, 2)
    assert ordered.positions is not None
    assert ordered.positions.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]] * 2
    np.testing.assert_array_equal(ordered.tokens, tokens[:, [0, 1, 6, 7, 2, 3, 4, 5]])
    np.testing.assert_array_equal(ordered.targets, ordered.tokens + 1)
    assert ordered.segment_ids is None
    assert batch_in_zigzag(batch, 1) is batch
