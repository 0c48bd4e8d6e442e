"""``execution_on`` puts together a decoder's ``Execution``, for one device and for meshes."""

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation, ContextMethod, KeptValues, Remat
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.execution import Anywhere, DecodeForm, Execution, Kernels, Recomputation
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.ops.multiply import Multiply
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
    cache_format: CacheFormat = CacheFormat.PLAIN,
    decode_form: DecodeForm | None = None,
) -> Execution:
    """Builds a decoder's ``Execution`` for one device or a mesh.

    Args:
        placement: the mesh and its rules; None for one device, or for shapes without devices.
        policy: numeric formats.
        attention, context_method: attention's implementation, and its method over a context axis.
        keep_gathered: gather weights once for both passes.
        exchange: form and room of the experts' exchange; room for all by default.
        remat, kept: values that are kept for the backward pass.
        unroll: number of layers per loop body.
        cache_format: storage format of cached keys and values, or latents.
        decode_form: the serving form, which takes no gradient; None: the form of training.

    Raises:
        UnsupportedError: packed weights where heads are split between devices, or in 8 bits.
    """
    packed = decode_form is not None and decode_form.packed
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
    return Execution(
        policy=policy,
        recomputation=Recomputation(remat=remat, kept=kept, unroll=unroll),
        multiply=Multiply(devices=fp8_devices_on(placement), few_rows=serves_alone),
        kernels=Kernels(
            attend=attention_on(placement, implementation=attention, method=context_method),
            attend_latents=latents_on(placement, implementation=attention, method=context_method),
            decode=decode_on(placement),
            lookup=lookup_on(placement),
            cross_entropy=cross_entropy_on(placement),
            exchange=exchange_on(placement, exchange or ExchangeConfig()),
        ),
        place=Anywhere() if placement is None else placement.constraint(),
        gather=gather_on(placement, keep=keep_gathered, compute=policy.compute),
        cache_format=cache_format,
        decode_form=decode_form,
    )
