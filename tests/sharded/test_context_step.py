"""A training step with sequences spread over devices: one device's loss and gradients.

Bounds as in ``test_meshes``, which holds the update too: it goes by element. Sequences here are 16
tokens, so that chunks are 4 or 2 tokens and a window of 5 reaches over one or two of them.
"""

import math

import jax
import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.run import ContextMethod, Remat
from jaxinfra.diagnostics.program import collectives
from jaxinfra.parallel.context.cost import context_bytes
from tests.sharded.cases import build, llama_like, packed_batch
from tests.sharded.test_meshes import exact, run, single
from tests.tolerance import assert_no_worse

MESHES = {
    "context2": MeshConfig(context=2),
    "context4": MeshConfig(context=4),
    "context2-fsdp2": MeshConfig(context=2, fsdp=2),
    "context2-tensor2": MeshConfig(context=2, tensor=2),
    "replica2-context2-tensor2": MeshConfig(replica=2, context=2, tensor=2),
}
RING, ULYSSES, ALL_GATHER = ContextMethod.RING, ContextMethod.ULYSSES, ContextMethod.ALL_GATHER
# The ring on every mesh; every model and method on some.
STEPS = [
    ("tied", "context4", RING, {"remat": Remat.NAMED}),
    ("capped", "context2-fsdp2", ULYSSES, {}),
    ("untied", "replica2-context2-tensor2", RING, {}),
]
MORE = [
    ("tied", "context2", RING, {}),
    ("tied", "context2-fsdp2", RING, {}),
    ("tied", "context2-tensor2", RING, {}),
    ("capped", "context4", RING, {"remat": Remat.FULL}),
    ("tied", "context2-tensor2", ULYSSES, {}),
    ("untied", "context2-fsdp2", ALL_GATHER, {}),
]


@pytest.mark.parametrize(
    ("case", "mesh", "method", "how"),
    [*STEPS, *(pytest.param(*step, marks=pytest.mark.slow) for step in MORE)],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_step_equals_one_device(case, mesh, method, how):
    _, plain = single(case)
    _, result = run(case, MESHES[mesh], context_method=method, **how)
    got, plain, oracle = (whole[:3] for whole in (result, plain, exact(case)))
    assert_no_worse(got, plain=plain, oracle=oracle, what=f"{case} on {mesh} by {method}")


def test_a_step_sends_keys_round_and_sums_gradients_and_nothing_else():
    """The loss among others leaves its tokens where they are."""
    built = build(llama_like(), mesh=MeshConfig(context=2))
    lowered = built.step.lower(jax.eval_shape(built.initialize), built.put(packed_batch()))
    found = [each for each in collectives(lowered.compile()) if each.shape]
    sends = [each for each in found if each.kind == "collective-permute"]
    assert all("attention/core" in each.scope for each in sends)
    layers, tokens = llama_like().num_layers, 8 * 16 // 2
    attention = llama_like().blocks[0].attention
    expected = context_bytes(
        RING,
        num_shards=2,
        tokens=tokens,
        num_q_heads=attention.num_q_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        itemsize=4,
        is_packed=True,
    )
    assert sum(x.sent_bytes for x in sends) == layers * (expected.forward + expected.backward)
    # Each gradient once (the tied table is summed in two places, embedding and loss).
    summed = [each for each in found if each.kind != "collective-permute"]
    assert {each.kind for each in summed} == {"all-reduce"}
    table = llama_like().vocab_size * llama_like().model_dim
    elements = sum(math.prod(each.shape) * each.times for each in summed)
    assert elements == built.model.num_parameters + table
