"""The one place where a decoder's ports are put together: for jobs, serving, benches and tests."""

import functools

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation, ContextMethod, KeptValues, Remat
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.execution import Anywhere, Execution
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.ops.append_heads import append_packed_heads
from jaxinfra.ops.decode_layers import decode_layers
from jaxinfra.ops.few_rows import fused_few_rows, multiply_few_rows, swiglu_few_rows
from jaxinfra.ops.fp8_swiglu import swiglu_input
from jaxinfra.ops.multiply import multiply, prepared
from jaxinfra.parallel.attend import attention_on, decode_on, latents_on
from jaxinfra.parallel.exchange import exchange_on
from jaxinfra.parallel.fp8 import fp8_devices_on
from jaxinfra.parallel.gather import gather_on
from jaxinfra.parallel.lookup import lookup_on
from jaxinfra.parallel.loss import cross_entropy_on
from jaxinfra.parallel.place import Placement


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
    packed: bool = False,
    cache_format: CacheFormat = CacheFormat.PLAIN,
    whole_layers: bool | None = False,
) -> Execution:
    """How a decoder runs on this mesh.

    Args:
        placement: None: wherever the arrays are, which is for one device and for shapes alone.
        policy: numeric formats.
        attention, context_method: implementation, and form over the context axis.
        keep_gathered: gather weights once for both passes.
        exchange: form and room of the experts' exchange; room for all by default.
        remat, kept: what is kept for the backward pass.
        unroll: layers in one body of their loop.
        packed: projections of one input are one weight: for serving, which takes no gradient.
        cache_format: of keys and values, or latents, in a cache.
        whole_layers: on a Hopper GPU, all layers of a decode step of one row are one launch; None:
            where the kernel can, and on GPUs on which it was measured to be faster.

    Raises:
        UnsupportedError: packed weights where heads are split between devices, or in 8 bits; whole
            layers without packed weights, or on several devices.
    """
    if packed and any(recipe.fp8 is not None for _, recipe in policy.sites):
        raise UnsupportedError(
            "packed projections in 8 bits: their scales are those of projections apart; leave "
            "packed=False, or serve in the policy's 16 bits"
        )
    if packed and placement is not None and placement.head_shards > 1:
        raise UnsupportedError(
            f"packed projections over {placement.head_shards} devices: a device's part of the "
            "packed heads is not its part of queries, keys and values; leave packed=False"
        )
    # Kernels are custom calls, which the compiler cannot split.
    serves_alone = packed and (placement is None or placement.mesh.size == 1)
    if whole_layers and not serves_alone:
        raise UnsupportedError(
            "whole layers where weights are not packed, or on several devices: the kernel reads "
            "packed weights of one device; leave whole_layers=False"
        )
    devices = fp8_devices_on(placement)
    multiply_anywhere = functools.partial(multiply, devices=devices)
    return Execution(
        policy=policy,
        multiply=multiply_few_rows if serves_alone else multiply_anywhere,
        swiglu=swiglu_few_rows if serves_alone else None,
        swiglu_input=functools.partial(swiglu_input, devices=devices),
        fused=fused_few_rows if serves_alone else None,
        append=append_packed_heads if serves_alone else None,
        decode_layers=(
            functools.partial(decode_layers, is_named=bool(whole_layers))
            if serves_alone and whole_layers is not False
            else None
        ),
        prepare=functools.partial(prepared, devices=devices),
        attend=attention_on(placement, implementation=attention, method=context_method),
        attend_latents=latents_on(placement, implementation=attention, method=context_method),
        decode=decode_on(placement),
        lookup=lookup_on(placement),
        cross_entropy=cross_entropy_on(placement),
        exchange=exchange_on(placement, exchange or ExchangeConfig()),
        place=Anywhere() if placement is None else placement.constraint(),
        gather=gather_on(placement, keep=keep_gathered, compute=policy.compute),
        remat=remat,
        kept=kept,
        unroll=unroll,
        packed=packed,
        cache_format=cache_format,
    )
