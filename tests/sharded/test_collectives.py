"""The communication each parallelism is known by, read from compiled programs."""

import dataclasses
import functools
from collections import Counter

import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.hlo.program import Collective, collectives
from tests.sharded.cases import build, llama_like, packed_batch

CONFIG = llama_like()
LAYERS = CONFIG.num_layers
ACTIVATION = (8, 16, CONFIG.model_dim)


@functools.cache
def compiled(mesh: MeshConfig, accumulation: int = 1) -> list[Collective]:
    rows = 8 * accumulation
    built = build(CONFIG, mesh=mesh, accumulation=accumulation, batch_size=rows)
    lowered = built.step.lower(built.shapes, packed_batch(rows=rows))
    return collectives(lowered.compile())


def kinds(found: list[Collective]) -> set[str]:
    return {each.kind for each in found}


def in_scope(found: list[Collective], *parts: str) -> list[Collective]:
    return [each for each in found if all(part in each.scope for part in parts)]


def forward(found: list[Collective]) -> list[Collective]:
    return [each for each in found if "transpose" not in each.scope]


def parameter_elements(mesh: MeshConfig) -> int:
    return build(CONFIG, mesh=mesh).model.num_parameters


def elements(each: Collective) -> int:
    return int(functools.reduce(lambda a, b: a * b, each.shape, 1)) * each.times


@pytest.mark.slow
def test_one_device_does_not_communicate():
    assert compiled(MeshConfig()) == []


@pytest.mark.slow
def test_data_parallel_only_reduces_gradients():
    mesh = MeshConfig(replica=8)
    found = compiled(mesh)
    assert kinds(found) == {"all-reduce"}
    # Each gradient once (the tied table is summed in two places, embedding and loss), and scalars.
    table = CONFIG.vocab_size * CONFIG.model_dim
    arrays = [each for each in found if each.shape]
    assert sum(map(elements, arrays)) == parameter_elements(mesh) + table
    assert all("transpose" in each.scope or "loss" in each.scope for each in arrays)


@pytest.mark.slow  # `test_planning_receipt.py` holds the bytes of this mesh
def test_tensor_parallel_all_reduces_once_a_half_block():
    found = compiled(MeshConfig(tensor=2))
    assert kinds(found) == {"all-reduce"}
    for half in ("attention", "mlp"):
        (reduced,) = in_scope(forward(found), "layer", half)
        assert (reduced.shape, reduced.times) == (ACTIVATION, LAYERS)
    assert len(in_scope(forward(found), "jvp(layer)")) == 2
    # The vocabulary is sharded: rows of the table found on one device or the other, and of the
    # logits only their maximum, sum and target, never the logits.
    (rows,) = in_scope(forward(found), "jvp(embedding)")
    assert (rows.shape, rows.times) == (ACTIVATION, 1)
    per_token = [each for each in in_scope(found, "loss", "reduce") if each.shape]
    assert Counter(each.shape[-2:] for each in per_token) == {(8, 16): 3}
    assert CONFIG.vocab_size not in {size for each in found for size in each.shape}


@pytest.mark.slow
def test_tensor_and_fully_sharded_compose():
    found = compiled(MeshConfig(fsdp=2, tensor=4))
    for half in ("attention", "mlp"):
        reduced = [
            each for each in in_scope(forward(found), "layer", half) if each.kind == "all-reduce"
        ]
        assert [(each.shape[1:], each.times) for each in reduced] == [(ACTIVATION[1:], LAYERS)]


@pytest.mark.slow
def test_table_gradient_is_reduced_once_not_once_a_chunk():
    """The loss runs in two chunks of positions here; summed as one array over the batch, the
    table's gradient would be communicated in each.
    """
    config = dataclasses.replace(CONFIG, vocab_size=16_384, tie_embeddings=False)
    built = build(config, mesh=MeshConfig(replica=4, fsdp=2), sequence_length=64)
    assert built.placement.batch_shards == 8
    batch = packed_batch(length=64)
    compiled = built.step.lower(built.shapes, batch).compile()
    in_loss = in_scope(collectives(compiled), "loss")
    scalars = [each.times for each in in_loss if not each.shape]
    assert set(scalars) == {1}, "sums over the batch are communicated at the end, too"
    table = [each for each in in_loss if config.vocab_size in each.shape]
    assert [(each.kind, each.times) for each in table] == [("all-reduce", 1)]
