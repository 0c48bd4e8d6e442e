"""Learning-rate schedules: warm-up, then the configured shape, as a function of the step."""

import functools
from collections.abc import Callable

import jax
import optax

from jaxinfra.config.optimizer import LearningRateSchedule, OptimizerConfig
from jaxinfra.config.parts import find_part


def learning_rate(config: OptimizerConfig, *, steps: int) -> optax.Schedule:
    """Returns the schedule: it rises linearly from peak/warmup to the peak, then decays to
    ``final_fraction`` of it. If the config names a user's schedule, that one is returned.

    Args:
        steps: number of steps of the run, at which the decay ends.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    if config.schedule_function is not None:
        own = find_part(config.schedule_function)
        return standard_promotion(functools.partial(own, steps=steps, peak=peak))
    # Counted from step 0, a rise from 0 would waste the first step.
    warmup = optax.linear_schedule(
        peak / max(config.warmup_steps, 1), peak, max(config.warmup_steps - 1, 1)
    )
    rest = max(steps - config.warmup_steps, 1)
    match config.schedule:
        case LearningRateSchedule.CONSTANT:
            after = optax.constant_schedule(peak)
        case LearningRateSchedule.LINEAR:
            after = optax.linear_schedule(peak, final, rest)
        case LearningRateSchedule.COSINE:
            after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
        case LearningRateSchedule.WSD:
            decay = min(config.decay_steps or max(steps // 5, 1), rest)
            after = optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, final, decay)],
                [rest - decay],
            )
    if config.warmup_steps > 0:
        after = optax.join_schedules([warmup, after], [config.warmup_steps])
    return standard_promotion(after)


def standard_promotion[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Runs ``function`` under JAX's standard dtype promotion, whatever its caller has set.

    Optax computes ``float ** count`` with an int32 count, which strict promotion refuses.
    """

    @functools.wraps(function)
    def promoting(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoting
