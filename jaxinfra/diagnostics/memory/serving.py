"""Prediction of a serving engine's memory: pages, weights and programs, and what fits.

An engine's weights and pages are arguments of all its programs, so a device needs as much memory as
the program with the largest total. The candidates are compiled from shapes, without arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.diagnostics.memory.remedies import COUNT, Remedy, Trial, compiled_changes
from jaxinfra.diagnostics.memory.report import CACHES, MemoryReport, report_memory
from jaxinfra.errors import UnsupportedError
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged
from jaxinfra.model.empty_cache import check_states
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import (
    are_arrays,
    can_pack,
    serving_form,
    serving_parameters,
    with_read_weights,
)
from jaxinfra.numerics.policy import POLICIES, Policy
from jaxinfra.ops.quantized import QuantizedWeight
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.fit import fitted_limits
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.plan import SchedulerLimits
from jaxinfra.serving.engine.program_set import ProgramKey
from jaxinfra.serving.engine.runner import ModelRunner
from jaxinfra.serving.load import serving_placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServingCase:
    """A serving engine that might be built: its model, options, mesh and weight formats."""

    model: ModelConfig
    policy: Policy
    engine: EngineOptions
    cache: CacheFormat = CacheFormat.PLAIN
    mesh: MeshConfig = MeshConfig()
    num_ids: int | None = None  # ids that may be sampled; None: all
    is_unrolled: bool = False  # as on GPUs: layers unrolled, projections packed
    # Shapes or arrays of the loaded weights, which may be quantized. None: all weights in the
    # policy's dtype.
    weights: Parameters | None = None
    lora: LoraConfig | None = None  # adapters in the weights
    reads_weights: bool = False  # they are in the compute dtype, whatever the policy stores

    @property
    def limits(self) -> SchedulerLimits:
        """Number and size of the engine's KV cache pages, and the shapes of its steps."""
        shards = serving_placement(self.model, self.mesh).batch_shards
        return self.engine.limits(self.model, batch_shards=shards)

    @property
    def form(self) -> ModelDefinition:
        """The model definition as the engine runs it on its mesh, with packed weights on GPUs."""
        check_states(self.model, self.cache)
        placement = serving_placement(self.model, self.mesh)
        kept: dict[str, Any] = {"policy": self.policy, "cache_format": self.cache}
        execution = execution_on(placement, **kept)
        form = define_model(self.model, execution, lora=self.lora)
        if not self.is_unrolled:
            return form
        weights = form.shapes if self.weights is None else self.weights
        packed = can_pack(weights, self.model, execution.place)
        decode = DecodeForm(packed=packed, numbers=are_arrays(weights))
        how = execution_on(placement, **kept, decode_form=decode)
        return serving_form(form, how)

    def runner(self) -> ModelRunner:
        """The engine's programs for abstract arrays; raises ConfigError if none can be built."""
        form, drafts = self.form, self.engine.num_drafts
        return ModelRunner(
            form.bind(self.abstract),
            self.limits,
            num_ids=self.num_ids or self.model.vocab_size,
            verify_length=1 + drafts if drafts else None,
        )

    @property
    def abstract(self) -> Parameters:
        """Shapes and shardings of all weights as the engine holds them."""
        form = self.form
        placement = serving_placement(self.model, self.mesh)
        if self.weights is None or not _in_few_bits(self.weights):
            places = merged(placement.parameters(form), placement.model_state(form))
            shapes = form.arrays
            if self.reads_weights or self.is_unrolled:
                shapes = jax.eval_shape(functools.partial(with_read_weights, form), shapes)
            return jax.tree.map(_placed, shapes, places)
        if self.mesh.num_devices > 1:
            raise UnsupportedError(
                f"the memory of quantized weights on {self.mesh.num_devices} devices is not "
                "known before they are loaded; leave --mesh out for that of one device"
            )
        held = self.weights
        if self.is_unrolled:
            made = functools.partial(serving_parameters, form)
            held = jax.eval_shape(made, self.weights)
        return jax.tree.map(lambda leaf: _placed(leaf, placement.replicated), held)


def _in_few_bits(weights: Parameters) -> bool:
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return any(isinstance(leaf, QuantizedWeight) for leaf in leaves)


