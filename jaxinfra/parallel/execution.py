"""``execution_on`` builds a decoder's ``Execution``, for one device and for meshes."""

import functools

from jaxinfra.axes import MeshAxis
from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation, ContextMethod, KeptValues, Remat
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.execution import (
    DecodeForm,
    Execution,
    Kernels,
    Place,
    Recomputation,
    take_rows,
    within_device,
)
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.attention import attention as self_attention
from jaxinfra.ops.cached_attention import cached_attention
from jaxinfra.ops.decode_layers import decode_layers
from jaxinfra.ops.exact_attention import exact_attention, exact_cached_attention
from jaxinfra.ops.exact_product import are_kernels
from jaxinfra.ops.linear_attention import (
    linear_attention,
    linear_attention_in_slots,
    short_convolution,
    short_convolutions_in_slots,
)
from jaxinfra.ops.multiply import Multiply
from jaxinfra.parallel.attend import ShardedAttention, ShardedDecode, ShardedDecodeLayers
from jaxinfra.parallel.context.methods import ContextAttention, ContextLatentAttention
from jaxinfra.parallel.context.states import ContextRecurrence
from jaxinfra.parallel.exact import ordered_product
from jaxinfra.parallel.exchange import ShardedExchange
from jaxinfra.parallel.fp8 import fp8_devices_on
from jaxinfra.parallel.gather import WeightAllGather
from jaxinfra.parallel.lookup import ShardedLookup
from jaxinfra.parallel.loss import TokenLoss
from jaxinfra.parallel.place import Placement
from jaxinfra.parallel.recur import ShardedRecurrence
from jaxinfra.parallel.stream import stream_products


def execution_on(
    placement: Placement | None = None,
    *,
    policy: Policy = POLICIES[PolicyName.FP32],
    attention: AttentionImplementation = AttentionImplementation.AUTO,
    context_method: ContextMethod = ContextMethod.AUTO,
    keep_gathered: bool = False,
    exchange: ExchangeConfig | None = None,
    remat: Remat = Remat.NONE,
    kept: tuple[KeptValues, ...] = (),
    unroll: int = 1,
    cache_format: CacheFormat = CacheFormat.PLAIN,
    decode_form: DecodeForm | None = None,
) -> Execution:
    """Builds a decoder's ``Execution`` for one device or a mesh.

    Args:
        placement: the mesh and its rules; None for one device, or for shapes without devices.
        policy, cache_format: numeric formats; storage format of cached keys and values, or latents.
        attention, context_method: attention's implementation, and its method over a context axis.
        keep_gathered: whether to keep all-gathered weights from forward to backward pass.
        exchange: form and buffer sizes of the experts' exchange; by default no token is dropped.
        remat, kept: recomputation policy, and the values that ``remat=chosen`` keeps.
        unroll: number of layers per loop body.
        decode_form: settings for serving, without gradients; None: the decoder for training.

    Raises:
        UnsupportedError: packed weights with 8-bit matmuls or exact numerics.
    """
    packed = decode_form is not None and decode_form.packed
    if packed:
        _check_packed(policy)
    # Kernels are custom calls, which the compiler cannot split.
    serves_alone = packed and (placement is None or placement.mesh.size == 1)
    gather = None
    if keep_gathered and placement is not None:
        gather = WeightAllGather(placement=placement, compute=policy.compute)
    # Products in 8 bits gather the stream as codes, and not within kernels.
    is_plain = not policy.is_exact and policy.recipe(Site.PROJECTION).fp8 is None
    return Execution(
        policy=policy,
        recomputation=Recomputation(remat=remat, kept=kept, unroll=unroll),
        multiply=Multiply(
            devices=fp8_devices_on(placement),
            few_rows=serves_alone and not policy.is_exact,
            ordered=ordered_product(placement) if policy.is_exact else None,
            stream=stream_products(placement) if is_plain else None,
        ),
        kernels=kernels_on(
            placement,
            attention=attention,
            context_method=context_method,
            exchange=exchange,
            is_exact=policy.is_exact,
        ),
        place=Place() if placement is None else placement.constraint(),
        gather=gather,
        cache_format=cache_format,
        decode_form=decode_form,
    )


def _check_packed(policy: Policy) -> None:
    """Raises UnsupportedError if projections of one input cannot be one product."""
    if policy.is_exact and not are_kernels():
        raise UnsupportedError(
            "packed projections with numerics=exact: a product's order of sums is that of its own "
            "columns; leave packed=False"
        )
    if any(recipe.fp8 is not None for _, recipe in policy.sites):
        raise UnsupportedError(
            "packed projections in 8 bits: their scales are those of projections apart; leave "
            "packed=False, or serve in the policy's 16 bits"
        )


def kernels_on(
    placement: Placement | None,
    *,
    attention: AttentionImplementation = AttentionImplementation.AUTO,
    context_method: ContextMethod = ContextMethod.AUTO,
    exchange: ExchangeConfig | None = None,
    is_exact: bool = False,
) -> Kernels:
    """Returns the functions of one device, or their sharded forms on a mesh of several devices."""
    attend = functools.partial(self_attention, implementation=attention)
    decode = cached_attention
    if is_exact:
        attend, decode = exact_attention, exact_cached_attention
    if placement is None or placement.mesh.size == 1:
        return Kernels(
            attend=attend,
            attend_latents=None,
            decode=decode,
            # That kernel sums in an order of its own.
            decode_layers=None if is_exact else decode_layers,
            recur=linear_attention,
            recur_in_slots=linear_attention_in_slots,
            convolve=short_convolution,
            convolve_in_slots=None if is_exact else short_convolutions_in_slots,
            lookup=take_rows,
            cross_entropy=TokenLoss(placement=placement),
            exchange=within_device,
        )
    attend, latents = ShardedAttention(placement=placement, attend=attend), None
    recur, convolve = (whole := ShardedRecurrence(placement=placement)), short_convolution
    if placement.mesh.shape[MeshAxis.CONTEXT] > 1:
        attend, latents = (
            kind(placement=placement, method=context_method, implementation=attention)
            for kind in (ContextAttention, ContextLatentAttention)
        )
        recur = ContextRecurrence(placement=placement)
        convolve = recur.convolve
    return Kernels(
        attend=attend,
        attend_latents=latents,
        decode=ShardedDecode(placement=placement, decode=decode),
        decode_layers=None if is_exact else ShardedDecodeLayers(placement=placement),
        recur=recur,
        recur_in_slots=whole.in_slots,
        convolve=convolve,
        convolve_in_slots=None,
        lookup=ShardedLookup(placement=placement),
        cross_entropy=TokenLoss(placement=placement),
        exchange=ShardedExchange(placement=placement, config=exchange or ExchangeConfig()),
    )
