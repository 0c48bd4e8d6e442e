"""Search for the fastest layout of a model on given devices, and why others are slower."""

import collections
import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterator

from jaxinfra.axes import MESH_AXES
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.limits import require_within
from jaxinfra.config.mesh import EXPERT, MeshConfig, shared_by_experts
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError, nearest
from jaxinfra.planning.devices import Device
from jaxinfra.planning.formats import RECIPES
from jaxinfra.planning.layout import BY_STRENGTH, Layout, Traits, refusal, untrainable
from jaxinfra.planning.memory import memory, state_bytes
from jaxinfra.planning.model import PlannedModel
from jaxinfra.planning.plan import Plan, make_plan, sized
from jaxinfra.planning.step import step_time

_KEPT = 64
_MICRO_ROWS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The layout choices that the user fixes; a search tries all values of those that are None."""

    devices: int
    length: int
    batch: int
    recipes: tuple[str, ...] = ("bf16",)
    remat: Remat | None = None
    zero: int | None = None
    fixed: tuple[tuple[str, int], ...] = ()  # mesh axes that are not searched
    exchange: ExchangeConfig = ExchangeConfig()
    keep_gathered: bool | None = None  # None: kept if it fits, as a run decides
    traits: Traits = Traits()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with its predicted memory and step time."""

    layout: Layout
    seconds: float  # infinite where it does not fit
    bytes_total: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best layout that has another value of one choice, such as remat, than the winner."""

    choice: str  # tensor, remat, ...
    value: str
    plan: Plan
    why: str  # reason why it is not chosen


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Result of a layout search: the fastest layouts, and why each is slower than the best."""

    best: Plan
    runners_up: tuple[tuple[Plan, str], ...]  # fastest first, with the reason
    alternatives: tuple[Alternative, ...]  # one per searched choice
    pareto: tuple[Candidate, ...]  # layouts that no other beats in both time and memory
    tried: int
    fitting: int
    question: Question


CHOICES: dict[str, Callable[[Layout], object]] = {
    **{axis: operator.attrgetter(f"mesh.{axis}") for axis in (*MESH_AXES, EXPERT)},
    "micro-batch": lambda layout: layout.micro_rows,
    "accumulation": lambda layout: layout.accumulation,
    "chunks": lambda layout: layout.chunks,
    "ZeRO": lambda layout: layout.zero,
    "remat": lambda layout: layout.remat.value,
    "recipe": lambda layout: layout.recipe,
}
"""Searched properties of a layout, by name."""


def search(
    model: PlannedModel, question: Question, device: Device, *, runners_up: int = 5
) -> Found:
    """Predicts every layout that can run and fits, and ranks the layouts by step time.

    Raises:
        ConfigError: no layout can run (with the main reason), or none fits (with the smallest).
    """
    for recipe in question.recipes:
        if recipe not in RECIPES:
            raise ConfigError(f"unknown recipe {recipe!r}{nearest(recipe, RECIPES)}")
    reasons: collections.Counter[str] = collections.Counter()
    found: list[Candidate] = []
    for number, (layout, size) in enumerate(_sized(model, question, device, reasons)):
        require_within(layouts=number, remedy="narrow the search with --fix, --zero or --remat")
        fits = size <= device.limit_bytes
        seconds = step_time(model, layout, device).total_s if fits else math.inf
        found.append(Candidate(layout=layout, seconds=seconds, bytes_total=size))
    fitting = [each for each in found if each.bytes_total <= device.limit_bytes]
    if not fitting:
        raise ConfigError(_nothing(model, question, device, found, reasons))
    ranked = heapq.nsmallest(_KEPT, fitting, key=lambda each: each.seconds)

    def plan_of(each: Candidate) -> Plan:
        asked = dataclasses.replace(each.layout, keep_gathered=question.keep_gathered)
        return make_plan(model, asked, device)

    winner = plan_of(ranked[0])
    others = [plan_of(each) for each in _distinct(ranked)[: runners_up + 1]]
    alternatives = []
    for choice, value, each in _others(found, winner.layout):
        plan = plan_of(each)
        why = why_slower(plan, winner)
        alternatives.append(Alternative(choice=choice, value=value, plan=plan, why=why))
    return Found(
        best=winner,
        runners_up=tuple((plan, why_slower(plan, winner)) for plan in others[1:]),
        alternatives=tuple(alternatives),
        pareto=_front(fitting, device),
        tried=len(found),
        fitting=len(fitting),
        question=question,
    )


