"""One transformer block.

Dims: B batch, T position, D model width.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfra import axes
from jaxinfra.config.kinds import Branches, NormPlacement
from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MlpConfig,
)
from jaxinfra.config.own import OwnLayer
from jaxinfra.config.recurrent import (
    GatedDeltaConfig,
    NoMixer,
    SelectiveScanConfig,
    ShortConvolutionConfig,
    StateSpaceConfig,
)
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.attention_beside_state import AttentionBesideState
from jaxinfra.model.dropout import dropout
from jaxinfra.model.execution import Execution
from jaxinfra.model.experts import Experts
from jaxinfra.model.gated_delta import GatedDelta
from jaxinfra.model.grouped_attention import GroupedAttention
from jaxinfra.model.latent_attention import LatentAttention
from jaxinfra.model.layer_inputs import LayerInput
from jaxinfra.model.lora import Adapter
from jaxinfra.model.mlp import Mlp
from jaxinfra.model.norm import Norm
from jaxinfra.model.passes import Abilities, LayerOutput, Pass, joined, site_sums
from jaxinfra.model.projection import Projection
from jaxinfra.model.selective_scan import SelectiveScan
from jaxinfra.model.short_convolution import ShortConvolution
from jaxinfra.model.state_space import StateSpace
from jaxinfra.model.streams import StreamUpdate
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.multiply import Deferred

type _Layer = Callable[[jax.Array | Deferred, Pass], LayerOutput]
"""(x [B, T, D], what else it reads) -> x [B, T, D] in the compute dtype, and what else it gives."""

LAYERS: dict[type, Callable[..., Any]] = {
    GroupedAttentionConfig: GroupedAttention,
    LatentAttentionConfig: LatentAttention,
    AttentionBesideStateConfig: AttentionBesideState,
    GatedDeltaConfig: GatedDelta,
    StateSpaceConfig: StateSpace,
    SelectiveScanConfig: SelectiveScan,
    ShortConvolutionConfig: ShortConvolution,
    MlpConfig: Mlp,
    ExpertsConfig: Experts,
}
"""The layer of each kind of mixer and feed-forward config. All are built alike."""

_STREAM = (axes.BATCH, axes.STREAM_SEQUENCE, axes.STREAM)
_NORMED = (axes.BATCH, axes.SEQUENCE, axes.STREAM)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Branch:
    """One of a block's two layers, with the norms around it and what it reads beside x."""

    layer: _Layer
    abilities: Abilities
    norm: Norm | None
    post_norm: Norm | None
    given: Pass


