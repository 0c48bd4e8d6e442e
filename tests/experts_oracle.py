"""A layer of experts written from the papers in float64: a loop over tokens chooses, every expert
sees every token, and what was not chosen is masked.

How far an fp32 program may be from it is sampled: whatever it is given, its result, and what comes
back to it, is changed by random signs times sqrt(n) u (``tests/rounding.py``), n no fewer than the
terms of any sum here.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.routing import GroupScore, Scoring
from tests.rounding import UNIT
from tests.sharded.cases import COMPILER_OPTIONS
from tests.sharded.oracle import double_precision, rounded

NUM_SAMPLES = 6
TERMS = 256
NUM_SIGNS = 1 << 14
_PRIME = 7919  # so that one array's signs are not the next one's


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
    powers = jnp.exp(logits)
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def _activated(kind: MlpKind, up: Any, gate: Any) -> Any:
    if kind is MlpKind.SWIGLU_CLAMPED:
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate / (1.0 + jnp.exp(-1.702 * gate)) * (up + 1.0)
    if kind is MlpKind.SWIGLU:
        return gate / (1.0 + jnp.exp(-gate)) * up
    assert kind is MlpKind.GELU
    return 0.5 * up * (1.0 + jax.lax.erf(up / np.sqrt(2.0)))


def _expert(config: ExpertsConfig, weights: Any, x: Any, prefix: str = "") -> Any:
    """One expert's output for every token."""

    def project(name: str, x: Any) -> Any:
        return x @ weights[prefix + name] + weights.get(f"{prefix}{name}_bias", 0.0)

    gate = project("gate", x) if config.kind.gated else None
    return project("down", _activated(config.kind, project("up", x), gate))


def forward(
    config: ExpertsConfig,
    weights: Any,
    x_BTD: Any,
    counts_BT: np.ndarray,
    chosen_BTE: np.ndarray,
    kept_BTE: np.ndarray,
    change: Any,
) -> tuple[Any, dict[str, Any]]:
    """y [B, T, D] and the losses, as sums over tokens: every expert on every token, masked.

    Args:
        chosen_BTE: 1 where a token that is no padding chose an expert.
        kept_BTE: and where that had room for it.
        change: of results, and of what comes back to them.
    """
    logits_BTE = x_BTD @ weights["router"] + weights.get("router_bias", 0.0)
    scores_BTE = _scores(config, logits_BTE)
    weight_BTE = scores_BTE * config.routing.scale
    if config.routing.renormalize:
        sums_BT1 = jnp.sum(scores_BTE * chosen_BTE, axis=-1, keepdims=True)
        weight_BTE = weight_BTE / jnp.where(counts_BT[..., None], sums_BT1, 1.0)
    names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    each = {name: weights[name] for name in names if name in weights}
    out_EBTD = jax.vmap(lambda own: _expert(config, own, x_BTD))(each)
    y_BTD = jnp.einsum("BTE,EBTD->BTD", weight_BTE * kept_BTE, out_EBTD)
    if config.shared_hidden_dim:
        shared_BTD = _expert(config, weights, x_BTD, prefix="shared_")
        if config.shared_gate:
            shared_BTD = shared_BTD / (1.0 + jnp.exp(-(x_BTD @ weights["shared_scale"])))
        y_BTD = y_BTD + shared_BTD
    losses, balance = {}, config.balance
    tokens_B = counts_BT.sum(axis=1)
    share_BTE = counts_BT[..., None] * scores_BTE / jnp.sum(scores_BTE, axis=-1, keepdims=True)
    if balance.switch_loss:
        fractions = chosen_BTE.sum(axis=(0, 1)) / tokens_B.sum()
        mean = jnp.sum(share_BTE, axis=(0, 1)) / tokens_B.sum()
        total = config.num_experts * jnp.sum(fractions * mean)
        losses["balance"] = balance.switch_loss * tokens_B.sum() * total
    if balance.sequence_loss:
        total = 0.0
        for b, tokens in enumerate(tokens_B):
            f = chosen_BTE[b].sum(axis=0) * config.num_experts / (config.top_k * tokens)
            total += tokens * jnp.sum(f * jnp.sum(share_BTE[b], axis=0) / tokens)
        losses["sequence_balance"] = balance.sequence_loss * total
    if balance.z_loss:
        z_BT = jax.nn.logsumexp(logits_BTE, axis=-1) ** 2
        losses["router_z"] = balance.z_loss * jnp.sum(counts_BT * z_BT)
    return change(y_BTD), losses


def choices(
    config: ExpertsConfig,
    weights: Any,
    x_BTD: np.ndarray,
    counts_BT: np.ndarray,
    correction: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """float [B, T, E], token by token: 1 for an expert it chooses; that still has room for it."""
    chosen_BTE = np.zeros((*x_BTD.shape[:2], config.num_experts))
    kept_BTE = chosen_BTE.copy()
    factor, length = config.balance.capacity_factor, x_BTD.shape[1]
    room = length
    if factor is not None:
        room = max(int(factor * length * config.top_k / config.num_experts), 1)
    for b, t in zip(*np.nonzero(counts_BT), strict=True):
        logits = x_BTD[b, t] @ weights["router"] + weights.get("router_bias", 0.0)
        for e in experts_of(config, logits, correction):
            kept_BTE[b, t, e] = chosen_BTE[b, :, e].sum() < room
            chosen_BTE[b, t, e] = 1.0
    return chosen_BTE, kept_BTE


def results(
    config: ExpertsConfig,
    weights: Any,
    x_BTD: np.ndarray,
    d_BTD: np.ndarray,
    counts_BT: np.ndarray,
    correction: np.ndarray,
) -> tuple[Any, np.ndarray, np.ndarray]:
    """y, losses, and gradients of sum(y d) + losses by weights and x, ``Rounded``; ``choices``."""
    with double_precision():
        weights, x_BTD, d_BTD = jax.tree.map(
            lambda a: np.asarray(a, np.float64), (weights, x_BTD, d_BTD)
        )
        chosen, kept = choices(config, weights, x_BTD, counts_BT, correction)

        def run(changes):
            starts = itertools.count(step=_PRIME)

            def near_1(a):
                start = next(starts) % (NUM_SIGNS - a.size)
                return 1.0 + changes[start : start + a.size].reshape(a.shape)

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

        signs = np.random.default_rng(0).integers(0, 2, (NUM_SAMPLES + 1, NUM_SIGNS)) * 2.0 - 1.0
        changes = signs * UNIT * np.sqrt(TERMS)
        changes[0] = 0.0
        sampled = jax.jit(jax.vmap(run)).lower(changes).compile(COMPILER_OPTIONS)
        values = sampled(changes)
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