def _sized(
    model: PlannedModel, question: Question, device: Device, reasons: collections.Counter[str]
) -> Iterator[tuple[Layout, float]]:
    """Yields layouts, with their recomputation policy chosen, and the bytes that each takes.

    Recomputing more only slows a layout that fits without, so a stronger form is tried where the
    weaker one does not fit; saving all and saving matmul outputs are close, so both are tried.
    Of each form gathered weights stay where there is still room, as in a run.
    """
    forms = [question.remat] if question.remat else list(BY_STRENGTH)
    for layout in layouts(model, question, device, reasons):
        least = dataclasses.replace(layout, remat=forms[-1])
        size = memory(model, least, device).total
        if size > device.limit_bytes:
            yield least, size
            continue
        fitting = 0
        for form in forms:
            each = sized(model, dataclasses.replace(layout, remat=form), device)
            size = each.memory.total
            yield each.layout, size
            fitting += size <= device.limit_bytes
            if fitting and form is not Remat.NONE:
                break


def layouts(
    model: PlannedModel, question: Question, device: Device, reasons: collections.Counter[str]
) -> Iterator[Layout]:
    """Yields the layouts that can run for this model; counts the others in ``reasons``."""
    for mesh in _meshes(model, question, device):
        base = Layout(
            length=question.length,
            batch=question.batch,
            mesh=mesh,
            sequence_parallel=mesh.tensor > 1,
            recipe=question.recipes[0],
            exchange=question.exchange,
            traits=question.traits,
            zero=0,
        )
        reason = refusal(model, base)
        if reason is None:
            yield from _variants(model, question, base, device, reasons)
        else:
            reasons[reason] += 1


