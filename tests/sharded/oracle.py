"""A decoder, its loss and AdamW written from the papers in float64: what everything is held to.

How far an fp32 program may be from it is sampled: whatever the decoder computes, and every gradient
that comes back to it, is changed by a random sign times sqrt(n) u, u = 2**-24 and n the number of
tokens. A sum of n terms, however ordered, changes by no more than sqrt(n) u times the sum of their
absolute values (``tests/rounding.py``), and no sum here has more terms. So a gradient that is 0 by
symmetry, as of a key's bias, is held on the scale of the terms that cancel in it.
"""

import contextlib
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.data.batch import Batch
from tests.decoder_formulas import DecoderFormulas
from tests.rounding import UNIT, Rounded

NUM_SAMPLES = 8
_NUM_SIGNS = 1 << 18
_PRIME = 7919  # so that one operation's signs are not the next one's


@contextlib.contextmanager
def double_precision():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


class _Roundings:
    """Of one run: each call gives its array the next signs."""

    def __init__(self, changes: jax.Array):
        self._changes = changes
        self._starts = itertools.count(step=_PRIME)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _changed(x, self._next(x), self._next(x))

    def _next(self, x: jax.Array) -> jax.Array:
        start = next(self._starts) % (_NUM_SIGNS - x.size)
        return self._changes[start : start + x.size].reshape(x.shape)


@jax.custom_vjp
def _changed(x, change, _):
    return x * (1.0 + change)


_changed.defvjp(
    lambda x, change, change_of_gradient: (_changed(x, change, None), change_of_gradient),
    lambda change_of_gradient, d: (d * (1.0 + change_of_gradient), None, None),
)


def _sampled(function):
    """``function(config, parameters, batch, rounding)`` exactly, then with sampled roundings."""

    @functools.cache
    def program(config: ModelConfig, **options):
        def run(parameters, batch, changes):
            return function(config, parameters, batch, _Roundings(changes), **options)

        options_of_xla = {"xla_backend_optimization_level": 0}
        return jax.jit(jax.vmap(run, in_axes=(None, None, 0)), compiler_options=options_of_xla)

    @functools.wraps(function)
    def sampled(config: ModelConfig, parameters: Any, batch: Batch, **options) -> list[Any]:
        rng = np.random.default_rng(0)
        signs = rng.integers(0, 2, (NUM_SAMPLES + 1, _NUM_SIGNS), np.int8) * 2.0 - 1.0
        changes = signs * UNIT * np.sqrt(np.size(batch.tokens))
        changes[0] = 0.0
        batch = jax.tree.map(np.asarray, batch)
        with double_precision():
            parameters = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), parameters)
            results = program(config, **options)(parameters, batch, changes)
            results = jax.tree.map(np.asarray, results)
        return [jax.tree.map(lambda x, i=i: x[i], results) for i in range(NUM_SAMPLES + 1)]

    return sampled


def rounded(samples: list[Any]) -> Any:
    """The first of the samples, which is exact, with the spread of the others."""

    def leaf(exact, *others):
        spread = np.sqrt(np.mean([np.square(other - exact) for other in others], axis=0))
        # One element's may be small by luck, unless no rounding reaches it.
        typical = np.sqrt(np.mean(np.square(spread)))
        return Rounded(exact, np.where(spread == 0.0, 0.0, np.maximum(spread, typical)))

    return jax.tree.map(leaf, *samples)


def logits(config: ModelConfig, parameters: Any, batch: Batch) -> Rounded:
    """[B, T, V]."""
    return rounded(_sampled(_logits)(config, parameters, batch))


def loss_and_gradients(config: ModelConfig, parameters: Any, batch: Batch, **options) -> Any:
    """The exact one of ``samples``."""
    return samples(config, parameters, batch, **options)[0]


@_sampled
def samples(
    config: ModelConfig,
    parameters: Any,
    batch: Batch,
    rounding: _Roundings,
    *,
    z_loss: float,
    label_smoothing: float = 0.0,
) -> Any:
    """Mean nll over counted targets, and the gradient of it, smoothed, plus z-loss by every
    parameter.
    """

    def loss(parameters):
        logits_BTV = _logits(config, parameters, batch, rounding)
        largest = jnp.max(logits_BTV, axis=-1)
        lse = largest + jnp.log(jnp.sum(jnp.exp(logits_BTV - largest[..., None]), axis=-1))
        lse = rounding(lse)
        rows, columns = np.indices(np.shape(batch.targets))
        nll = lse - logits_BTV[rows, columns, batch.targets]
        weights = batch.weights.astype(jnp.float64)
        total = weights.sum()
        smoothed = nll + label_smoothing * (lse - nll - jnp.mean(logits_BTV, axis=-1))
        return jnp.sum(weights * (smoothed + z_loss * lse**2)) / total, jnp.sum(
            weights * nll
        ) / total

    (_, nll), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
    return nll, gradients


def _logits(config: ModelConfig, parameters: Any, batch: Batch, rounding: _Roundings) -> jax.Array:
    formulas = DecoderFormulas(xp=jnp, keep=rounding, rounding=rounding)
    return formulas.logits(config, parameters, batch.tokens, batch.positions, batch.segment_ids)


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution's cumulative probability."""
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / np.sqrt(2.0)))


def clipped(gradients: Any, clip_norm: float | None) -> tuple[Any, float]:
    """Gradients scaled to a global norm of at most ``clip_norm``, and their norm before."""
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradients)))
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
    return jax.tree.map(lambda g: g * factor, gradients), float(norm)


def adamw(
    config: OptimizerConfig, theta: np.ndarray, gradients: list[np.ndarray], rates, *, decay: bool
) -> np.ndarray:
    """Loshchilov and Hutter 2019, algorithm 2, over a list of steps' gradients."""
    theta = np.asarray(theta, np.float64)
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g**2
        m_hat, v_hat = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
        step = m_hat / (np.sqrt(v_hat) + config.epsilon)
        theta = theta - rate * (step + (config.weight_decay * theta if decay else 0.0))
    return theta
