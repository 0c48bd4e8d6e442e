"""What may run beside an exchange: the products of the experts that every token passes.

Read off the compiled program of a layer's forward and backward pass: neither depends on the other,
so that a GPU's scheduler may put these products between an all-to-all's start and its end.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra import axes
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.hlo.program import compiled_instructions
from jaxinfra.model.experts import Experts
from jaxinfra.model.passes import Pass
from jaxinfra.parallel.exchange import ShardedExchange
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from tests.sharded.cases import COMPILER_OPTIONS

N, B, T, D = 4, 4, 6, 8
CONFIG = ExpertsConfig(num_experts=8, top_k=2, hidden_dim=6, shared_hidden_dim=12)
EXCHANGE, SHARED = "all-to-all", "shared product"


def compiled(node_size: int | None) -> jax.stages.Compiled:
    """A layer's output and its gradients by x and the weights, of a cotangent that is given."""
    mesh = MeshConfig(fsdp=N, expert=N)
    rules = state_rules(ShardingConfig(), mesh)
    placement = Placement(mesh=make_mesh(mesh, devices=jax.devices()[:N]), rules=rules)
    execution = execution_on(placement, exchange=ExchangeConfig(node_size=node_size))

    def build() -> Experts:
        return Experts(
            CONFIG, model_dim=D, std=1.0, out_std=1.0, execution=execution, rngs=nnx.Rngs(0)
        )

    structure, weights = nnx.split(nnx.eval_shape(build))

    def both(weights: Any, x_BTD: jax.Array, d_BTD: jax.Array) -> Any:
        def layer(weights: Any, x_BTD: jax.Array) -> jax.Array:
            given = Pass(positions_BT=jnp.zeros((B, T), jnp.int32))
            return nnx.merge(structure, weights)(x_BTD, given).x

        y_BTD, back = jax.vjp(layer, weights, x_BTD)
        return y_BTD, back(d_BTD)

    sharding = placement.sharding((axes.BATCH, None, None))
    x_BTD = jax.ShapeDtypeStruct((B, T, D), np.float32, sharding=sharding)
    return jax.jit(both).lower(weights, x_BTD, x_BTD).compile(COMPILER_OPTIONS)


def waits_for(program: jax.stages.Compiled) -> dict[str, list[set[str]]]:
    """Of each all-to-all, and of each product of the shared experts: which kinds of these two must
    be done before it.
    """
    instructions, entry = compiled_instructions(program)
    inside: dict[str, set[str]] = {}  # kinds in each computation and in those that it calls
    done: dict[str, set[str]] = {}  # kinds that are done when an instruction of the entry is
    found: dict[str, list[set[str]]] = {EXCHANGE: [], SHARED: []}
    for each in instructions:  # callees and operands come first
        words = re.findall(r"%([\w.-]+)", each.rest)
        own: set[str] = set().union(*(inside.get(word, ()) for word in words))
        if each.opcode == EXCHANGE:
            own.add(EXCHANGE)
        if each.opcode == "dot" and "/shared/" in re.sub(r"[\w.]+\(|\)", "", each.rest):
            own.add(SHARED)
        inside.setdefault(each.computation, set()).update(own)
        if each.computation == entry:
            before: set[str] = set().union(*(done.get(word, ()) for word in words))
            done[each.name] = own | before
            for kind in own:
                found[kind].append(before)
    return found


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize(
    "node_size",
    # The second level is the first one's function: the default case fails with it.
    [None, pytest.param(2, marks=pytest.mark.slow)],
)
def test_neither_waits_for_the_other(node_size):
    """Forward and back: rows there and back, and the three products of the shared experts."""
    found = waits_for(compiled(node_size))
    assert len(found[SHARED]) == 3 * 3
    assert len(found[EXCHANGE]) == (7 if node_size is None else 2 * 7)
    assert not any(EXCHANGE in before for before in found[SHARED])
    assert not any(SHARED in before for before in found[EXCHANGE])


@pytest.mark.slow  # of the reading itself, which the default case goes by
def test_a_product_that_waits_is_seen(monkeypatch):
    given: list[jax.Array] = []
    exchange, shared = ShardedExchange.__call__, Experts._shared

    def keeping(self, *args, **options):
        y_BTD, left_out = exchange(self, *args, **options)
        given.append(y_BTD)
        return y_BTD, left_out

    monkeypatch.setattr(ShardedExchange, "__call__", keeping)
    monkeypatch.setattr(Experts, "_shared", lambda self, x_BTD: shared(self, x_BTD + given[-1]))
    found = waits_for(compiled(None))
    assert any(EXCHANGE in before for before in found[SHARED])
