"""A decoder written from the papers, for NumPy and JAX: what all oracles of models compute.

Independent of the package on purpose: key/value heads are repeated, the score matrix is whole,
layers are a Python loop. Only the names of parameters are shared.

Dims: b batch, t position, s key position, d model width, n query heads, k kv heads, h head width,
f mlp width, r latent width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxinfra.config.kinds import MlpKind, NormKind, NormPlacement
from jaxinfra.config.model import (
    BlockConfig,
    LatentAttentionConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
)
from jaxinfra.config.rope import RopeConfig, RopePairs
from jaxinfra.model.rope import rope_frequencies

HIDDEN = -1e30  # a score that weighs nothing, and is no infinity where a row sees no key


def itself(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderFormulas:
    """The formulas, over arrays of ``numpy`` (or ``Rounded``) or of ``jax.numpy``."""

    xp: Any
    keep: Callable = itself  # of what a program keeps in the dtype that it computes in
    rounding: Callable = itself  # of what it keeps in fp32
    turned: Callable = lambda value, angle: value  # of a cosine or a sine, and its angle

    def logits(self, config: ModelConfig, parameters: Any, tokens, positions, segments=None):
        """[b, t, vocabulary]."""
        x = parameters["embedding"]["table"][tokens] * config.embedding_scale
        if config.learned_positions:
            x = x + parameters["positions"]["table"][positions]
        x = self.keep(x)
        for i, repetition in config.layer_positions:
            weights = jax.tree.map(lambda w, n=repetition: w[n], parameters["blocks"][i])
            x = self._block(config.blocks[i], weights, x, positions, segments)
        x = self._norm(config.final_norm, parameters["final_norm"], x)
        table = parameters["embedding" if config.tie_embeddings else "unembedding"]["table"]
        return self.rounding(self._cap(self.rounding(x @ table.T), config.logit_soft_cap))

    def _block(self, config: BlockConfig, weights: Any, x, positions, segments):
        for name in ("attention", "mlp"):
            y = self._norm(config.norm, weights[f"{name}_norm"], x)
            if name == "attention":
                y = self._attention(config.mixer, weights[name], y, positions, segments)
            else:
                y = self._mlp(config.feed_forward, weights[name], y)
            if config.norm_placement is NormPlacement.SANDWICH:
                y = self._norm(config.norm, weights[f"{name}_post_norm"], y)
            x = self.keep(x + y)
        return x

    def _norm(self, config: NormConfig, weights: Any, x):
        if config.kind is NormKind.LAYER:
            x = x - self.xp.mean(x, axis=-1, keepdims=True)
        square = self.xp.mean(x * x, axis=-1, keepdims=True)
        y = self.rounding(x / self.xp.sqrt(square + config.epsilon))
        y = y * (weights["scale"] + config.scale_offset)
        return self.keep(y + weights["bias"] if "bias" in weights else y)

    def _cap(self, x, cap):
        return x if cap is None else cap * self.xp.tanh(x / cap)

    def _project(self, spec: str, x, weights: Any):
        product = self.keep(self.xp.einsum(spec, x, weights["weight"]))
        return self.keep(product + weights["bias"]) if "bias" in weights else product

    def _mlp(self, config: MlpConfig, weights: Any, x):
        up = self._project("btd,df->btf", x, weights["up"])
        if config.kind.gated:
            gate = self._project("btd,df->btf", x, weights["gate"])
            hidden = self._activation(config.kind, gate) * up
        else:
            hidden = self._activation(config.kind, up)
        return self._project("btf,fd->btd", self.keep(hidden), weights["down"])

    def _activation(self, kind: MlpKind, x):
        if kind is MlpKind.SWIGLU:
            return x / (1.0 + self.xp.exp(-x))
        if kind in (MlpKind.GEGLU_TANH, MlpKind.GELU_TANH):
            return 0.5 * x * (1.0 + self.xp.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1.0 + jax.lax.erf(x / np.sqrt(2.0)))

    def _attention(self, config: Any, weights: Any, x, positions, segments):
        heads = self._latent if isinstance(config, LatentAttentionConfig) else self._grouped
        q, k, v = heads(config, weights, x, positions)
        scale = config.head_dim**-0.5 if config.scale is None else config.scale
        raw = self.rounding(scale * self.xp.einsum("btnh,bsnh->bnts", q, k))
        scores = self.rounding(self._cap(raw, config.logit_soft_cap))
        age = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None, :]
        visible = ((age >= 0) & (age < (config.window or x.shape[1])))[None, None]
        if segments is not None:
            same = segments[:, :, None] == segments[:, None, :]
            visible = visible & (same & (segments[:, :, None] >= 0))[:, None]
        scores = self.xp.where(visible, scores, HIDDEN)
        largest = self.xp.max(scores, axis=-1, keepdims=True)
        # Padding rows see nothing and yield 0.
        weight = self.xp.where(visible, self.xp.exp(scores - largest), 0.0)
        total = self.xp.sum(weight, axis=-1, keepdims=True)
        weight = self.keep(weight / self.xp.where(total == 0.0, 1.0, total))
        out = self.keep(self.xp.einsum("bnts,bsnh->btnh", weight, v))
        return self._project("btnh,nhd->btd", out, weights["out"])

    def _grouped(self, config: Any, weights: Any, x, positions):
        spec = "btd,dnh->btnh"
        q, k, v = (self._project(spec, x, weights[name]) for name in ("query", "key", "value"))
        if config.qk_norm is not None:
            q = self._norm(config.qk_norm, weights["query_norm"], q)
            k = self._norm(config.qk_norm, weights["key_norm"], k)
        if config.rope is not None:
            q, k = (self._rotated(y, positions, config.rope) for y in (q, k))
        group = config.num_q_heads // config.num_kv_heads
        return q, self.xp.repeat(k, group, axis=2), self.xp.repeat(v, group, axis=2)

    def _latent(self, config: LatentAttentionConfig, weights: Any, x, positions):
        """DeepSeek-V2 (arXiv 2405.04434), equations 37 to 47."""
        if config.query_rank is None:
            q = self._project("btd,dnh->btnh", x, weights["query"])
        else:
            down = self._project("btd,dr->btr", x, weights["query_down"])
            down = self._norm(config.norm, weights["query_norm"], down)
            q = self._project("btr,rnh->btnh", down, weights["query_up"])
        down = self._project("btd,dr->btr", x, weights["kv_down"])
        latent = self._norm(config.norm, weights["kv_norm"], down[..., : config.kv_rank])
        both = self._project("btr,rnh->btnh", latent, weights["kv_up"])
        shared = self._rotated(down[..., None, config.kv_rank :], positions, config.rope)
        rotated = self._rotated(q[..., config.nope_dim :], positions, config.rope)
        q = self.xp.concatenate([q[..., : config.nope_dim], rotated], axis=-1)
        shared = self.xp.repeat(shared, config.num_q_heads, axis=2)
        k = self.xp.concatenate([both[..., : config.nope_dim], shared], axis=-1)
        return q, k, both[..., config.nope_dim :]

    def _rotated(self, x, positions, rope: RopeConfig):
        width = x.shape[-1]
        frequencies, factor = rope.theta ** (-2.0 * np.arange(width // 2) / width), 1.0
        if rope.scaling is not None:  # whose formulas are held in unit/test_rope.py
            frequencies, factor = rope_frequencies(rope, head_dim=width)
        angle = positions[..., None, None] * np.asarray(frequencies, np.float64)
        cos, sin = (self.turned(factor * f(angle), angle) for f in (self.xp.cos, self.xp.sin))
        if rope.pairs is RopePairs.HALVES:
            first, second = x[..., : width // 2], x[..., width // 2 :]
        else:
            first, second = x[..., 0::2], x[..., 1::2]
        parts = [first * cos - second * sin, first * sin + second * cos]
        if rope.pairs is not RopePairs.HALVES:
            parts = [part[..., i : i + 1] for i in range(width // 2) for part in parts]
        return self.keep(self.xp.concatenate(parts, axis=-1))