class Block(nnx.Module):
    """Transformer block: x + mixer(norm(x)), then x + feed_forward(norm(x)), or one of the two.

    The config says where norms are, whether the two layers follow one another or read the same
    input, and by what their outputs are multiplied. In parameter paths the two layers are always
    called ``attention`` and ``mlp``. Results of projections, norms and activations are named by
    their paths, so that ``remat=chosen`` can keep them.

    Args:
        std, out_std: standard deviation of initial weights, out_std for output projections.
        dropout_rate: dropout rate of both residual branches, if there is a dropout key.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        model_dim: int,
        std: float,
        out_std: float,
        dropout_rate: float,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.execution = execution
        self.dropout_rate = dropout_rate
        build = functools.partial(
            Norm, config.norm, shape=(model_dim,), dims=(axes.EMBED,), execution=execution
        )
        is_before = config.norm_placement is not NormPlacement.POST
        is_behind = config.norm_placement is not NormPlacement.PRE
        is_shared = config.branches is Branches.SHARED_NORM

        def layer(config: Any) -> _Layer:
            sizes = {"model_dim": model_dim, "std": std, "out_std": out_std}
            built = config.layer if isinstance(config, OwnLayer) else LAYERS[type(config)]
            return built(config, **sizes, execution=execution, rngs=rngs)

        mixes, feeds = not isinstance(config.mixer, NoMixer), config.feed_forward is not None
        self.attention_norm = build() if is_before and mixes else None
        self.attention = layer(config.mixer) if mixes else None
        feeds_normed = isinstance(config.feed_forward, ExpertsConfig) and config.feed_forward.norms
        is_normed = is_before and feeds and not is_shared and not feeds_normed
        self.mlp_norm = build() if is_normed else None
        self.mlp = layer(config.feed_forward) if feeds else None
        self.attention_abilities = _abilities(config.mixer, self.attention)
        self.mlp_abilities = _abilities(config.feed_forward, self.mlp)
        self.attention_post_norm = build() if is_behind and mixes else None
        self.mlp_post_norm = build() if is_behind and feeds else None
        given = {"model_dim": model_dim, "std": std, "execution": execution, "rngs": rngs}
        self.layer_input = LayerInput(config, **given) if config.layer_input_dim else None
        self.streams = StreamUpdate(config, **given) if config.streams is not None else None
        ones = jnp.ones(1, execution.policy.param)
        self.stream_scale = nnx.Param(ones, axes=(None,)) if config.stream_scale else None
        labels = []
        for path, module in nnx.iter_modules(self):
            if isinstance(module, Norm | Projection | Mlp):
                module.label = ".".join(map(str, path))
                labels.append(module.label)
        self.labels = tuple(labels)

    def __call__(self, x_BTD: Float[Array, "B T D"], given: Pass) -> LayerOutput:
        """Computes the mixer and the feed-forward layer; drops out only if ``given`` has a key."""
        key = given.dropout_key
        keys = (None, None) if key is None else jax.random.split(key)
        if key is not None:
            self._drop_in_adapters(key)
        branches = {}
        if self.attention is not None:
            branches["attention"] = _Branch(
                layer=self.attention,
                abilities=self.attention_abilities,
                norm=self.attention_norm,
                post_norm=self.attention_post_norm,
                given=dataclasses.replace(given, dropout_key=keys[0]),
            )
        if self.mlp is not None:
            branches["mlp"] = _Branch(
                layer=self.mlp,
                abilities=self.mlp_abilities,
                norm=self.mlp_norm,
                post_norm=self.mlp_post_norm,
                given=dataclasses.replace(given, dropout_key=keys[1]),
            )
        if self.streams is not None:
            return self._of_streams(x_BTD, self.streams, given, **branches)
        if self.config.branches is not Branches.SEQUENTIAL:
            return self._side_by_side(x_BTD, **branches)
        outs: dict[str, LayerOutput] = {}
        for name, branch in branches.items():
            with jax.named_scope(name):
                outs[name], x_BTD = self._added(x_BTD, branch)
        return self._output(x_BTD, outs, given)

    def _of_streams(
        self,
        x_BTE: jax.Array,
        streams: StreamUpdate,
        given: Pass,
        attention: _Branch,
        mlp: _Branch,
    ) -> LayerOutput:
        """Computes both layers of the active stream, and updates all streams."""
        assert attention.norm is not None, "hf/gemma3n.py"
        policy, outs = self.execution.policy, {}
        predicted_BTSD = streams.predicted(x_BTE)
        x_BTD = policy.to_compute(predicted_BTSD[:, :, streams.config.active])
        with jax.named_scope("attention"):
            residual_BTD = streams.residual(attention.norm(x_BTD))
            outs["attention"], x_BTD = self._added(x_BTD, attention)
            x_BTD = policy.scaled(policy.added(x_BTD, residual_BTD), 2**-0.5)
        with jax.named_scope("mlp"):
            outs["mlp"], x_BTD = self._added(x_BTD, mlp)
        after_BTSD = streams.corrected(predicted_BTSD, x_BTD)
        if self.layer_input is not None:
            active_BTD = policy.to_compute(after_BTSD[:, :, streams.config.active])
            own_BTD = self.layer_input(streams.scaled(active_BTD), _own_input(given))
            after_BTSD = after_BTSD.at[:, :, 1:].add(policy.to_accum(own_BTD)[:, :, None])
        x_BTE = policy.to_compute(after_BTSD).reshape(x_BTE.shape)
        return self._output(self.execution.place(x_BTE, _STREAM), outs, given)

    def _side_by_side(self, x_BTD: jax.Array, attention: _Branch, mlp: _Branch) -> LayerOutput:
        """Computes both layers of x, by one norm or by two, and the sum of x and their outputs."""
        assert attention.norm is not None, "BlockConfig"
        with jax.named_scope("attention"):
            normed_BTD = attention.norm(x_BTD)
            inward_BTD = self._inward(normed_BTD, attention.abilities)
            mixed = attention.layer(inward_BTD, attention.given)
        with jax.named_scope("mlp"):
            if mlp.norm is not None:
                normed_BTD = mlp.norm(x_BTD)
            fed = mlp.layer(self._inward(normed_BTD, mlp.abilities), mlp.given)
            x_BTD = self._add(x_BTD, mixed.x, None, attention.given.dropout_key)
            x_BTD = self._add(x_BTD, fed.x, None, mlp.given.dropout_key)
        return self._output(x_BTD, {"attention": mixed, "mlp": fed}, attention.given)

    def _output(
        self, x_BTD: jax.Array, outs: Mapping[str, LayerOutput], given: Pass
    ) -> LayerOutput:
        if self.layer_input is not None and self.streams is None:
            with jax.named_scope("layer_input"):
                x_BTD = self._add(x_BTD, self.layer_input(x_BTD, _own_input(given)), None, None)
        if self.stream_scale is not None:
            accum = self.execution.policy.to_accum
            scale_111 = jnp.expand_dims(accum(self.stream_scale[...]), (0, 1))
            x_BTD = (accum(x_BTD) * scale_111).astype(x_BTD.dtype)
        sums = functools.reduce(joined, (out.sums for out in outs.values()))
        if self.execution.statistics:
            sites = {"stream": x_BTD} | {name: out.x for name, out in outs.items()}
            sums = joined(sums, site_sums(sites, policy=self.execution.policy))
        cache = outs["attention"].cache if "attention" in outs else given.cache
        return LayerOutput(x=x_BTD, cache=cache, sums=sums)

    def _drop_in_adapters(self, key: jax.Array) -> None:
        for path, module in nnx.iter_modules(self):
            if isinstance(module, Adapter) and module.dropout_rate:
                name = ".".join(map(str, path))
                module.drop = functools.partial(
                    dropout,
                    rate=module.dropout_rate,
                    key=jax.random.fold_in(key, zlib.crc32(name.encode())),
                    place=self.execution.place,
                )

    def _added(self, x_BTD: jax.Array, branch: _Branch) -> tuple[LayerOutput, jax.Array]:
        """Computes a layer's output for norm(x), and the sum of x and the output.

        Where nothing is between them, the layer's first product has the norm, its last one the sum.
        """
        given, key = branch.given, branch.given.dropout_key
        is_alone = not self.execution.statistics and branch.post_norm is None and key is None
        is_fused = branch.abilities.fuses and is_alone and self.config.residual_scale == 1.0
        norm = branch.norm
        deferred = norm.deferred(x_BTD) if is_fused and norm is not None else None
        if deferred is not None:
            out = branch.layer(deferred, dataclasses.replace(given, residual_BTD=x_BTD))
            return out, out.x
        normed_BTD = x_BTD if norm is None else norm(x_BTD)
        out = branch.layer(self._inward(normed_BTD, branch.abilities), given)
        return out, self._add(x_BTD, out.x, branch.post_norm, key)

    def _inward(self, x_BTD: jax.Array, abilities: Abilities) -> jax.Array:
        # One gather for all the projections that read it, where the stream is split by sequence;
        # of a layer that prepares its input, in 8 bits after that, or in its first product.
        is_quantized = self.execution.policy.recipe(Site.PROJECTION).fp8 is not None
        gathers = abilities.gathers and self.execution.multiply.stream is not None
        is_apart = gathers or (abilities.quantizes and is_quantized)
        return self.execution.place(x_BTD, _STREAM if is_apart else _NORMED)

    def _add(
        self, x_BTD: jax.Array, branch_BTD: jax.Array, norm: Norm | None, key: jax.Array | None
    ) -> jax.Array:
        policy = self.execution.policy
        branch_BTD = self.execution.place(branch_BTD, _STREAM)
        if norm is not None:
            branch_BTD = norm(branch_BTD)
        if self.config.residual_scale != 1.0:
            branch_BTD = policy.scaled(branch_BTD, self.config.residual_scale)
        branch_BTD = dropout(
            branch_BTD, rate=self.dropout_rate, key=key, place=self.execution.place
        )
        return self.execution.place(policy.added(x_BTD, branch_BTD), _STREAM)


def _own_input(given: Pass) -> jax.Array:
    if given.input_BTP is None:
        raise UnsupportedError(
            "layer_input_dim where layers run apart from the embedding, as in a pipeline: layers' "
            "inputs are not sent along; use fsdp and tensor"
        )
    return given.input_BTP


def _abilities(config: Any, layer: Any) -> Abilities:
    """Abilities that a layer declares; a user's own layer has none."""
    return Abilities() if layer is None or isinstance(config, OwnLayer) else layer.abilities
