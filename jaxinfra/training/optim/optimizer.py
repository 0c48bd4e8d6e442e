"""The optimizer: clipping by global norm, then AdamW, Muon and others with decay on matrices only,
or a user's own.

Adam's moments may be stored in fewer bytes than they are computed in.
"""

import fnmatch
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxinfra.axes import Dims
from jaxinfra.config.optimizer import MomentFormat, OptimizerConfig, OptimizerKind
from jaxinfra.config.parts import find_part
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.numerics.storage import (
    empty_moment,
    empty_scale,
    exact,
    is_scaled,
    read_moment,
    stored_moment,
)
from jaxinfra.training.optim.adafactor import scale_by_adafactor
from jaxinfra.training.optim.learning_rate import learning_rate, standard_promotion
from jaxinfra.training.optim.muon import is_hidden_matrix, is_matrix, matrix_dims, orthogonalized

_SEED = 0  # of rounding


class StoredAdamState(NamedTuple):
    """Adam's moments in their stored dtypes. In a format with scales the second moment is stored
    as its square root, which needs half the exponent range.
    """

    count: jax.Array  # int32 []
    mu: Any
    nu: Any
    mu_scale: Any  # float32 per layer and expert; None if the format has no scales
    nu_scale: Any


def scale_by_stored_adam(config: OptimizerConfig, dims: Any) -> optax.GradientTransformation:
    """Builds ``optax.scale_by_adam`` with moments stored in ``config.first_moment`` and
    ``second_moment``.

    Updates are computed in float32; the moments are rounded when they are stored. FP8-LM (Peng et
    al. 2023) uses fp8 and fp16, DeepSeek-V3 (2024, section 3.3.2) bf16 for both moments. Each
    matrix of a stack has its own scale.

    Args:
        dims: tree of ``DimsLeaf`` that names each parameter's dims.
    """
    axes = [matrix_dims(leaf.dims) for leaf in jax.tree.leaves(dims)]
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    formats = config.first_moment, config.second_moment
    rooted = config.second_moment in (MomentFormat.FP16, MomentFormat.FP8)

    def init(params: Any) -> StoredAdamState:
        leaves, structure = jax.tree.flatten(params)
        # Of a stand-in for parameters, which has no leaves, the state is that stand-in.
        empty = [empty_scale(leaf, each) for leaf, each in zip(leaves, axes, strict=False)]
        (mu, mu_scale), (nu, nu_scale) = (
            (
                jax.tree.map(lambda p, f=each: empty_moment(p, f), params),
                structure.unflatten(empty) if is_scaled(each) else None,
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
        mu, mu_scale = _stored(after.mu, formats[0], mu_key, axes)
        nu = jax.tree.map(jnp.sqrt, after.nu) if rooted else after.nu
        nu, nu_scale = _stored(nu, formats[1], nu_key, axes)
        return updates, StoredAdamState(after.count, mu, nu, mu_scale, nu_scale)

    return optax.GradientTransformation(init, update)


def _stored(
    moments: Any, format_: MomentFormat, key: jax.Array, axes: list[tuple[int, ...]]
) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten(moments)
    keys = jax.random.split(key, max(1, len(leaves)))
    pairs = [
        stored_moment(leaf, format_, k, axes=each)
        for leaf, k, each in zip(leaves, keys, axes, strict=False)
    ]
    values, scales = zip(*pairs, strict=True)
    has_scales = all(scale is not None for scale in scales)
    return structure.unflatten(values), structure.unflatten(scales) if has_scales else None


def make_optimizer(
    config: OptimizerConfig, *, dims: Any, steps: int
) -> optax.GradientTransformation:
    """Builds the optimizer: AdamW (Loshchilov and Hutter 2019, algorithm 2) over fp32 parameters,
    Muon, Lion, Adafactor or a user's own.

    theta -= lr * (m_hat / (sqrt(v_hat) + epsilon) + weight_decay * theta), decay on matrices only.
    With Muon, ``orthogonalized`` replaces the quotient m_hat / (...) for hidden matrices. Lion and
    Adafactor replace it for all parameters; learning rate and decay apply alike.

    Frozen parameters have no state, and their updates are their gradients, which are 0.

    Args:
        dims: tree of ``DimsLeaf``: logical dims, from which follows which parameters are matrices.
        steps: number of steps of the run, for the schedule.

    Raises:
        ConfigError: a user's own function makes no transformation, or nothing is trained.
    """
    is_trained = trained_by(config, dims)
    if is_trained is not None:
        dims = jax.tree.map(lambda leaf, on: leaf if on else optax.MaskedNode(), dims, is_trained)
    before = [] if config.gradients is None else [_made(config.gradients, "gradients")]
    if config.clip_norm is not None:
        before.append(optax.clip_by_global_norm(config.clip_norm))
    rate = learning_rate(config, steps=steps)
    if config.function is not None:
        update = _made(config.function, "optimizer", rate)
    else:
        update = optax.chain(*_built_in(config, dims), optax.scale_by_learning_rate(rate))
    chain = optax.chain(*(before or [optax.identity()]), update)
    if is_trained is not None:
        chain = optax.masked(chain, is_trained)
    # Weights may be kept in fewer bits than moments and updates are computed in.
    return optax.GradientTransformationExtraArgs(
        lambda params: chain.init(exact(params)),
        standard_promotion(
            lambda updates, state, params=None, **extra: chain.update(
                exact(updates), state, exact(params), **extra
            )
        ),
    )


def trained_by(config: OptimizerConfig, dims: Any) -> Any:
    """Returns which parameters are trained, a tree of bools like ``dims``; None if all are.

    Raises:
        ConfigError: a pattern of ``config.frozen`` fits no parameter, or they fit all.
    """
    if not config.frozen:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(dims)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    for pattern in config.frozen:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"optimizer.frozen {pattern!r} fits no parameter{nearest(pattern, paths)}; "
                "jaxinfra memory lists them"
            )
    is_trained = [not any(fnmatch.fnmatchcase(p, each) for each in config.frozen) for p in paths]
    if not any(is_trained):
        raise ConfigError(
            f"optimizer.frozen={list(config.frozen)} fits every parameter, so nothing would be "
            "trained; leave one out"
        )
    return jax.tree.structure(dims).unflatten(is_trained)


def _made(name: str, what: str, *given: optax.Schedule) -> optax.GradientTransformation:
    """Calls a user's own function that makes a transformation."""
    made = find_part(name)(*given)
    if not (hasattr(made, "init") and hasattr(made, "update")):
        raise ConfigError(
            f"{what} {name} returns {type(made).__name__}; it makes an "
            "optax.GradientTransformation, such as optax.adamw(learning_rate)"
        )
    return made


def _built_in(config: OptimizerConfig, dims: Any) -> list[optax.GradientTransformation]:
    """The updates of a kind of optimizer with decay, before the learning rate."""
    updates = [
        *_scaled(config, dims),
        optax.add_decayed_weights(config.weight_decay, _where(is_matrix, dims)),
    ]
    if config.muon is not None:
        at_rate = optax.scale(config.muon.rate)
        updates.append(optax.masked(at_rate, _where(is_hidden_matrix, dims)))
    return updates


def _scaled(config: OptimizerConfig, dims: Any) -> list[optax.GradientTransformation]:
    """The updates of a kind of optimizer, before weight decay and learning rate."""
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    if config.muon is not None:
        others = _where(lambda dims: not is_hidden_matrix(dims), dims)
        return [orthogonalized(config.muon, dims), optax.masked(adam, others)]
    match config.kind:
        case OptimizerKind.LION:
            return [optax.scale_by_lion(b1=config.beta1, b2=config.beta2)]
        case OptimizerKind.ADAFACTOR:  # with the paper's constants
            return [scale_by_adafactor(dims)]
        case OptimizerKind.ADAMW:
            return [scale_by_stored_adam(config, dims) if config.keeps_short_moments else adam]


def _where(holds: Callable[[Dims], bool], dims: Any) -> Any:
    return jax.tree.map(lambda leaf: holds(leaf.dims), dims)
