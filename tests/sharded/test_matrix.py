"""Every subset of the axes, times what a step can be: one device's loss and every gradient.

Bounds as in ``test_meshes``: what rounding may do.
Rows are packed documents throughout. The models bring grouped queries and tied embeddings (tied),
whole heads, biases, untied tables and accumulation (untied), windows, soft caps and sandwich norms
(capped). All of it is slow: ``test_meshes`` has one step with most of these features.
"""

import itertools
from typing import Any

import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig, parse_mesh
from jaxinfra.config.run import ContextMethod, Remat
from tests.sharded.test_meshes import assert_as_one_device, run

MODELS = ("tied", "untied", "capped")
# All subsets of four axes that eight devices have room for.
MESHES = (
    "replica=8",
    "fsdp=8",
    "context=4",
    "tensor=4",
    "replica=2,fsdp=4",
    "replica=4,context=2",
    "replica=2,tensor=4",
    "fsdp=4,context=2",
    "fsdp=2,tensor=4",
    "context=2,tensor=4",
    "replica=2,fsdp=2,context=2",
    "replica=2,fsdp=2,tensor=2",
    "replica=2,context=2,tensor=2",
    "fsdp=2,context=2,tensor=2",
)


def hows(mesh: MeshConfig) -> list[dict[str, Any]]:
    """What a step on this mesh can be: each value of each feature, and the features in turn."""
    zeros = (3, 1, 2) if mesh.fsdp > 1 else (3,)
    streams = (False, True) if mesh.tensor > 1 else (False,)
    methods = (
        (ContextMethod.RING, ContextMethod.ALL_GATHER)
        if mesh.context > 1
        else (ContextMethod.AUTO,)
    )
    remats = itertools.cycle((Remat.NONE, Remat.DOTS, Remat.FULL, Remat.NAMED))
    return [
        {
            "sharding": ShardingConfig(zero=zero, sequence_parallel=stream),
            "context_method": method,
            "remat": next(remats),
        }
        for zero, stream, method in itertools.product(zeros, streams, methods)
    ]


def matrix() -> list[tuple[str, str, int]]:
    """On every mesh each of its hows and each model, in turn: 65 steps where the product is 177."""
    found = []
    for first, mesh in enumerate(MESHES):
        count = len(hows(parse_mesh(mesh)))
        for number in range(max(count, len(MODELS))):
            found.append((MODELS[(first + number) % len(MODELS)], mesh, number % count))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mesh", "number"),
    [pytest.param(*each, id="-".join(map(str, each))) for each in matrix()],
)
def test_equals_one_device(case, mesh, number):
    how = hows(parse_mesh(mesh))[number]
    _, result = run(case, parse_mesh(mesh), **how)
    # The update goes by element, and is held by ``test_meshes``.
    assert_as_one_device(result[:3], case, what=f"{case} on {mesh} with {how}")