def _placed(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """Bytes of one device that a serving engine needs, by role."""

    report: MemoryReport  # of the largest program
    program: ProgramKey
    totals: dict[str, int]  # of each program looked at, by its name
    page_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes per device that the engine needs."""
        return self.report.total_bytes

    def as_json(self) -> dict[str, Any]:
        """Returns the engine's bytes per device as JSON values."""
        return {
            **self.report.as_json(),
            "program": str(self.program),
            "programs": self.totals,
            "page_bytes": self.page_bytes,
        }


def fitted_case(
    case: ServingCase, *, limit_bytes: int | None, others_bytes: int = 0
) -> ServingCase:
    """Returns the case with the number of pages that a server chooses by itself.

    Args:
        limit_bytes: bytes that JAX may allocate on a device; None for no limit, as on CPUs.
        others_bytes: bytes of a device that are not the engine's, such as an optimizer's state.

    Raises:
        DeviceMemoryError: one request of the full context does not fit.
    """
    if limit_bytes is None or case.engine.num_pages is not None:
        return case
    limits = case.limits
    probe = dataclasses.replace(case.engine, num_pages=1 + limits.table_width)
    needs = dataclasses.replace(case, engine=probe).runner().memory_needs()
    budget = limit_bytes * case.engine.memory_fraction - others_bytes
    pages = fitted_limits(limits, needs, budget_bytes=budget).num_pages
    return dataclasses.replace(case, engine=dataclasses.replace(case.engine, num_pages=pages))


def serving_memory(case: ServingCase) -> ServingMemory:
    """Compiles an engine's largest programs; returns the memory of the largest one by role."""
    runner = case.runner()
    reports = {key: report_memory(runner.lowered(key)) for key in _largest(runner)}
    most = max(reports, key=lambda key: reports[key].total_bytes)
    pools = reports[most].by_role().get(CACHES, 0)
    return ServingMemory(
        report=reports[most],
        program=most,
        totals={str(key): report.total_bytes for key, report in reports.items()},
        page_bytes=-(-pools // case.limits.num_pages),
    )


def _largest(runner: ModelRunner) -> list[ProgramKey]:
    """Returns the program with most tokens of each kind."""
    kinds: dict[tuple[Any, ...], ProgramKey] = {}
    for key in runner.keys:
        if key.name in ("step", "score", "verify"):
            kind = key.name, key.length > 1, key.is_fresh
            best = kinds.get(kind)
            size = (key.rows * key.length, key.is_full)
            if best is None or size > (best.rows * best.length, best.is_full):
                kinds[kind] = key
    return list(kinds.values())


def serving_remedies(
    case: ServingCase, now: ServingMemory, *, limit_bytes: int, count: int = COUNT
) -> list[Remedy[ServingCase]]:
    """Finds single changes of settings; those that fit come first, most KV cache tokens first.

    Args:
        now: memory of the unchanged engine.
        limit_bytes: memory limit per device.
    """
    found = []
    changes = _changes_of(case, now, limit_bytes)
    for options, changed, needs in compiled_changes(
        changes, lambda each: serving_memory(each).bytes
    ):
        limits = changed.limits
        tokens = (limits.num_pages - 1) * limits.page_size
        found.append(
            Remedy(
                options=options,
                case=changed,
                bytes=needs,
                fits=needs <= limit_bytes,
                cost=f"; {tokens:,} tokens of cache for {changed.engine.max_running} requests",
                figures={"cached_tokens": tokens},
            )
        )
    found.sort(key=lambda each: (not each.fits, -each.figures["cached_tokens"], each.bytes))
    return found[:count]


def _changes_of(
    case: ServingCase, now: ServingMemory, limit_bytes: int
) -> Iterator[Trial[ServingCase]]:
    engine, limits = case.engine, case.limits

    def with_engine(name: str, value: int) -> Trial[ServingCase]:
        settings: dict[str, Any] = {name: value}
        changed = dataclasses.replace(engine, **settings)
        option = f"--{name.replace('_', '-')}"
        return (option, str(value)), dataclasses.replace(case, engine=changed)

    pages = limits.num_pages - math.ceil((now.bytes - limit_bytes) / max(1, now.page_bytes))
    if 2 <= pages < limits.num_pages:
        yield with_engine("num_pages", pages)
    if case.cache is CacheFormat.PLAIN:
        form = CacheFormat.INT8
        yield ("--cache", form.value), dataclasses.replace(case, cache=form)
    in_few_bits = case.weights is not None and _in_few_bits(case.weights)
    if case.policy == POLICIES[PolicyName.FP32] and not in_few_bits:
        smaller = dataclasses.replace(case, policy=POLICIES[PolicyName.BF16], weights=None)
        yield ("--policy", "bf16"), smaller
    mesh = dataclasses.replace(case.mesh, tensor=2 * case.mesh.tensor)
    if mesh.num_devices <= jax.local_device_count():
        yield ("--mesh", mesh.option), dataclasses.replace(case, mesh=mesh)
    if engine.num_pages is None and engine.max_running > 1:
        yield with_engine("max_running", engine.max_running // 2)
    least = engine.max_running * (1 + engine.num_drafts) + engine.chunk_sizes[0]
    if engine.max_step_tokens // 2 >= least:
        yield with_engine("max_step_tokens", engine.max_step_tokens // 2)
    if engine.num_pages is None and limits.max_positions > 2 * engine.page_size:
        yield with_engine("max_context", limits.max_positions // 2)
