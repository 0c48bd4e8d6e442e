"""The baseline: a Llama training step as a JAX user writes it by hand.

fp32 weights, bf16 compute, AdamW from optax, scan over layers, cuDNN attention where there is a
GPU, everything else XLA, the loss over materialized fp32 logits. Deliberately shares no code with
jaxinfra: it is what the system is compared with, and an independent check of its loss.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama's sizes and the batch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    length: int
    theta: float = 500_000.0

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


def initialize(shape: Shape, key: jax.Array) -> dict[str, Any]:
    """fp32 parameters, normal(0.02), stacked over layers."""
    keys = jax.random.split(key, 8)

    def draw(i: int, *dims: int) -> jax.Array:
        return 0.02 * jax.random.normal(keys[i], dims, jnp.float32)

    n, d, f = shape.layers, shape.width, shape.hidden
    q, k = shape.heads * shape.head, shape.kv_heads * shape.head
    layers = {
        "q": draw(1, n, d, q),
        "k": draw(2, n, d, k),
        "v": draw(3, n, d, k),
        "o": draw(4, n, q, d),
        "gate": draw(5, n, d, f),
        "up": draw(6, n, d, f),
        "down": draw(7, n, f, d),
        "norm1": jnp.ones((n, d)),
        "norm2": jnp.ones((n, d)),
    }
    return {"embed": draw(0, shape.vocab, d), "layers": layers, "norm": jnp.ones((d,))}


def make_loss(
    shape: Shape, remat: str, constrain: Callable[[jax.Array], jax.Array] = lambda x: x
) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    """Mean cross entropy of targets given tokens, both int [batch, length].

    Args:
        constrain: places the residual stream, on a mesh.
    """
    b, s, head = shape.batch, shape.length, shape.head
    frequencies = shape.theta ** (-np.arange(0, head, 2) / head)
    angles = np.arange(s)[:, None] * frequencies
    cos = jnp.asarray(np.cos(angles), jnp.float32)[:, None]
    sin = jnp.asarray(np.sin(angles), jnp.float32)[:, None]
    on_gpu = jax.default_backend() == "gpu"

    def rope(x):
        first, second = jnp.split(x.astype(jnp.float32), 2, -1)
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(rotated, -1).astype(x.dtype)

    def norm(x, w):
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
        return (y * w).astype(x.dtype)

    def layer(x, w):
        w = jax.tree.map(lambda t: t.astype(jnp.bfloat16), w)
        h = norm(x, w["norm1"])
        q = rope((h @ w["q"]).reshape(b, s, shape.heads, head))
        k = rope((h @ w["k"]).reshape(b, s, shape.kv_heads, head))
        v = (h @ w["v"]).reshape(b, s, shape.kv_heads, head)
        o = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn" if on_gpu else "xla"
        )
        x = x + o.reshape(b, s, -1) @ w["o"]
        h = norm(x, w["norm2"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        return constrain(x), None

    if remat == "full":
        layer = jax.checkpoint(layer)
    elif remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(layer, policy=policy)

    def loss(params, tokens, targets):
        table = params["embed"].astype(jnp.bfloat16)
        x, _ = lax.scan(layer, constrain(table[tokens]), params["layers"])
        logits = (norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


def reordered(shape: Shape, params: dict[str, Any]) -> dict[str, Any]:
    """Permutes the function's channels without changing it: width, hidden and groups of heads.

    Every product of the layers then adds the same terms in another order. In exact arithmetic loss
    and training are equal; what differs is how fp32 sums round, which tips some of their bf16
    results to the neighbor, which tips more of them in every layer after that.
    """
    rng = np.random.default_rng(0)
    width, hidden = rng.permutation(shape.width), rng.permutation(shape.hidden)
    groups = rng.permutation(shape.kv_heads)  # rotary pairs stay in their head

    def channels(per_group: int) -> np.ndarray:
        return np.arange(shape.kv_heads * per_group).reshape(shape.kv_heads, -1)[groups].ravel()

    query = channels(shape.heads // shape.kv_heads * shape.head)
    key = channels(shape.head)
    columns = {"q": query, "k": key, "v": key, "o": width}
    columns |= {"gate": hidden, "up": hidden, "down": width}
    rows = dict.fromkeys(columns, width) | {"o": query, "down": hidden}
    layers = {
        name: w[:, rows[name]][..., columns[name]] if name in columns else w[:, width]
        for name, w in params["layers"].items()
    }
    embed, norm = params["embed"][:, width], params["norm"][width]
    return {"embed": embed, "layers": layers, "norm": norm}


def make_step(
    shape: Shape,
    *,
    remat: str,
    learning_rate: float,
    weight_decay: float,
    warmup: int = 0,
    clip_norm: float | None = None,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer and the jitted, donating step (params, state, tokens, targets) -> ..., loss.

    Args:
        warmup: steps over which the rate rises linearly, the last of them at the full rate.
        clip_norm: of all gradients together; None leaves them as they are.
    """
    loss = make_loss(shape, remat, constrain)

    def decayed(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "norm" not in jax.tree_util.keystr(path), params
        )

    def rising(count):
        return learning_rate * jnp.minimum((count + 1) / warmup, 1)

    optimizer = optax.adamw(
        rising if warmup else learning_rate,
        b1=0.9,
        b2=0.95,
        weight_decay=weight_decay,
        mask=decayed,
    )
    if clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, targets):
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return optimizer, step
