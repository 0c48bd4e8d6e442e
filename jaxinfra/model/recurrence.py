"""Parts of mixers with a state: short convolutions, the recurrence over a cache, gated norms.

Dims: B batch, T position, N heads, H head width, W tap.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxinfra import axes
from jaxinfra.model.cache import HELD, Cache, JointCache, StateCache, in_layer
from jaxinfra.model.execution import Execution
from jaxinfra.model.passes import Pass
from jaxinfra.model.projection import Projection
from jaxinfra.numerics.recipe import Site

HEADS = (axes.BATCH, axes.SEQUENCE, axes.Q_HEADS, axes.HEAD)
"""Logical dims of queries, keys and values."""
_STATE = "state"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inward:
    """Makes the projections of a layer's input, and the convolutions behind them."""

    model_dim: int
    std: float
    execution: Execution
    rngs: nnx.Rngs

    def heads(self, num_heads: int, width: int, *, bias: bool = False) -> Projection:
        """Makes a projection onto vectors of heads."""
        return self._projection(
            "BTD,DNH->BTNH",
            (self.model_dim, num_heads, width),
            (axes.EMBED, axes.Q_HEADS, axes.HEAD),
            bias_rank=2 if bias else 0,
        )

    def numbers(self, num_heads: int, *, bias: bool = False) -> Projection:
        """Makes a projection onto a number per head; as a router's, in the accum dtype."""
        return self._projection(
            "BTD,DN->BTN",
            (self.model_dim, num_heads),
            (axes.EMBED, axes.Q_HEADS),
            bias_rank=1 if bias else 0,
            site=Site.ROUTER,
        )

    def down(self, rank: int) -> Projection:
        """Makes a projection onto few numbers that all heads read."""
        shape, dims = (self.model_dim, rank), (axes.EMBED, None)
        return self._projection("BTD,DR->BTR", shape, dims, whole=True)

    def up(self, rank: int, num_heads: int, width: int) -> Projection:
        """Makes a projection of such numbers onto vectors of heads."""
        shape, dims = (rank, num_heads, width), (None, axes.Q_HEADS, axes.HEAD)
        return self._projection("BTR,RNH->BTNH", shape, dims)

    def _projection(
        self, spec: str, shape: tuple[int, ...], dims: axes.Dims, **more: Any
    ) -> Projection:
        given = {"std": self.std, "execution": self.execution, "rngs": self.rngs}
        return Projection(spec, shape=shape, dims=dims, **given, **more)

    def convolution(
        self,
        num_heads: int,
        width: int,
        num_taps: int,
        *,
        bias: bool = False,
        activates: bool = True,
    ) -> "Convolution":
        """Makes the convolution behind a projection onto vectors of heads."""
        return Convolution(
            num_heads=num_heads,
            width=width,
            num_taps=num_taps,
            bias=bias,
            activates=activates,
            execution=self.execution,
            rngs=self.rngs,
        )


