"""Adam whose moments are kept in fewer bytes than they are computed in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfra.config.optimizer import MomentFormat, OptimizerConfig
from jaxinfra.numerics.storage import empty_moment, empty_scales, read_moment, stored_moment

_SEED = 0  # of rounding


class StoredAdamState(NamedTuple):
    """Moments as they are kept. Of the second one, where it has a scale, it is the square root:
    half the range of exponents.
    """

    count: jax.Array  # int32 []
    mu: Any
    nu: Any
    mu_scale: Any  # float32 [] of each moment; None where the format has none
    nu_scale: Any


def scale_by_stored_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """``optax.scale_by_adam`` over moments in ``config.first_moment`` and ``second_moment``.

    Updates are computed in float32 from what is kept, then it is rounded: FP8-LM (Peng et al. 2023)
    with fp8 and fp16, DeepSeek-V3 (2024, section 3.3.2) with bf16 in both.
    """
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    formats = config.first_moment, config.second_moment
    rooted = config.second_moment in (MomentFormat.FP16, MomentFormat.FP8)

    def init(params: Any) -> StoredAdamState:
        (mu, mu_scale), (nu, nu_scale) = (
            (
                jax.tree.map(lambda p, f=each: empty_moment(p, f), params),
                empty_scales(params, each),
            )
            for each in formats
        )
        return StoredAdamState(jnp.zeros((), jnp.int32), mu, nu, mu_scale, nu_scale)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def read(values: Any, scales: Any) -> Any:
            leaves, structure = jax.tree.flatten(values)
            each = [None] * len(leaves) if scales is None else structure.flatten_up_to(scales)
            return structure.unflatten(map(read_moment, leaves, each))

        nu = read(state.nu, state.nu_scale)
        if rooted:
            nu = jax.tree.map(jnp.square, nu)
        before = optax.ScaleByAdamState(state.count, read(state.mu, state.mu_scale), nu)
        updates, found = adam.update(updates, before, params)
        after: Any = found  # optax types its states as any tree
        key = jax.random.fold_in(jax.random.key(_SEED), state.count)
        mu_key, nu_key = jax.random.split(key)
        mu, mu_scale = _stored(after.mu, formats[0], mu_key)
        nu = jax.tree.map(jnp.sqrt, after.nu) if rooted else after.nu
        nu, nu_scale = _stored(nu, formats[1], nu_key)
        return updates, StoredAdamState(after.count, mu, nu, mu_scale, nu_scale)

    return optax.GradientTransformation(init, update)


def _stored(moments: Any, format_: MomentFormat, key: jax.Array) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(moments)
    keys = jax.random.split(key, max(1, len(leaves)))
    pairs = [stored_moment(leaf, format_, k) for leaf, k in zip(leaves, keys, strict=False)]
    values, scales = zip(*pairs, strict=True)
    has_scales = all(scale is not None for scale in scales)
    return structure.unflatten(values), structure.unflatten(scales) if has_scales else None
