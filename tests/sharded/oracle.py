"""A decoder, its loss and AdamW written from the papers in float64: what everything is held to.

Independent of the package on purpose: complex numbers rotate, key/value heads are repeated, the
score matrix is whole, layers are a Python loop. Only the names of parameters are shared.

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

from jaxinfra.config.kinds import MlpKind, NormKind
from jaxinfra.config.model import BlockConfig, LatentAttentionConfig, ModelConfig, NormConfig
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.data.batch import Batch
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
    x = parameters["embedding"]["table"][batch.tokens] * config.embedding_scale
    if config.learned_positions:
        x = x + parameters["positions"]["table"][batch.positions]
    x = rounding(x)
    for layer in range(config.num_layers):
        group, i = divmod(layer, len(config.blocks))
        weights = jax.tree.map(lambda w, group=group: w[group], parameters["blocks"][i])
        x = _block(config.blocks[i], weights, x, batch.positions, batch.segment_ids, rounding)
    x = _norm(config.final_norm, parameters["final_norm"], x, rounding)
    table = parameters["embedding" if config.tie_embeddings else "unembedding"]["table"]
    return rounding(_cap(rounding(x @ table.T), config.logit_soft_cap))


def _block(config: BlockConfig, weights: Any, x, positions, segments, rounding):
    def branch(name, function, x):
        y = function(_norm(config.norm, weights[f"{name}_norm"], x, rounding))
        if f"{name}_post_norm" in weights:
            y = _norm(config.norm, weights[f"{name}_post_norm"], y, rounding)
        return rounding(x + y)

    def attention(x):
        return _attention(config, weights, x, positions, segments, rounding)

    def mlp(x):
        return _mlp(config.feed_forward.kind, weights["mlp"], x, rounding)

    return branch("mlp", mlp, branch("attention", attention, x))


def _attention(block: BlockConfig, weights: Any, x, positions, segments, rounding):
    config, weights = block.mixer, weights["attention"]
    heads = _latent_heads if isinstance(config, LatentAttentionConfig) else _grouped_heads
    q, k, v = heads(config, weights, x, positions, rounding)
    scale = 1.0 / np.sqrt(config.head_dim) if config.scale is None else config.scale
    raw = rounding(scale * jnp.einsum("btnh,bsnh->bnts", q, k))
    scores = rounding(_cap(raw, config.logit_soft_cap))
    age = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None, :]
    visible = (age >= 0) & (age < (config.window or x.shape[1]))
    visible = visible & (segments[:, :, None] == segments[:, None, :])
    visible = (visible & (segments[:, :, None] >= 0))[:, None]
    # Padding rows see nothing and yield 0.
    weight = jnp.where(visible, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0.0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = rounding(weight / jnp.where(total == 0.0, 1.0, total))
    out = rounding(jnp.einsum("bnts,bsnh->btnh", weight, v))
    y = jnp.tensordot(out, weights["out"]["weight"], axes=2)
    return rounding(y + weights["out"].get("bias", 0.0))


def _project(x, weights: Any, rounding):
    return rounding(jnp.tensordot(x, weights["weight"], axes=1) + weights.get("bias", 0.0))


def _grouped_heads(config, weights: Any, x, positions, rounding):
    q, k, v = (_project(x, weights[name], rounding) for name in ("query", "key", "value"))
    if config.qk_norm is not None:
        q = _norm(config.qk_norm, weights["query_norm"], q, rounding)
        k = _norm(config.qk_norm, weights["key_norm"], k, rounding)
    if config.rope is not None:
        q, k = (rounding(_rotate(y, positions, config.rope)) for y in (q, k))
    group = config.num_q_heads // config.num_kv_heads
    return q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)


def _latent_heads(config, weights: Any, x, positions, rounding):
    """DeepSeek-V2 (arXiv 2405.04434), equations 37 to 47."""

    def compressed(name, width):
        down = _project(x, weights[f"{name}_down"], rounding)
        return _norm(config.norm, weights[f"{name}_norm"], down[..., :width], rounding), down

    if config.query_rank is None:
        q = _project(x, weights["query"], rounding)
    else:
        q = _project(compressed("query", None)[0], weights["query_up"], rounding)
    latent, down = compressed("kv", config.kv_rank)
    both = _project(latent, weights["kv_up"], rounding)
    k, v = both[..., : config.nope_dim], both[..., config.nope_dim :]
    shared = rounding(_rotate(down[..., None, config.kv_rank :], positions, config.rope))
    turned = rounding(_rotate(q[..., config.nope_dim :], positions, config.rope))
    q = jnp.concatenate([q[..., : config.nope_dim], turned], axis=-1)
    k = jnp.concatenate([k, jnp.repeat(shared, config.num_q_heads, axis=2)], axis=-1)
    return q, k, v


def _rotate(x, positions, rope: RopeConfig):
    assert rope.scaling is None
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * rope.theta ** (-2.0 * np.arange(half) / x.shape[-1])
    if rope.pairs is RopePairs.HALVES:
        real, imaginary = x[..., :half], x[..., half:]
    else:
        real, imaginary = x[..., 0::2], x[..., 1::2]
    turned = (real + 1j * imaginary) * jnp.exp(1j * angles)
    if rope.pairs is RopePairs.HALVES:
        return jnp.concatenate([turned.real, turned.imag], axis=-1)
    return jnp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def _mlp(kind: MlpKind, weights: Any, x, rounding):
    def project(name, y):
        return rounding(y @ weights[name]["weight"] + weights[name].get("bias", 0.0))

    up = project("up", x)
    hidden = _activation(kind, project("gate", x)) * up if kind.gated else _activation(kind, up)
    return project("down", rounding(hidden))


def _activation(kind: MlpKind, x):
    if kind is MlpKind.SWIGLU:
        return x / (1.0 + jnp.exp(-x))
    if kind in (MlpKind.GEGLU_TANH, MlpKind.GELU_TANH):
        return 0.5 * x * (1.0 + jnp.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + jax.lax.erf(x / np.sqrt(2.0)))


def _norm(config: NormConfig, weights: Any, x, rounding):
    if config.kind is NormKind.LAYER:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.epsilon)
    y = rounding(x) * (weights["scale"] + config.scale_offset)
    return rounding(y + weights.get("bias", 0.0))


def _cap(x, cap):
    return x if cap is None else cap * jnp.tanh(x / cap)


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
