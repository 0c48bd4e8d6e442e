"""Predicted step time of a run, from the planner."""

import functools

import jax

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.config.validate import may_keep_gathered
from jaxinfra.errors import JaxinfraError
from jaxinfra.planning.devices import NAMES, Device, find_device
from jaxinfra.planning.layout import BY_STRENGTH, UNROLLED, Layout, Traits
from jaxinfra.planning.model import PlannedModel, plan_model
from jaxinfra.planning.plan import Plan, make_plan


def step_price(config: RunConfig) -> float | None:
    """Predicts seconds per step of a config, on the GPUs here or, without any, on H200s.

    Returns None if the planner cannot describe the config's layout.
    """
    plan = step_plan(config)
    return None if plan is None else plan.time.total_s


def step_plan(config: RunConfig, device_kind: str | None = None) -> Plan | None:
    """Returns the plan of a config's step; None if the planner cannot describe its layout.

    Args:
        device_kind: such as "NVIDIA H200"; by default the GPUs here or, without any, H200s.
    """
    training = config.training
    if training.remat not in BY_STRENGTH:
        return None
    unrolled = training.unroll >= config.model.num_layers
    try:
        layout = Layout(
            length=training.sequence_length,
            batch=training.batch_size,
            mesh=config.mesh,
            zero=config.sharding.zero,
            chunks=config.pipeline.chunks if config.mesh.num_stages > 1 else 1,
            sequence_parallel=config.sharding.sequence_parallel,
            accumulation=training.accumulation,
            remat=training.remat,
            keep_gathered=config.sharding.keep_gathered if may_keep_gathered(config) else False,
            traits=UNROLLED if unrolled else Traits(),
        )
        return make_plan(_planned(config.model), layout, _device(device_kind))
    except JaxinfraError:
        return None


@functools.cache
def _planned(model: ModelConfig) -> PlannedModel:
    return plan_model(model)


def _device(kind: str | None) -> Device:
    kind = (kind or jax.local_devices()[0].device_kind).lower()
    return find_device(next((name for name in NAMES if name in kind), "h200"))
