"""Projection: the linear map that all layers use."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.axes import Dims
from jaxinfra.model.execution import Execution
from jaxinfra.model.lora import Adapter, RowAdapters
from jaxinfra.model.passes import ModelState, labelled
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.fp8_operands import Input, empty_record
from jaxinfra.ops.fp8_swiglu import Factor
from jaxinfra.ops.multiply import (
    AnyWeight,
    Deferred,
    StreamFactor,
    as_array,
    copied,
    gathered,
    is_plain,
)
from jaxinfra.ops.quantized import contracted_dims

PROJECTION = "projection"
HIDDEN = "mlp_hidden"
"""Names of the projections' outputs for recomputation policies; the MLP's wide ones apart."""
QUANTIZATION = "quantization"
"""Name of a projection's state where it multiplies in 8 bits."""


class Projection(nnx.Module):
    """Linear map y = einsum(spec, x, weight) + bias, plus the output of an adapter if it has one.

    The weight is an array or a ``QuantizedWeight``.

    Args:
        spec: einsum of x and weight, such as ``"BTD,DNH->BTNH"``.
        shape: shape of the weight.
        dims: logical dims of the weight.
        bias_rank: number of the weight's last dims that the bias has; 0 for no bias.
        std: standard deviation of the normal distribution that the weight is sampled from.
        name: name of the output, for recomputation policies.
        site: kind of matmul, by which the policy chooses a recipe.
        whole: whether no tensor axis shards the weight. It is gathered before its matmul, since
            the compiler might permute it in a pipeline stage, which would wait for other stages.
        repeated: a dim of weight and result that may have fewer elements than devices shard it.
            Each device then computes a copy of one, and the copies' gradients are summed.
    """

    def __init__(
        self,
        spec: str,
        *,
        shape: tuple[int, ...],
        dims: Dims,
        bias_rank: int = 0,
        std: float,
        execution: Execution,
        rngs: nnx.Rngs,
        name: str = PROJECTION,
        site: Site = Site.PROJECTION,
        whole: bool = False,
        repeated: str | None = None,
    ):
        self.name = name
        self.label = ""  # its own name in the block, once it has one
        self.spec = spec
        self.dims = dims
        self.policy = execution.policy
        self.multiply = execution.multiply
        self.recipe = execution.policy.recipe(site)
        self.gather = execution.gather
        at = len(shape) if repeated is None else dims.index(repeated)
        self.copies = execution.place.copies(repeated, shape[at]) if repeated else 1
        self.copied_axis = at - len(shape)  # of weight, bias and result alike
        self.place = execution.place if whole or self.copies > 1 else None
        param = execution.policy.param
        is_quantizable = site is Site.PROJECTION and not whole
        self.weight = nnx.Param(
            std * jax.random.normal(rngs.params(), shape, param),
            axes=dims,
            matmul=True,
            contracted=(contracted_dims(spec) or 0) if is_quantizable else 0,
        )
        self.bias = (
            nnx.Param(jnp.zeros(shape[-bias_rank:], param), axes=dims[-bias_rank:])
            if bias_rank
            else None
        )
        self.adapter: Adapter | RowAdapters | None = nnx.data(
            None
        )  # given after construction, or not
        self.quantization: ModelState | None = nnx.data(None)  # what 8-bit operands held
        if self.recipe.fp8 is not None:
            self.quantization = ModelState(
                empty_record(), axes=(None, None), rule=lambda record, sums, emitted: emitted
            )

    @property
    def merged_weight(self) -> Float[Array, "..."]:
        """Weight with its adapter merged, for layers that use parts of the weight themselves."""
        weight = as_array(self._used, self.policy.compute)
        return weight if self.adapter is None else self.adapter.merged(weight)

    @property
    def _used(self) -> AnyWeight:
        weight = gathered(self.weight.get_value(), self.gather, self.dims)
        return weight if self.place is None else jax.tree.map(self._whole, weight)

    def _whole(self, weight: jax.Array) -> jax.Array:
        assert self.place is not None
        return self.place(weight, (None,) * weight.ndim)

    def prepared(self, x: Float[Array, "B T *_"]) -> Float[Array, "B T *_"] | Input:
        """Quantizes x once for all projections that read it; returns it unchanged without fp8."""
        _, weight_dims, out_dims = self.spec.replace("->", ",").split(",")
        each = zip(weight_dims, self._multiplied_dims, strict=True)
        contracted = tuple(dim for letter, dim in each if letter not in out_dims)
        return self.multiply.prepared(x, recipe=self.recipe, dims=contracted)

    @property
    def factor(self) -> Factor | None:
        """Weight, record and dims of an 8-bit matmul; None with an adapter, a bias or no fp8."""
        weight = self._multiplied
        is_alone = self.recipe.fp8 is not None and self.adapter is None and self.bias is None
        if not is_alone or not is_plain(weight):
            return None
        return Factor(weight, self._record, self._multiplied_dims, self._named)

    def _named(self, y: Float[Array, "B T *_"]) -> Float[Array, "B T *_"]:
        return labelled(checkpoint_name(y, self.name), self.label)

    @property
    def _multiplied_dims(self) -> Dims:
        """Logical dims of ``_multiplied``: of one that was placed those that it still has."""
        if self.place is None:
            return self.dims
        copied = range(len(self.dims))[self.copied_axis] if self.copies > 1 else None
        return tuple(dim if at == copied else None for at, dim in enumerate(self.dims))

    @property
    def _record(self) -> jax.Array | None:
        return None if self.quantization is None else self.quantization[...]

    def _repeated(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return x if self.copies == 1 else jnp.repeat(x, self.copies, axis=self.copied_axis)

    @property
    def _multiplied(self) -> AnyWeight:
        """The weight as devices multiply with it."""
        if self.copies == 1:
            return self._used
        return copied(self._used, self.copies, axis=self.copied_axis, of_array=self._copied)

    def _copied(self, weight: jax.Array) -> jax.Array:
        weight = self._repeated(weight)
        if self.place is None:
            return weight
        return self.place(weight, self._multiplied_dims)

    def __call__(
        self,
        x: Float[Array, "B T *_"] | Input | Deferred,
        *,
        residual: Float[Array, "B T *_"] | None = None,
    ) -> Float[Array, "B T *_"]:
        """Applies the linear map to x; the result is in the compute dtype.

        Args:
            residual: array that the result is added to.
        """
        is_fused = isinstance(x, Deferred) or residual is not None
        if is_fused and (self.adapter is not None or self.bias is not None):
            y = self(x.value() if isinstance(x, Deferred) else x)
            return y if residual is None else residual + y
        y = self.multiply(
            self.spec,
            x,
            self._multiplied,
            recipe=self.recipe,
            record=self._record,
            dims=self._multiplied_dims,
            residual=residual,
        )
        if is_fused:
            return y
        assert not isinstance(x, Deferred)
        return self._finished(x, y)

    @property
    def stream_factor(self) -> StreamFactor | None:
        """Weight for a product that gathers the stream itself; None if it has to be gathered."""
        factor = self.multiply.stream_factor(
            self.spec, self._multiplied, self._multiplied_dims, recipe=self.recipe
        )
        stream = self.multiply.stream
        if factor is None or stream is None or not stream.gathers(self.spec, factor.dims):
            return None
        return factor

    def _finished(self, x: jax.Array | Input, y: jax.Array) -> jax.Array:
        """Adds the adapter's output and the bias to a product of x, and names it."""
        if self.adapter is not None:
            x = x.x if isinstance(x, Input) else x
            weight = self.weight.get_value()
            y = self.adapter.adapted(y, x, weight, repeated=self._repeated)
        if self.bias is not None:
            # Added in accum, so that autodiff sums the bias's gradient over positions there too.
            dtype = y.dtype
            bias = self._repeated(self.policy.to_accum(self.bias[...]))
            bias = jnp.expand_dims(bias, range(y.ndim - bias.ndim))
            y = self.policy.to_accum(y) + bias
            y = self.policy.to_compute(y) if self.policy.is_exact else y.astype(dtype)
        return self._named(y)


def projected(
    x: Float[Array, "B T D"] | Input, layers: Sequence[Projection]
) -> list[Float[Array, "B T *_"]]:
    """Applies projections that read one input, quantized or gathered once for all of them.

    Args:
        layers: projections of one recipe.
    """
    first, stream = layers[0], layers[0].multiply.stream
    if stream is None or isinstance(x, Input):
        given = x if isinstance(x, Input) else first.prepared(x)
        return [layer(given) for layer in layers]
    factors = [layer.stream_factor for layer in layers]
    taken = [factor for factor in factors if factor is not None]
    if len(taken) < len(layers):
        whole_BTD = stream.whole(x)
        return [layer(whole_BTD) for layer in layers]
    ys = stream.gather(x, taken, recipe=first.recipe)
    return [layer._finished(x, y) for layer, y in zip(layers, ys, strict=True)]


def from_heads(
    num_heads: int,
    width: int,
    model_dim: int,
    *,
    bias: bool = False,
    std: float,
    execution: Execution,
    rngs: nnx.Rngs,
) -> Projection:
    """Makes a mixer's output projection, from vectors of heads to the model's width."""
    return Projection(
        "BTNH,NHD->BTD",
        shape=(num_heads, width, model_dim),
        dims=(axes.Q_HEADS, axes.HEAD, axes.EMBED),
        bias_rank=1 if bias else 0,
        std=std,
        execution=execution,
        rngs=rngs,
    )


def unpacked(
    x: Float[Array, "..."], ends: Sequence[int], shards: int, *, axis: int
) -> list[Float[Array, "..."]]:
    """Splits the result of a packed projection into those of its parts.

    Args:
        ends: indices of one shard at which its parts end, but for the last.
        shards: number of devices that shard ``axis``; each has its columns of every part.
    """
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    parts = jnp.split(x.reshape(*before, shards, -1, *after), ends, axis=axis + 1)
    return [part.reshape(*before, -1, *after) for part in parts]
