"""Layers of experts against a loop over tokens in float64, forward and gradient, rule by rule."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.routing import BalanceConfig, GroupScore, RoutingConfig, Scoring
from jaxinfra.model.experts import Experts
from jaxinfra.model.passes import Pass
from jaxinfra.parallel.execution import execution_on
from tests import experts_oracle
from tests.sharded.cases import COMPILER_OPTIONS
from tests.tolerance import assert_within_rounding

B, T, D = 2, 7, 12
BALANCE = BalanceConfig(switch_loss=0.5, sequence_loss=0.25, z_loss=0.1)
PLAIN = ExpertsConfig(num_experts=8, top_k=3, hidden_dim=10, balance=BALANCE)
SIGMOID = RoutingConfig(scoring=Scoring.SIGMOID, scale=2.5, correction_bias=True)
CASES = {
    "softmax over the chosen": PLAIN,
    "softmax over all": dataclasses.replace(PLAIN, routing=RoutingConfig(renormalize=False)),
    "groups by their best": dataclasses.replace(
        PLAIN,
        routing=RoutingConfig(renormalize=False, scale=1.5, num_groups=4, top_groups=2),
    ),
    "groups by their two best": dataclasses.replace(
        PLAIN,
        routing=dataclasses.replace(
            SIGMOID, num_groups=4, top_groups=2, group_score=GroupScore.TOP2_SUM
        ),
        shared_hidden_dim=6,
    ),
    "sigmoid": dataclasses.replace(
        PLAIN, routing=dataclasses.replace(SIGMOID, renormalize=False), top_k=1
    ),
    "shared and gated": dataclasses.replace(PLAIN, shared_hidden_dim=6, shared_gate=True),
    "clamped with biases": dataclasses.replace(
        PLAIN,
        kind=MlpKind.SWIGLU_CLAMPED,
        bias=True,
        routing=RoutingConfig(logit_bias=True),
    ),
    "without gates": dataclasses.replace(PLAIN, kind=MlpKind.GELU, top_k=8),
    "capacity": dataclasses.replace(
        PLAIN, balance=dataclasses.replace(BALANCE, capacity_factor=0.8)
    ),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A layer's values, input and cotangent."""

    state: Any
    graphdef: Any
    weights: dict[str, np.ndarray]  # by the oracle's names
    x_BTD: np.ndarray
    d_BTD: np.ndarray
    segment_ids_BT: np.ndarray


def draw(config: ExpertsConfig, seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)
    layer = nnx.eval_shape(
        lambda: Experts(
            config,
            model_dim=D,
            std=1.0,
            out_std=1.0,
            execution=execution_on(),
            rngs=nnx.Rngs(params=0),
        )
    )
    graphdef, state = nnx.split(layer)
    values = {
        path: rng.normal(0.0, 0.6, leaf.shape).astype(np.float32)
        for path, leaf in nnx.to_flat_state(state)
    }
    nnx.replace_by_pure_dict(state, _nested(values))
    weights = {_oracles_name(path): value for path, value in values.items()}
    segment_ids = np.zeros((B, T), np.int32)
    segment_ids[1, 5:] = -1
    return Drawn(
        state=state,
        graphdef=graphdef,
        weights=weights,
        x_BTD=rng.normal(size=(B, T, D)).astype(np.float32),
        d_BTD=rng.normal(size=(B, T, D)).astype(np.float32),
        segment_ids_BT=segment_ids,
    )


def _nested(values):
    tree: dict = {}
    for (*parents, last), value in values.items():
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def _oracles_name(path: tuple[Any, ...]) -> str:
    name, *rest = path
    return f"{name}_bias" if rest == ["bias"] else name


def run(config: ExpertsConfig, drawn: Drawn, execution=None):
    """(y, sums, gradients by weights and x)."""
    given = Pass(
        positions_BT=jnp.zeros((B, T), jnp.int32), segment_ids_BT=jnp.asarray(drawn.segment_ids_BT)
    )

    def objective(state, x_BTD):
        out = nnx.merge(drawn.graphdef, state)(x_BTD, given)
        return jnp.sum(out.x * drawn.d_BTD) + sum(out.sums.losses.values()), out

    function = jax.jit(
        jax.value_and_grad(objective, argnums=(0, 1), has_aux=True),
        compiler_options=COMPILER_OPTIONS,
    )
    (_, out), (d_state, d_x) = function(drawn.state, jnp.asarray(drawn.x_BTD))
    d_weights = {
        _oracles_name(path): np.asarray(leaf.get_value())
        for path, leaf in nnx.to_flat_state(nnx.filter_state(d_state, nnx.Param))
    }
    return out, (d_weights, np.asarray(d_x))


def oracle(config: ExpertsConfig, drawn: Drawn):
    weights = dict(drawn.weights)
    correction = weights.pop("router_correction", np.zeros(config.num_experts))
    return experts_oracle.results(
        config, weights, drawn.x_BTD, drawn.d_BTD, drawn.segment_ids_BT >= 0, correction
    )


# Groups are in deepseek_v3 of test_hf_golden.py by default.
@pytest.mark.quick_cases("clamped with biases")
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_equals_a_loop_over_tokens(config):
    drawn = draw(config)
    out, gradients = run(config, drawn)
    (y, losses, true), chosen, kept = oracle(config, drawn)
    assert_within_rounding(np.asarray(out.x), y, what="output")
    assert_within_rounding(jax.device_get(out.sums.losses), losses, what="losses")
    assert_within_rounding(gradients, true, what="gradients")
    np.testing.assert_array_equal(out.sums.added["expert_tokens"], chosen.sum(axis=(0, 1)))
    if config.balance.capacity_factor is not None:
        dropped = (chosen - kept).sum()
        assert dropped > 0
        assert out.sums.added["dropped"] == dropped