class Convolution(nnx.Module):
    """Short causal convolution of each channel, then SiLU if ``activates``."""

    def __init__(
        self,
        *,
        num_heads: int,
        width: int,
        num_taps: int,
        bias: bool,
        activates: bool,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.policy, self.place, self.activates = execution.policy, execution.place, activates
        self.convolve = execution.kernels.convolve
        param, dims = execution.policy.param, (axes.Q_HEADS, axes.HEAD)
        shape, bound = (num_heads, width), num_taps**-0.5
        self.weight = nnx.Param(
            jax.random.uniform(rngs.params(), (*shape, num_taps), param, -bound, bound),
            axes=(*dims, None),
        )
        self.bias = nnx.Param(jnp.zeros(shape, param), axes=dims) if bias else None

    def __call__(
        self, x_BTNH: Float[Array, "B T N H"], given: Pass, *, name: str
    ) -> Float[Array, "B T N H"]:
        """Convolves x, in the compute dtype, with the inputs before it that the cache has.

        Args:
            name: name of those inputs in the cache.
        """
        tail = given.cache.read()[name] if isinstance(given.cache, StateCache) else None
        y_BTNH = self.convolve(
            x_BTNH, self.weight[...], tail=tail, segment_ids=given.segment_ids_BT
        )
        if self.bias is not None:
            y_BTNH += jnp.expand_dims(self.policy.to_accum(self.bias[...]), (0, 1))
        y_BTNH = jax.nn.silu(y_BTNH) if self.activates else y_BTNH
        return self.place(self.policy.to_compute(y_BTNH), HEADS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenOperands:
    """Operands of ``pallas_kernels.linear_attention`` of each token."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    rates: jax.Array | None = None  # of the layer, not of its tokens

    def by_token(self) -> dict[str, jax.Array]:
        """Returns the operands of a state's new value, with each channel's own decay."""
        log_decay = self.log_decay
        if self.rates is not None:
            log_decay = log_decay[..., None] * self.rates[None, None]
        held = {"k": self.k, "v": self.v, "log_decay": log_decay, "beta": self.beta}
        return {name: x for name, x in held.items() if x is not None}


def recurred(
    operands: TokenOperands,
    inputs: Mapping[str, Float[Array, "B T _ _"]],
    given: Pass,
    *,
    execution: Execution,
) -> tuple[Float[Array, "B T N H"], StateCache | None]:
    """Computes linear attention from the cached state; returns outputs and the cache after it.

    Args:
        inputs: what the convolutions read, by names in the cache; none if ``stepped`` has computed
            them.
    """
    cache = given.cache
    if cache is None:
        ids = given.segment_ids_BT
        out, _ = _called(execution.kernels.recur, operands, state=None, segment_ids=ids)
        return out, None
    assert isinstance(cache, StateCache), "CacheSpec"
    count_B = jnp.sum(given.positions_BT >= 0, axis=1)
    recur = execution.kernels.recur_in_slots
    counted = _counted(operands, count_B, has_zeros=not inputs)
    if cache.is_tentative:
        out, _ = _advanced(recur, counted, cache, writes=False)
        return out, cache.hold({**inputs, **operands.by_token()})
    tails = _tails(cache.read(), inputs, count_B)
    out, cache = _advanced(recur, counted, cache)
    return out, cache.write(tails)


def steps(given: Pass, execution: Execution) -> bool:
    """Returns whether ``stepped`` computes the convolutions of this pass."""
    cache, is_token = given.cache, given.positions_BT.shape[1] == 1
    is_known = isinstance(cache, StateCache) and not cache.is_tentative
    return is_known and is_token and execution.kernels.convolve_in_slots is not None


def stepped(
    x_BTC: Float[Array, "B 1 C"],
    convolutions: Mapping[str, "Convolution"],
    lengths: Mapping[str, float],
    given: Pass,
    *,
    execution: Execution,
) -> tuple[dict[str, Float[Array, "B 1 _ _"]], Pass]:
    """Computes convolutions of one token per row; returns results and the pass with a new cache.

    Results of rows that do not count are zeros.

    Args:
        x_BTC: inputs of one convolution after the other, and more behind them.
        convolutions: convolutions by names in the cache.
        lengths: lengths that results of some are scaled to.
    """
    cache, convolve = given.cache, execution.kernels.convolve_in_slots
    assert isinstance(cache, StateCache), "steps"
    assert convolve is not None, "steps"
    slots = [cache.slots(name) for name in convolutions]
    out, tails = convolve(
        x_BTC[:, 0],
        [each.weight[...] for each in convolutions.values()],
        lengths=[lengths.get(name) for name in convolutions],
        tails=[tail for tail, _, _ in slots],
        read=slots[0][1],
        written=slots[0][2],
        counted=given.positions_BT[:, 0] >= 0,
    )
    for name, tail in zip(convolutions, tails, strict=True):
        cache = cache.with_slots(name, tail)
    found = {name: x[:, None] for name, x in zip(convolutions, out, strict=True)}
    return found, dataclasses.replace(given, cache=cache)


def convolved(inputs: Mapping[str, Float[Array, "B T _ _"]], given: Pass) -> StateCache | None:
    """Returns the cache of a mixer whose state is only what its convolutions still read.

    Args:
        inputs: what the convolutions read, by names in the cache.
    """
    cache = given.cache
    if cache is None:
        return None
    assert isinstance(cache, StateCache), "CacheSpec"
    if cache.is_tentative:
        return cache.hold(inputs)
    count_B = jnp.sum(given.positions_BT >= 0, axis=1)
    return cache.write(_tails(cache.read(), inputs, count_B))


def settled(
    cache: Sequence[Cache], count_B: Int[Array, "B"], *, execution: Execution
) -> tuple[Cache, ...]:
    """Returns the cache after a tentative pass, of whose tokens each row keeps the first.

    Args:
        count_B: number of tokens that each row keeps, at most those that it gave.
    """

    recur = execution.kernels.recur_in_slots

    def settle(each: Cache) -> Cache:
        if isinstance(each, JointCache):
            return JointCache(entries=each.entries, state=_settled(recur, each.state, count_B))
        return _settled(recur, each, count_B) if isinstance(each, StateCache) else each

    return tuple(map(settle, cache))


def _settled(recur: Callable, cache: StateCache, count_B: jax.Array) -> StateCache:
    held = cache.held
    kept = {name: x for name, x in cache.arrays.items() if not name.startswith(HELD)}
    whole = dataclasses.replace(cache, arrays=kept, is_tentative=False)

    def settle(layer: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        at = in_layer(whole, arrays, layer)
        mine = {name: x[layer] for name, x in held.items()}
        tails = _tails(at.read(), mine, count_B)
        if _STATE in kept:
            k, v, log_decay = (mine[name] for name in ("k", "v", "log_decay"))
            operands = TokenOperands(q=k, k=k, v=v, log_decay=log_decay, beta=mine.get("beta"))
            _, at = _advanced(recur, _counted(operands, count_B), at)
        return at.write(tails).arrays

    num_layers = len(next(iter(kept.values())))
    return dataclasses.replace(whole, arrays=jax.lax.fori_loop(0, num_layers, settle, kept))


def _advanced(
    recur: Callable[..., tuple[jax.Array, jax.Array]],
    operands: TokenOperands,
    cache: StateCache,
    *,
    writes: bool = True,
) -> tuple[jax.Array, StateCache]:
    """Outputs from the cached states, and the cache with the states after them if it ``writes``."""
    states, read_B, written_B = cache.slots(_STATE)
    slots = {"states": states, "read": read_B, "written": written_B if writes else None}
    out, states = _called(recur, operands, **slots)
    return out, cache.with_slots(_STATE, states) if writes else cache


def _called(
    recur: Callable[..., tuple[jax.Array, jax.Array]], operands: TokenOperands, **more: Any
) -> tuple[jax.Array, jax.Array]:
    q, k, v, log_decay = operands.q, operands.k, operands.v, operands.log_decay
    return recur(q, k, v, log_decay, beta=operands.beta, rates=operands.rates, **more)


def _counted(
    operands: TokenOperands, count_B: jax.Array, *, has_zeros: bool = False
) -> TokenOperands:
    """Returns operands of which those beyond each row's number of tokens change no state.

    Args:
        has_zeros: whether keys and values are zeros there.
    """
    length = operands.v.shape[1]
    is_counted_BT = jnp.arange(length)[None] < count_B[:, None]

    def masked(x: jax.Array) -> jax.Array:
        mask = is_counted_BT.reshape(*is_counted_BT.shape, *[1] * (x.ndim - 2))
        return jnp.where(mask, x, jnp.zeros_like(x))

    beta = operands.beta
    return dataclasses.replace(
        operands,
        k=operands.k if has_zeros else masked(operands.k),
        v=operands.v if has_zeros else masked(operands.v),
        log_decay=masked(operands.log_decay),
        beta=None if beta is None else masked(beta),
    )


def _tails(
    before: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array], count_B: jax.Array
) -> dict[str, jax.Array]:
    """The newest inputs of each convolution after each row's first tokens."""

    def newest(old: jax.Array, new: jax.Array) -> jax.Array:
        seen = jnp.concatenate([old.astype(new.dtype), new], axis=1)
        places = count_B[:, None] + jnp.arange(old.shape[1])[None]
        return jnp.take_along_axis(seen, places[:, :, None, None], axis=1)

    return {name: newest(old, inputs[name]) for name, old in before.items() if name in inputs}


class GatedNorm(nnx.Module):
    """RMSNorm of heads' outputs, with a gate before or behind it.

    Args:
        shape: shape of the scale: (width,) of one head, or (heads, width) of all.
        num_together: number of neighbouring heads that are normalized together.
        gates_first: whether the gate multiplies what is normalized; else it multiplies the result.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        epsilon: float,
        num_together: int,
        gates_first: bool,
        execution: Execution,
    ):
        self.policy = execution.policy
        self.epsilon, self.num_together, self.gates_first = epsilon, num_together, gates_first
        dims = (axes.Q_HEADS, axes.HEAD)[-len(shape) :]
        self.scale = nnx.Param(jnp.ones(shape, execution.policy.param), axes=dims)

    def __call__(
        self, x_BTNH: Float[Array, "B T N H"], gate_BTNH: Float[Array, "B T N H"]
    ) -> Float[Array, "B T N H"]:
        """Normalizes x and multiplies by the gate, an activation's result in the accum dtype."""
        x_BTNH = self.policy.to_accum(x_BTNH)
        if self.gates_first:
            x_BTNH = x_BTNH * gate_BTNH
        batch, length, heads, _ = x_BTNH.shape
        groups = x_BTNH.reshape(batch, length, heads // self.num_together, -1)
        groups *= jax.lax.rsqrt(jnp.mean(groups**2, axis=-1, keepdims=True) + self.epsilon)
        scale = self.policy.to_accum(self.scale[...])
        y_BTNH = groups.reshape(x_BTNH.shape) * jnp.expand_dims(scale, range(4 - scale.ndim))
        if not self.gates_first:
            y_BTNH = y_BTNH * gate_BTNH
        return self.policy.to_compute(y_BTNH)
