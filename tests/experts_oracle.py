"""A layer of experts written from the papers in float64: a loop over tokens, and over each one's
experts.

How far an fp32 program may be from it is sampled: whatever the loop is given, and every token's
result and what comes back to it, is changed by random signs times sqrt(n) u (``tests/rounding.py``),
n no fewer than the terms of any sum here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.model import ExpertsConfig, MlpKind
from jaxinfra.config.routing import GroupScore, Scoring
from tests.rounding import UNIT
from tests.sharded.oracle import double_precision, rounded

NUM_SAMPLES = 6
TERMS = 256


type Choices = list[list[list[int]]]
"""Experts by row, token and rank."""


def experts_of(config: ExpertsConfig, logits: np.ndarray, correction: np.ndarray) -> list[int]:
    """One token's experts, the best first."""
    ranked = np.array(_scores(config, logits)) + correction
    routing = config.routing
    groups = ranked.reshape(routing.num_groups, -1)
    best = np.sort(groups, axis=1)[:, ::-1]
    top = best[:, 0] if routing.group_score is GroupScore.MAX else best[:, :2].sum(axis=1)
    allowed = np.argsort(-top, kind="stable")[: routing.top_groups]
    size = groups.shape[1]
    candidates = [e for e in range(config.num_experts) if e // size in allowed]
    return sorted(candidates, key=lambda e: -ranked[e])[: config.top_k]


def _scores(config: ExpertsConfig, logits: Any) -> Any:
    if config.routing.scoring is Scoring.SIGMOID:
        return 1.0 / (1.0 + jnp.exp(-logits))
    powers = jnp.exp(logits - jnp.max(logits))
    return powers / jnp.sum(powers)


def _activated(kind: MlpKind, up: Any, gate: Any) -> Any:
    if kind is MlpKind.SWIGLU_CLAMPED:
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate / (1.0 + jnp.exp(-1.702 * gate)) * (up + 1.0)
    if kind is MlpKind.SWIGLU:
        return gate / (1.0 + jnp.exp(-gate)) * up
    assert kind is MlpKind.GELU
    return 0.5 * up * (1.0 + jax.lax.erf(up / np.sqrt(2.0)))


def _expert(config: ExpertsConfig, weights: Any, x: Any, pick, prefix: str = "") -> Any:
    def project(name: str, x: Any) -> Any:
        bias = weights.get(f"{name}_bias")
        return x @ pick(weights[prefix + name]) + (0.0 if bias is None or prefix else pick(bias))

    gate = project("gate", x) if config.kind.gated else None
    return project("down", _activated(config.kind, project("up", x), gate))


def forward(
    config: ExpertsConfig,
    weights: Any,
    x_BTD: Any,
    counts_BT: np.ndarray,
    chosen: Choices,
    kept: Choices,
    change: Any,
) -> tuple[Any, dict[str, Any]]:
    """y [B, T, D] and the losses, as sums over tokens.

    Args:
        chosen: experts of every token that is no padding.
        kept: those that had room for it.
        change: of each token's result, and of what comes back to it.
    """
    batch, length, _ = x_BTD.shape
    rows, probabilities = [], np.empty((batch, length), object)
    z = 0.0
    taken = np.zeros((batch, config.num_experts))
    for b in range(batch):
        row = []
        for t in range(length):
            x, y = x_BTD[b, t], 0.0 * x_BTD[b, t]
            if counts_BT[b, t]:
                logits = x @ weights["router"] + weights.get("router_bias", 0.0)
                scores = _scores(config, logits)
                probabilities[b, t] = scores / jnp.sum(scores)
                z = z + jax.nn.logsumexp(logits) ** 2
                total = sum(scores[e] for e in chosen[b][t])
                for e in chosen[b][t]:
                    taken[b, e] += 1
                for e in kept[b][t]:
                    weight = scores[e] / (total if config.routing.renormalize else 1.0)
                    pick = functools.partial(lambda e, w: w[e], e)
                    out = _expert(config, weights, x, pick)
                    y = y + config.routing.scale * weight * out
            if config.shared_hidden_dim:
                shared = _expert(config, weights, x, lambda w: w, prefix="shared_")
                if config.shared_gate:
                    shared = shared / (1.0 + jnp.exp(-(x @ weights["shared_scale"])))
                y = y + shared
            row.append(change(y))
        rows.append(jnp.stack(row))
    losses, balance = {}, config.balance
    counted = [(b, t) for b in range(batch) for t in range(length) if counts_BT[b, t]]
    if balance.switch_loss:
        share = taken.sum(axis=0) / len(counted)
        mean = sum(probabilities[place] for place in counted) / len(counted)
        total = config.num_experts * jnp.sum(share * mean)
        losses["balance"] = balance.switch_loss * len(counted) * total
    if balance.sequence_loss:
        total = 0.0
        for b in range(batch):
            places = [place for place in counted if place[0] == b]
            f = taken[b] * config.num_experts / (config.top_k * len(places))
            total += len(places) * jnp.sum(f * sum(probabilities[p] for p in places) / len(places))
        losses["sequence_balance"] = balance.sequence_loss * total
    if balance.z_loss:
        losses["router_z"] = balance.z_loss * z
    return jnp.stack(rows), losses




def choices(
    config: ExpertsConfig,
    weights: Any,
    x_BTD: np.ndarray,
    counts_BT: np.ndarray,
    correction: np.ndarray,
) -> tuple[Choices, Choices]:
    """Of every token: the experts it chooses, and those that still had room for it."""
    chosen, kept = [], []
    factor = config.balance.capacity_factor
    for b, row in enumerate(x_BTD):
        room = np.inf
        if factor is not None:
            room = max(int(factor * len(row) * config.top_k / config.num_experts), 1)
        taken = np.zeros(config.num_experts)
        chosen.append([])
        kept.append([])
        for t, x in enumerate(row):
            logits = x @ weights["router"] + weights.get("router_bias", 0.0)
            experts = experts_of(config, logits, correction) if counts_BT[b, t] else []
            chosen[b].append(experts)
            kept[b].append([e for e in experts if taken[e] < room])
            taken[experts] += 1
    return chosen, kept


def results(
    config: ExpertsConfig,
    weights: Any,
    x_BTD: np.ndarray,
    d_BTD: np.ndarray,
    counts_BT: np.ndarray,
    correction: np.ndarray,
) -> tuple[Any, Choices, Choices]:
    """(y, losses, gradients of sum(y d) + losses by weights and x), ``Rounded``; and ``choices``."""
    with double_precision():
        weights, x_BTD, d_BTD = jax.tree.map(lambda a: np.asarray(a, np.float64), (weights, x_BTD, d_BTD))
        chosen, kept = choices(config, weights, x_BTD, counts_BT, correction)

        def run(key, size):
            keys = iter(jax.random.split(key, 256))

            def near_1(a):
                return 1.0 + size * jax.random.rademacher(next(keys), a.shape, jnp.float64)

            def objective(weights, x_BTD):
                y_BTD, losses = forward(
                    config,
                    weights,
                    x_BTD,
                    counts_BT,
                    chosen,
                    kept,
                    lambda y: _changed(y, near_1(y), near_1(y)),
                )
                return jnp.sum(y_BTD * d_BTD) + sum(losses.values()), (y_BTD, losses)

            given = jax.tree.map(lambda a: a * near_1(a), (weights, x_BTD))
            (_, out), gradients = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(
                *given
            )
            return *out, gradients

        sizes = jnp.full(NUM_SAMPLES + 1, np.sqrt(TERMS) * UNIT).at[0].set(0.0)
        values = jax.vmap(run)(jax.random.split(jax.random.key(0), NUM_SAMPLES + 1), sizes)
        values = jax.tree.map(np.asarray, values)
    samples = [jax.tree.map(lambda a, i=i: a[i], values) for i in range(NUM_SAMPLES + 1)]
    return rounded(samples), chosen, kept


@jax.custom_vjp
def _changed(y, factor, factor_of_gradient):
    del factor_of_gradient
    return y * factor


_changed.defvjp(
    lambda y, factor, of_gradient: (y * factor, of_gradient),
    lambda of_gradient, d: (d * of_gradient, None, None),
)
