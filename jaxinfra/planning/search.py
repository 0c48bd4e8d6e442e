"""The best layout of a model on a number of devices, and why the others lose."""

import dataclasses
import heapq
from collections.abc import Iterator

from jaxinfra.core.errors import ConfigError
from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import Layout, Recompute, Traits, refusal
from jaxinfra.planning.memory import memory
from jaxinfra.planning.plan import Plan, make_plan
from jaxinfra.planning.shapes import Experts, ModelShape
from jaxinfra.planning.step import step_time

_KEPT = 64
_MICRO_ROWS = (1, 2, 4, 8)
_BY_STRENGTH = (
    Recompute.NONE,
    Recompute.DOTS,
    Recompute.MLP,
    Recompute.NAMED,
    Recompute.FULL,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is given; what is None is searched.

    Args:
        pipelines: stages allowed at most. Without several micro-batches they only wait.
    """

    devices: int
    length: int
    batch: int
    recipe: str = "bf16"
    remat: Recompute | None = None
    zero: int | None = None
    fixed: tuple[tuple[str, int], ...] = ()  # mesh axes that are not searched
    max_pipe: int | None = None
    traits: Traits = Traits()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout that was priced."""

    layout: Layout
    seconds: float
    bytes_total: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The ranking: fastest first, each with the reason why it is not the best."""

    best: Plan
    runners_up: tuple[tuple[Plan, str], ...]
    pareto: tuple[Candidate, ...]  # no other is both faster and smaller
    tried: int
    fitting: int
    question: Question


def search(shape: ModelShape, question: Question, device: Device, *, runners_up: int = 5) -> Found:
    """Prices every layout that can run and fits, and ranks by predicted time.

    Raises:
        ConfigError: none can run, with the commonest reason, or none fits, with the smallest.
    """
    tried = 0
    best: list[tuple[float, int, Candidate]] = []
    smallest: Candidate | None = None
    reasons: dict[str, int] = {}
    front: dict[int, Candidate] = {}
    fitting = 0
    for layout, size in _sized(shape, question, device, reasons):
        tried += 1
        if size > device.hbm_bytes:
            if smallest is None or size < smallest.bytes_total:
                smallest = Candidate(layout=layout, seconds=float("inf"), bytes_total=size)
            continue
        fitting += 1
        seconds = step_time(shape, layout, device).total_s
        candidate = Candidate(layout=layout, seconds=seconds, bytes_total=size)
        heapq.heappush(best, (-seconds, -fitting, candidate))
        if len(best) > _KEPT:
            heapq.heappop(best)
        bucket = int(size / device.hbm_bytes * 100)
        if bucket not in front or seconds < front[bucket].seconds:
            front[bucket] = candidate
    if not best:
        raise ConfigError(_nothing(shape, question, device, smallest, reasons))
    ranked = [each for _, _, each in sorted(best, key=lambda entry: -entry[0])]
    winner = make_plan(shape, ranked[0].layout, device)
    others = [make_plan(shape, each.layout, device) for each in _distinct(ranked)[: runners_up + 1]]
    return Found(
        best=winner,
        runners_up=tuple((plan, why_slower(plan, winner)) for plan in others[1:]),
        pareto=_front(front),
        tried=tried,
        fitting=fitting,
        question=question,
    )


def _sized(
    shape: ModelShape, question: Question, device: Device, reasons: dict[str, int]
) -> Iterator[tuple[Layout, float]]:
    """Layouts with their recomputation, and the bytes they take.

    Recomputing more only slows a layout that fits without, so a stronger form is tried where the
    weaker one does not fit; saving all and saving matmul outputs are close, so both are tried.
    """
    forms = [question.remat] if question.remat else list(_BY_STRENGTH)
    for layout in layouts(shape, question, device, reasons):
        least = dataclasses.replace(layout, remat=forms[-1])
        size = memory(shape, least, device).total
        if size > device.hbm_bytes:
            yield least, size
            continue
        fitting = 0
        for form in forms:
            each = dataclasses.replace(layout, remat=form)
            size = memory(shape, each, device).total
            yield each, size
            fitting += size <= device.hbm_bytes
            if fitting and form is not Recompute.NONE:
                break


def layouts(
    shape: ModelShape, question: Question, device: Device, reasons: dict[str, int]
) -> Iterator[Layout]:
    """Layouts that the model's widths allow; refusals are counted in ``reasons``."""
    fixed = dict(question.fixed)
    for tensor in _sizes(fixed.get("tensor"), _divisors(question.devices, device.node_devices)):
        rest = question.devices // tensor
        most = min(question.max_pipe or shape.num_layers, shape.num_layers)
        for pipe in _sizes(fixed.get("pipe"), _divisors(rest, most)):
            if rest % pipe:
                continue
            for context in _sizes(fixed.get("context"), _contexts(question, rest // pipe)):
                if rest // pipe % context:
                    continue
                data = rest // pipe // context
                yield from _data_layouts(
                    shape, question, reasons, (tensor, pipe, context, data), device
                )


def _data_layouts(
    shape: ModelShape,
    question: Question,
    reasons: dict[str, int],
    sizes: tuple[int, int, int, int],
    device: Device,
) -> Iterator[Layout]:
    tensor, pipe, context, data = sizes
    fixed = dict(question.fixed)
    for fsdp in _sizes(fixed.get("fsdp"), _fsdp_sizes(data, tensor * context, device)):
        if data % fsdp or fixed.get("replica", data // fsdp) != data // fsdp:
            continue
        for expert in _sizes(fixed.get("expert"), _expert_sizes(shape, data * context)):
            base = Layout(
                length=question.length,
                batch=question.batch,
                pipe=pipe,
                replica=data // fsdp,
                fsdp=fsdp,
                context=context,
                tensor=tensor,
                expert=expert,
                sequence_parallel=tensor > 1,
                recipe=question.recipe,
                traits=question.traits,
                zero=0,
            )
            reason = refusal(shape, dataclasses.replace(base, accumulation=1))
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1
                continue
            yield from _variants(shape, question, base, reasons)


def _variants(
    shape: ModelShape, question: Question, base: Layout, reasons: dict[str, int]
) -> Iterator[Layout]:
    """ZeRO stages, micro-batches and interleaving of one mesh."""
    zeros = [question.zero] if question.zero is not None else ([1, 2, 3] if base.fsdp > 1 else [0])
    layers = shape.num_layers // base.pipe
    chunk_counts = [1] if base.pipe == 1 else [v for v in (1, 2, 4) if layers % v == 0 or v == 1]
    for rows in _MICRO_ROWS:
        if base.batch % (base.data * rows):
            continue
        accumulation = base.batch // (base.data * rows)
        if base.pipe > 1 and accumulation < base.pipe:
            continue  # fewer micro-batches than stages: most of the pipeline waits
        for zero in zeros:
            if zero == 3 and base.pipe > 1 and accumulation > 1:
                continue  # weights would be gathered for every micro-batch and stage
            for chunks in chunk_counts:
                layout = dataclasses.replace(
                    base, accumulation=accumulation, zero=zero, chunks=chunks
                )
                reason = refusal(shape, layout) if zero == 3 else None
                if reason is None:
                    yield layout
                else:
                    reasons[reason] = reasons.get(reason, 0) + 1


def why_slower(plan: Plan, best: Plan) -> str:
    """The part of the step in which a plan loses most against the best one."""
    names = {**plan.time.parts, **best.time.parts}
    worse = {
        name: plan.time.parts.get(name, 0.0) - best.time.parts.get(name, 0.0) for name in names
    }
    name = max(worse, key=lambda each: worse[each])
    share = plan.time.total_s / best.time.total_s - 1
    return f"{share:+.1%}: {name} takes {worse[name]:.3g} s more"


def _distinct(ranked: list[Candidate]) -> list[Candidate]:
    """One candidate a mesh: variants of the winner's mesh would say little."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for each in ranked:
        key = tuple(each.layout.mesh.values())
        if key not in seen:
            seen.add(key)
            found.append(each)
    return found


def _front(buckets: dict[int, Candidate]) -> tuple[Candidate, ...]:
    found: list[Candidate] = []
    for each in sorted(buckets.values(), key=lambda each: (each.bytes_total, each.seconds)):
        if not found or each.seconds < found[-1].seconds:
            found.append(each)
    return tuple(found)


def _nothing(
    shape: ModelShape,
    question: Question,
    device: Device,
    smallest: Candidate | None,
    reasons: dict[str, int],
) -> str:
    what = f"{shape.name} on {question.devices} {device.name}"
    if smallest is not None:
        return (
            f"{what}: no layout fits {device.hbm_bytes / 1e9:.0f} GB; the smallest, "
            f"{smallest.layout.describe()} with remat {smallest.layout.remat}, needs "
            f"{smallest.bytes_total / 1e9:.0f} GB; add devices, shorten sequences or choose a "
            "recipe of fewer bytes a parameter"
        )
    if reasons:
        return f"{what}: no layout can run; most often: {max(reasons, key=lambda r: reasons[r])}"
    return (
        f"{what}: no layout can run: a batch of {question.batch} sequences does not divide over "
        "the data axes of any mesh; give a --batch that is a multiple of the devices"
    )


def _sizes(fixed: int | None, free: list[int]) -> list[int]:
    return free if fixed is None else [fixed]


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def _contexts(question: Question, devices: int) -> list[int]:
    """A shard of under 4,096 tokens would not hide the ring's turns."""
    return _divisors(devices, max(question.length // 4096, 1))


def _fsdp_sizes(data: int, inner: int, device: Device) -> list[int]:
    """None, all of the data axis, or as much as stays within a node."""
    node = max(device.node_devices // inner, 1)
    return sorted({1, data} | {size for size in (node, 4 * node) if data % size == 0})


def _expert_sizes(shape: ModelShape, devices: int) -> list[int]:
    counts = [
        layer.feed_forward.num_experts
        for layer in shape.layers
        if isinstance(layer.feed_forward, Experts)
    ]
    if not counts:
        return [1]
    return [each for each in _divisors(devices, min(counts)) if counts[0] % each == 0]
