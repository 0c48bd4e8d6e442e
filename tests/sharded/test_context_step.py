"""A training step with sequences spread over devices: one device's loss and gradients.

Bounds as in ``test_meshes``, which holds the update too: it goes by element. Sequences here are 16
tokens, so that chunks are 4 or 2 tokens and a window of 5 reaches over one or two of them.
"""

import pytest

from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.run import ContextMethod, Remat
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
