"""Scaling of a block's weights by input channel, and of the layers before them by the inverse.

Several projections may read one input. That input is linear in the scale of a norm, or in the
columns of another projection. If the input is scaled, the weights of all its readers must be
scaled, including those that stay in 16 bits: the router reads the same input as the experts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfra.config.kinds import Branches, MlpKind, NormPlacement
from jaxinfra.config.model import (
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MlpConfig,
)
from jaxinfra.errors import UnsupportedError
from jaxinfra.numerics.storage import EXACT
from jaxinfra.quantize.recipes import Method


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledInput:
    """A group of weights with one common input, and the norm or projection that produces it."""

    readers: tuple[str, ...]
    kept: tuple[str, ...] = ()  # readers that stay in 16 bits
    norm: str | None = None  # norm that produces the input; None: ``columns`` does
    offset: float = 0.0  # constant that the norm adds to its scale
    columns: str | None = None  # projection whose output columns are the input
    first: int = 0  # first of these columns, along the last dim; earlier ones make another array
    by_expert: bool = False  # whether each expert has its own input and scales

    @property
    def input(self) -> str:
        """Path of one weight in the group that reads the common input of all tokens."""
        return (*self.kept, *self.readers)[0]


def scaled_inputs(block: BlockConfig, method: Method) -> tuple[ScaledInput, ...]:
    """Lists a block's groups of weights with a common input, in the order of their scaling.

    SmoothQuant scales outputs of norms; AWQ also scales outputs of a projection before another.

    Raises:
        UnsupportedError: a layer kind whose scaling is not implemented.
    """
    if method is Method.PLAIN:
        return ()
    mixer, feed = block.mixer, block.feed_forward
    is_before = block.norm_placement is not NormPlacement.POST and block.norm.scale
    if not is_before or block.branches is Branches.SHARED_NORM:
        raise UnsupportedError(
            f"recipes that scale inputs ({method}) with norm_placement={block.norm_placement}, "
            f"branches={block.branches}: every layer needs a norm with a scale of its own before "
            "it; choose rtn-int4, int8, fp8 or fp8-blocks"
        )
    match mixer:
        case GroupedAttentionConfig():
            found = _of_grouped(mixer, block.norm.scale_offset)
        case LatentAttentionConfig():
            found = _of_latent(mixer, block.norm.scale_offset)
        case _:
            raise _unknown(mixer, method)
    match feed:
        case MlpConfig():
            found += _of_dense(feed, block.norm.scale_offset)
        case ExpertsConfig():
            found += _of_experts(feed, block.norm.scale_offset)
        case None:
            pass
        case _:
            raise _unknown(feed, method)
    return tuple(each for each in found if each.norm is not None or method is Method.AWQ)


def _unknown(layer: object, method: Method) -> UnsupportedError:
    return UnsupportedError(
        f"recipes that scale inputs ({method}) with a layer {type(layer).__name__}: they know "
        "grouped and latent attention, dense feed-forward layers and experts; choose rtn-int4, "
        "int8, fp8 or fp8-blocks"
    )


def _weights(layer: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{layer}/{name}/weight" for name in names)


def _of_grouped(mixer: GroupedAttentionConfig, offset: float) -> list[ScaledInput]:
    gate = ("out_gate",) if mixer.out_gate else ()
    values = () if mixer.values_are_keys else ("value",)
    readers = _weights("attention", "query", "key", *values, *gate)
    found = [ScaledInput(readers=readers, norm="attention_norm", offset=offset)]
    is_linear = mixer.qkv_clip is None and mixer.value_norm is None and values
    if mixer.num_q_heads == mixer.num_kv_heads and is_linear:
        (out,), (value,) = _weights("attention", "out"), _weights("attention", "value")
        found.append(ScaledInput(readers=(out,), columns=value))
    return found


def _of_latent(mixer: LatentAttentionConfig, offset: float) -> list[ScaledInput]:
    query = "query" if mixer.query_rank is None else "query_down"
    readers, of_x, of_query = _weights("attention", query, "kv_down"), (), ()
    if mixer.indexer is not None:
        of_x = _weights("attention/indexer", "key", "head_weight")
        of_query = _weights("attention/indexer", "query")
    found = [ScaledInput(readers=readers, kept=of_x, norm="attention_norm", offset=offset)]
    inner = mixer.norm.scale_offset
    if mixer.query_rank is not None:
        readers, norm = _weights("attention", "query_up"), "attention/query_norm"
        found.append(ScaledInput(readers=readers, kept=of_query, norm=norm, offset=inner))
    (up,), (out,) = _weights("attention", "kv_up"), _weights("attention", "out")
    found.append(ScaledInput(readers=(up,), norm="attention/kv_norm", offset=inner))
    # Values of every head come from columns of their own, behind those of its keys.
    found.append(ScaledInput(readers=(out,), columns=up, first=mixer.nope_dim))
    return found


def _of_dense(feed: MlpConfig, offset: float) -> list[ScaledInput]:
    (up,), (down,) = _weights("mlp", "up"), _weights("mlp", "down")
    gate = _weights("mlp", "gate") if feed.kind.gated else ()
    found = [ScaledInput(readers=(*gate, up), norm="mlp_norm", offset=offset)]
    if _is_linear_in_up(feed.kind):
        found.append(ScaledInput(readers=(down,), columns=up))
    return found


def _of_experts(feed: ExpertsConfig, offset: float) -> list[ScaledInput]:
    gated, is_linear = feed.kind.gated, _is_linear_in_up(feed.kind)
    readers = ("mlp/gate", "mlp/up") if gated else ("mlp/up",)
    after = [ScaledInput(readers=("mlp/down",), columns="mlp/up", by_expert=True)]
    if feed.shared_hidden_dim:
        shared = ("shared_gate", "shared_up") if gated else ("shared_up",)
        readers += _weights("mlp", *shared)
        (up,), (down,) = _weights("mlp", "shared_up"), _weights("mlp", "shared_down")
        after.append(ScaledInput(readers=(down,), columns=up))
    kept = _weights("mlp", "router", *(("shared_scale",) if feed.shared_gate else ()))
    one = ScaledInput(readers=readers, kept=kept, norm="mlp_norm", offset=offset)
    return [one, *(after if is_linear else [])]


def _is_linear_in_up(kind: MlpKind) -> bool:
    """Tells whether the hidden layer is linear in ``up``; clamped gates are not."""
    return kind.gated and kind is not MlpKind.SWIGLU_CLAMPED


def divided_norm(
    parameters: dict[str, jax.Array], group: ScaledInput, scales_K: jax.Array
) -> dict[str, jax.Array]:
    """Returns parameters of the norm before a group, by path, divided by the group's scales."""
    scale, offset = f"{group.norm}/scale", group.offset
    changed = {scale: (parameters[scale].astype(EXACT) + offset) / scales_K - offset}
    bias = f"{group.norm}/bias"
    if bias in parameters:
        changed[bias] = parameters[bias].astype(EXACT) / scales_K
    return changed


def divided_columns(
    parameters: dict[str, jax.Array], group: ScaledInput, scales: jax.Array
) -> dict[str, jax.Array]:
    """Returns the parameters of ``group.columns``, by path, with output channels divided by scales.

    The scales are [K], or [E, K] for experts.
    """
    assert group.columns is not None
    weight = parameters[group.columns]
    if group.by_expert:
        by_output, factor = scales, scales[:, None]
    else:
        outputs = weight.shape[1:]
        by_output = jnp.ones(outputs, EXACT)
        by_output = by_output.at[..., group.first :].set(scales.reshape(*outputs[:-1], -1))
        factor = by_output[None]
    changed = {group.columns: weight / factor}
    stem = group.columns.removesuffix("/weight")
    bias = f"{stem}/bias" if stem != group.columns else f"{stem}_bias"
    if bias in parameters:
        changed[bias] = parameters[bias] / by_output
    return changed
