"""Which inputs of a block's projections can be scaled, and what then is divided.

A group of projections reads one input, and what makes that input is linear in it: the scale of a
norm, or the columns of another projection.
"""

import dataclasses

import jax

from jaxinfra.config.model import BlockConfig, GroupedAttentionConfig, MlpConfig
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.numerics.storage import EXACT
from jaxinfra.serving.quantize.recipes import Method


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledInput:
    """Projections of one input, and what makes it, as paths in a block."""

    readers: tuple[str, ...]
    norm: str | None = None  # None: ``columns`` makes it
    columns: str | None = None


def scaled_inputs(block: BlockConfig, method: Method) -> tuple[ScaledInput, ...]:
    """The groups of a block, in the order in which they are scaled.

    SmoothQuant scales what norms make; AWQ also what one projection makes for the next.

    Raises:
        UnsupportedError: a layer whose projections are not known to be linear in one another.
    """
    if method is Method.PLAIN:
        return ()
    mixer, feed = block.mixer, block.feed_forward
    if not isinstance(mixer, GroupedAttentionConfig) or not isinstance(feed, MlpConfig):
        kinds = f"{type(mixer).__name__} and {type(feed).__name__}"
        raise UnsupportedError(
            f"recipes that scale inputs ({method}) with layers {kinds}: they know grouped "
            "attention and a dense feed-forward layer; choose rtn-int4, int8, fp8 or fp8-blocks"
        )
    inward = ("mlp/gate", "mlp/up") if feed.kind.gated else ("mlp/up",)
    found = [
        ScaledInput(
            readers=("attention/query", "attention/key", "attention/value"), norm="attention_norm"
        ),
        ScaledInput(readers=inward, norm="mlp_norm"),
    ]
    if method is Method.AWQ:
        if mixer.num_q_heads == mixer.num_kv_heads:
            found.append(ScaledInput(readers=("attention/out",), columns="attention/value"))
        if feed.kind.gated:
            found.append(ScaledInput(readers=("mlp/down",), columns="mlp/up"))
    return tuple(found)


def divided_norm(
    parameters: dict[str, jax.Array], norm: str, scales_K: jax.Array, *, offset: float
) -> dict[str, jax.Array]:
    """The norm's parameters, by path, so that what it makes is divided by the scales."""
    scale = parameters[f"{norm}/scale"]
    changed = {f"{norm}/scale": ((scale.astype(EXACT) + offset) / scales_K - offset)}
    if f"{norm}/bias" in parameters:
        changed[f"{norm}/bias"] = parameters[f"{norm}/bias"].astype(EXACT) / scales_K
    return changed


def divided_columns(
    parameters: dict[str, jax.Array], columns: str, scales_K: jax.Array
) -> dict[str, jax.Array]:
    """A projection's parameters, by path, so that its outputs are divided by the scales."""
    weight = parameters[f"{columns}/weight"]
    outputs = scales_K.reshape(weight.shape[1:])
    changed = {f"{columns}/weight": weight / outputs[None]}
    if f"{columns}/bias" in parameters:
        changed[f"{columns}/bias"] = parameters[f"{columns}/bias"] / outputs
    return changed
