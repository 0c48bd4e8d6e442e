"""Prediction of the memory of reinforcement learning: while it samples, and while it trains.

The engine holds weights and pages only while completions are sampled, and training's temporaries
live only in a step. So a device needs as much as the larger phase does, unless both run at once.
"""

import dataclasses
from typing import Any

import jax

from jaxinfra.config.finetune import BaseWeights
from jaxinfra.config.rl import EngineDevices
from jaxinfra.config.run import RunConfig
from jaxinfra.diagnostics.memory.report import MemoryReport, report_memory
from jaxinfra.diagnostics.memory.serving import (
    ServingCase,
    ServingMemory,
    fitted_case,
    serving_memory,
)
from jaxinfra.model.definition import Parameters, by_path, define_model, is_weight, merged
from jaxinfra.model.quantized_base import base_shapes
from jaxinfra.parallel.execution import execution_on
from jaxinfra.reinforcement.sampler import engine_options, engine_policy
from jaxinfra.serving.engine.fit import device_bytes
from jaxinfra.training.job import Job, lower_step, make_job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutMemory:
    """Bytes of one device that sampling and training need."""

    training: MemoryReport  # of a step
    engine: ServingMemory  # of its largest program
    pages: int
    kept_bytes: int  # of training's state, beside the engine, that the engine does not use
    frozen_bytes: int  # of a start model that is kept as the reference of rl.kl
    runs_at_once: bool  # sampling beside training, on the same devices

    @property
    def phases(self) -> dict[str, int]:
        """Bytes of each phase by its name."""
        sampling = self.engine.bytes + self.kept_bytes + self.frozen_bytes
        training = self.training.total_bytes + self.frozen_bytes
        return {"sampling": sampling, "training": training}

    @property
    def bytes(self) -> int:
        """Bytes per device that the run needs."""
        if self.runs_at_once:
            return self.phases["training"] + self.engine.bytes
        return max(self.phases.values())

    @property
    def report(self) -> MemoryReport:
        """The larger phase by role."""
        phases = self.phases
        is_sampling = phases["sampling"] > phases["training"]
        return self.engine.report if is_sampling else self.training

    def as_json(self) -> dict[str, Any]:
        """Returns the bytes of both phases as JSON values."""
        return {
            "total_bytes": self.bytes,
            "phases": self.phases,
            "pages": self.pages,
            "training": self.training.as_json(),
            "engine": self.engine.as_json(),
        }


def rollout_memory(config: RunConfig, *, limit_bytes: int | None) -> RolloutMemory:
    """Compiles a training step and the engine's largest programs of a run with ``rl``.

    A teacher's weights are not counted: they are known once it is loaded.

    Args:
        limit_bytes: bytes that JAX may allocate on a device, which the engine's pages follow; None
            for no limit, as on CPUs.

    Raises:
        DeviceMemoryError: one completion does not fit beside training's state.
    """
    rl = config.rl
    assert rl is not None
    job = make_job(config)
    case = sampling_case(config)
    is_own = rl.engine_devices is EngineDevices.OWN
    state = [*jax.tree.leaves(job.abstract_state()), *jax.tree.leaves(_frozen(job))]
    shared = 0 if is_own else _shared_bytes(case.abstract, job)
    kept = 0 if is_own else device_bytes(state) - shared
    frozen = device_bytes(jax.tree.leaves(job.abstract_state().tree))
    if rl.kl == 0.0 or config.lora is not None:
        frozen = 0
    case = fitted_case(case, limit_bytes=limit_bytes, others_bytes=kept + frozen)
    return RolloutMemory(
        training=report_memory(lower_step(job)),
        engine=serving_memory(case),
        pages=case.limits.num_pages,
        kept_bytes=kept,
        frozen_bytes=frozen,
        runs_at_once=rl.overlap and not is_own,
    )


def sampling_case(config: RunConfig) -> ServingCase:
    """Returns the engine that a run with ``rl`` samples with."""
    assert config.rl is not None
    policy, weights = engine_policy(config), None
    if config.lora is not None and config.lora.base is not BaseWeights.COMPUTE:
        execution = execution_on(policy=policy)
        base = base_shapes(define_model(config.model, execution), config.lora.base)
        weights = merged(define_model(config.model, execution, lora=config.lora).shapes, base)
    return ServingCase(
        model=config.model,
        policy=policy,
        engine=engine_options(config),
        mesh=config.rl.mesh_of_engine(config.mesh),
        is_unrolled=jax.default_backend() == "gpu" and config.lora is None,
        lora=config.lora,
        weights=weights,
        reads_weights=True,
    )


def _frozen(job: Job) -> Parameters:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        job.model.frozen,
        job.frozen_shardings,
    )


def _shared_bytes(engine: Parameters, job: Job) -> int:
    """Bytes of the arrays that training and the engine both read, and which are there once."""
    held = by_path(merged(_frozen(job), job.abstract_state().tree), is_leaf=is_weight)
    total = 0
    for path, leaf in by_path(engine, is_leaf=is_weight).items():
        mine = held.get(path)
        if mine is None or jax.tree.structure(mine) != jax.tree.structure(leaf):
            continue
        pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(leaf), strict=True)
        if all(
            (a.shape, a.dtype) == (b.shape, b.dtype)
            and a.sharding.is_equivalent_to(b.sharding, len(a.shape))
            for a, b in pairs
        ):
            total += device_bytes(jax.tree.leaves(leaf))
    return total
