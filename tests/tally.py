"""A feed-forward kind of the tests' own, added as users add one: a config record and a layer.

It uses every way out of a layer that layers of experts and low-precision recipes need: a loss,
counts, a maximum, and state that is changed by rules, from what the forward and what the backward
pass say.

Dims: B batch, T position, D model width, E gain.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfra import axes
from jaxinfra.config.model import MlpConfig
from jaxinfra.config.own import OwnFeedForward
from jaxinfra.config.parts import part
from jaxinfra.model.execution import Execution
from jaxinfra.model.mlp import Mlp
from jaxinfra.model.passes import LayerOutput, ModelState, Pass, Sums
from jaxinfra.numerics.recipe import Site

LOSS_WEIGHT = 0.02
BIAS_STEP = 0.125  # exact in binary, so that biases are equal or clearly not
DECAY = 0.75


@part
@dataclasses.dataclass(frozen=True, kw_only=True)
class TallyConfig(OwnFeedForward):
    """An MLP whose output is scaled, token by token, by one of several gains."""

    hidden_dim: int
    num_gains: int = 4

    @property
    def layer(self) -> type["Tally"]:
        """The layer's class."""
        return Tally

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides."""
        return {"tally.hidden_dim": self.hidden_dim}


class Tally(nnx.Module):
    """gain[argmax(router(x) + bias)] * mlp(x).

    It emits the losses ``router_z`` (of the scores' logsumexp) and ``input_size`` (which weights of
    zero do not silence), the counts ``tokens`` of each gain, and the maximum ``input``. The bias
    evens out the counts; the history remembers the largest input, and the largest cotangent of the
    output.
    """

    def __init__(
        self,
        config: TallyConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.policy, self.place = execution.policy, execution.place
        self.multiply = execution.multiply
        sizes = {"model_dim": model_dim, "std": std, "out_std": out_std}
        inner = MlpConfig(hidden_dim=config.hidden_dim)
        self.mlp = Mlp(inner, **sizes, execution=execution, rngs=rngs)
        shape = (model_dim, config.num_gains)
        self.router = nnx.Param(
            std * jax.random.normal(rngs.params(), shape, self.policy.param),
            axes=(axes.EMBED, None),
            matmul=True,
        )
        self.gain = nnx.Param(
            jnp.linspace(0.5, 1.5, config.num_gains, dtype=self.policy.param), axes=(None,)
        )
        zeros = jnp.zeros(config.num_gains, self.policy.accum)
        self.bias = ModelState(zeros, axes=(None,), rule=_evened)
        self.history = ModelState(jnp.zeros(2, self.policy.accum), axes=(None,), rule=_remembered)

    def __call__(self, x_BTD: jax.Array, given: Pass) -> LayerOutput:
        """Tokens of padding count nowhere."""
        # Whole on every device. Left to the compiler, a weight that is not split over tensor
        # may be permuted among the devices of a stage, and that waits for all other stages.
        router_DE = self.place(self.router[...], (None, None))
        recipe = self.policy.recipe(Site.ROUTER)
        score_BTE = self.multiply(
            "BTD,DE->BTE", x_BTD, router_DE, recipe=recipe, out=self.policy.accum
        )
        score_BTE = self.place(score_BTE, (axes.BATCH, axes.SEQUENCE, None))
        counts_BT = jnp.ones(x_BTD.shape[:2], score_BTE.dtype)
        if given.segment_ids_BT is not None:
            counts_BT = (given.segment_ids_BT >= 0).astype(score_BTE.dtype)
        chosen_BT = jnp.argmax(jax.lax.stop_gradient(score_BTE) + self.bias[...][None, None], -1)
        one_hot_BTE = jax.nn.one_hot(chosen_BT, score_BTE.shape[-1], dtype=score_BTE.dtype)
        z_BT = jax.nn.logsumexp(score_BTE, axis=-1) ** 2
        size_BT = jnp.mean(self.policy.to_accum(x_BTD) ** 4, axis=-1)
        gain_BT1 = jnp.sum(one_hot_BTE * self.gain[...][None, None], axis=-1, keepdims=True)
        y_BTD = self.policy.to_accum(self.mlp(x_BTD, given).x) * gain_BT1
        y_BTD = _telling(y_BTD, self.history[...])
        return LayerOutput(
            x=self.policy.to_compute(y_BTD),
            sums=Sums(
                losses={
                    "router_z": LOSS_WEIGHT * jnp.sum(counts_BT * z_BT),
                    "input_size": LOSS_WEIGHT * jnp.sum(counts_BT * size_BT),
                },
                added={"tokens": jnp.sum(counts_BT[..., None] * one_hot_BTE, axis=(0, 1))},
                largest={"input": jnp.max(jnp.abs(self.policy.to_accum(x_BTD)))},
            ),
        )


@jax.custom_vjp
def _telling(y_BTD: jax.Array, history: jax.Array) -> jax.Array:
    """y; its cotangent's largest element leaves as the history's second cotangent."""
    del history
    return y_BTD


def _told(history_shape: None, dy_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    del history_shape
    largest = jnp.max(jnp.abs(dy_BTD))
    return dy_BTD, jnp.stack([jnp.zeros_like(largest), largest])


_telling.defvjp(lambda y_BTD, history: (_telling(y_BTD, history), None), _told)


def _evened(bias: jax.Array, sums: Sums, emitted: jax.Array) -> jax.Array:
    del emitted
    counts = sums.added["tokens"]
    return bias + BIAS_STEP * jnp.sign(jnp.mean(counts, keepdims=True) - counts)


def _remembered(history: jax.Array, sums: Sums, emitted: jax.Array) -> jax.Array:
    seen = jnp.stack([sums.largest["input"], emitted[1]])
    return jnp.maximum(DECAY * history, seen)