def _meshes(model: PlannedModel, question: Question, device: Device) -> Iterator[MeshConfig]:
    """Yields every mesh of this number of devices that has the given axis sizes."""
    fixed, devices = dict(question.fixed), question.devices

    def sizes(axis: str, number: int, most: int) -> list[int]:
        return [fixed[axis]] if axis in fixed else _divisors(number, most)

    experts = max(model.num_experts, 1)
    shortest = max(question.length // 2048, 1)  # a smaller shard would not hide the ring's turns
    for tensor in sizes("tensor", devices, device.node_devices):
        for pipe in sizes("pipe", devices // tensor, model.config.num_layers):
            for context in sizes("context", devices // tensor // pipe, shortest):
                data, left = divmod(devices, tensor * pipe * context)
                for fsdp in sizes("fsdp", data, data) if not left else ():
                    replica, left = divmod(data, fsdp)
                    if left or fixed.get("replica", replica) != replica:
                        continue
                    at = {"pipe": pipe, "replica": replica, "fsdp": fsdp, "tensor": tensor}
                    for expert in sizes("expert", math.gcd(data * context, experts), experts):
                        fits = shared_by_experts(expert, fsdp, context, replica) is not None
                        if fits or EXPERT in fixed:
                            yield MeshConfig(**at, context=context, expert=expert)


def _variants(
    model: PlannedModel,
    question: Question,
    base: Layout,
    device: Device,
    reasons: collections.Counter[str],
) -> Iterator[Layout]:
    """Yields a mesh's layouts over recipes, ZeRO stages, micro-batches and interleaving.

    Of a state that alone is too big, one layout is enough: what it runs on adds to it.
    """
    zeros = (
        [question.zero] if question.zero is not None else ([1, 2, 3] if base.mesh.fsdp > 1 else [0])
    )
    layers = model.config.num_layers // base.mesh.pipe
    chunk_counts = [v for v in (1, 2, 4) if v == 1 or (base.mesh.pipe > 1 and layers % v == 0)]
    rows_and_chunks = [
        (rows, chunks)
        for rows in _MICRO_ROWS
        # With fewer micro-batches than stages most of the pipeline waits.
        if base.batch % (base.data * rows) == 0
        and (base.mesh.pipe == 1 or base.batch // (base.data * rows) >= base.mesh.pipe)
        for chunks in chunk_counts
    ]
    for recipe, zero in itertools.product(question.recipes, zeros):
        for rows, chunks in rows_and_chunks:
            layout = dataclasses.replace(
                base,
                accumulation=base.batch // (base.data * rows),
                zero=zero,
                chunks=chunks,
                recipe=recipe,
                keep_gathered=question.keep_gathered,
            )
            is_other = zero == 3 or layout.keep_gathered
            reason = (refusal(model, layout) if is_other else None) or untrainable(model, layout)
            if reason is not None:
                reasons[reason] += 1
                break
            yield layout
            if sum(state_bytes(model, layout)) > device.budget_bytes:
                break


def why_slower(plan: Plan, best: Plan) -> str:
    """Explains where a plan loses most time against the best, or how much memory it lacks."""
    if not plan.fits:
        short = (plan.memory.total - plan.device.limit_bytes) / 1e9
        return f"does not fit: {short:,.1f} GB too much"
    names = {**plan.time.parts, **best.time.parts}
    worse = {
        name: plan.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0) for name in names
    }
    name = max(worse, key=lambda each: worse[each])
    share = plan.time.total_s / best.time.total_s - 1
    return f"{share:+.1%}: {name} takes {worse[name]:.3g} s more"


def _distinct(ranked: list[Candidate]) -> list[Candidate]:
    """Returns the best candidate of each mesh, since variants of one mesh tell little."""
    found: dict[MeshConfig, Candidate] = {}
    for each in ranked:
        found.setdefault(each.layout.mesh, each)
    return list(found.values())


def _others(found: list[Candidate], best: Layout) -> Iterator[tuple[str, str, Candidate]]:
    """Yields, for each choice, the best candidate that differs from ``best`` in it."""
    for name, value_of in CHOICES.items():
        mine = value_of(best)
        others = [each for each in found if value_of(each.layout) != mine]
        if others:
            # Of those that do not fit, the smallest.
            first = min(others, key=lambda each: (each.seconds, each.bytes_total))
            yield name, str(value_of(first.layout)), first


def _front(fitting: list[Candidate], device: Device) -> tuple[Candidate, ...]:
    """Returns candidates that no other beats in time and memory, by percents of the memory."""
    fastest: dict[int, Candidate] = {}
    for each in fitting:
        percent = int(each.bytes_total / device.hbm_bytes * 100)
        if percent not in fastest or each.seconds < fastest[percent].seconds:
            fastest[percent] = each
    found: list[Candidate] = []
    for each in sorted(fastest.values(), key=lambda each: (each.bytes_total, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return tuple(found)


def _nothing(
    model: PlannedModel,
    question: Question,
    device: Device,
    found: list[Candidate],
    reasons: collections.Counter[str],
) -> str:
    what = f"{model.name} on {question.devices} {device.name}"
    if found:
        smallest = min(found, key=lambda each: each.bytes_total)
        return (
            f"{what}: no layout fits the {device.limit_bytes / 1e9:.0f} of "
            f"{device.hbm_bytes / 1e9:.0f} GB that a run may use; the smallest, "
            f"{smallest.layout.describe()} with remat {smallest.layout.remat}, needs "
            f"{smallest.bytes_total / 1e9:.0f} GB; add devices, shorten sequences or choose a "
            "recipe of fewer bytes per parameter"
        )
    if reasons:
        return f"{what}: no layout can run; most often: {reasons.most_common(1)[0][0]}"
    return (
        f"{what}: no layout can run: give sizes that divide the devices, and a --batch that is a "
        f"multiple of them in place of {question.batch}"
    )


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
