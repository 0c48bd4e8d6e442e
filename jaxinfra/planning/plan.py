"""The plan of a model and a layout on a device: predicted memory, communication and time.

A plan decides like a job (``training.job``) whether all-gathered weights of fsdp stay for the
backward pass, but from predicted instead of compiled bytes. They stay if the step then fits in
JAX's part of the device memory, with the fraction ``FREE_SHARE`` left free.
"""

import dataclasses
import math
from typing import Any

from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import BY_STRENGTH, Layout, check
from jaxinfra.planning.memory import Memory, kv_bytes, kv_bytes_per_token, memory
from jaxinfra.planning.model import (
    PlannedModel,
    active_parameters,
    parameters_by_role,
    total_parameters,
)
from jaxinfra.planning.operations import (
    PlannedCollective,
    layer_operations,
    loss_form,
    loss_operations,
)
from jaxinfra.planning.operations import embedding_operations as embedding
from jaxinfra.planning.step import (
    StepTime,
    data_collectives,
    members_in_node,
    stage_sends,
    step_time,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatherForms:
    """Predicted memory of a step with and without kept all-gathered weights, and the choice."""

    kept: Memory
    again: Memory  # if the backward pass gathers weights again
    budget_bytes: float  # memory that a step may use
    asked: bool | None  # the user's choice; None: kept if they fit

    @property
    def keeps(self) -> bool:
        """Tells whether all-gathered weights are kept for the backward pass."""
        return self.kept.arrays <= self.budget_bytes if self.asked is None else self.asked

    def describe(self) -> str:
        """Describes in one line whether gathered weights are kept, and the bytes of both forms."""
        kept, again, budget = (
            f"{size / 1e9:,.1f}"
            for size in (self.kept.arrays, self.again.arrays, self.budget_bytes)
        )
        if self.keeps:
            return (
                f"stay for the backward pass: a step takes {kept} of {budget} GB; gathered again, "
                f"it would take {again}"
            )
        return (
            f"are gathered again for the backward pass: a step takes {again} of {budget} GB; if "
            f"they stayed, {kept}"
        )

    def as_dict(self) -> dict[str, float | bool]:
        """Returns the choice and the bytes of both forms, for ``--json``."""
        return {
            "keeps": self.keeps,
            "by_default": self.asked is None,
            "kept_bytes": round(self.kept.arrays),
            "again_bytes": round(self.again.arrays),
            "budget_bytes": round(self.budget_bytes),
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """A layout with its predicted memory, and whether all-gathered weights are kept."""

    layout: Layout
    memory: Memory
    gathers: GatherForms | None  # None if the layout has no gathered weights that could stay


def sized(model: PlannedModel, layout: Layout, device: Device) -> Sized:
    """Predicts a layout's memory; if ``keep_gathered`` is None, decides it as a job would."""
    if not layout.may_keep_gathered:
        layout = dataclasses.replace(layout, keep_gathered=False)
        return Sized(layout=layout, memory=memory(model, layout, device), gathers=None)
    kept, again = (dataclasses.replace(layout, keep_gathered=keep) for keep in (True, False))
    forms = GatherForms(
        kept=memory(model, kept, device),
        again=memory(model, again, device),
        budget_bytes=device.budget_bytes,
        asked=layout.keep_gathered,
    )
    if forms.keeps:
        return Sized(layout=kept, memory=forms.kept, gathers=forms)
    return Sized(layout=again, memory=forms.again, gathers=forms)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one device moves per step over one mesh axis, by kind of collective."""

    axis: str
    kind: str
    link: str  # node, or network
    count: float
    array_bytes: float  # of the arrays communicated
    wire_bytes: float  # sent by one device in ring form


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Predicted memory, communication and time of a layout: the result of ``jaxinfra plan``."""

    model: PlannedModel
    layout: Layout
    device: Device
    memory: Memory
    time: StepTime
    traffic: tuple[Traffic, ...]
    gathers: GatherForms | None = None  # memory if all-gathered weights stay, and if not

    @property
    def fits(self) -> bool:
        """Tells whether the busiest device's arrays fit in what JAX may take, with a rest free."""
        return self.memory.total <= self.device.limit_bytes

    @property
    def tokens_per_s_per_device(self) -> float:
        """Training tokens/s per device."""
        return self.layout.batch * self.layout.length / self.time.total_s / self.layout.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization at the recipe's peak matmul rate (PaLM, appendix B)."""
        peak = self.device.flops[self.layout.training_recipe.compute]
        return self.time.model_flops / (self.time.total_s * self.layout.devices * peak)

    def days(self, tokens: float) -> float:
        """Returns how many days a training run of ``tokens`` tokens takes."""
        steps = math.ceil(tokens / (self.layout.batch * self.layout.length))
        return steps * self.time.total_s / 86_400

    def dollars(self, tokens: float) -> float:
        """Returns the dollars that training on ``tokens`` tokens costs at the device's price."""
        return self.days(tokens) * 24 * self.layout.devices * self.device.dollars_per_hour

    @property
    def dollars_per_billion_tokens(self) -> float:
        """Cost in dollars of training on a billion tokens, at the device's hourly price."""
        return 1e9 / self.tokens_per_s_per_device / 3600 * self.device.dollars_per_hour

    @property
    def asked(self) -> Layout:
        """The layout as the user requested it; its ``keep_gathered`` may still be None."""
        asked = None if self.gathers is None else self.gathers.asked
        return dataclasses.replace(self.layout, keep_gathered=asked)

    def by_remat(self) -> dict[str, "Plan"]:
        """Plans of this layout with each recomputation policy, the weakest first."""
        return {
            form.value: make_plan(
                self.model, dataclasses.replace(self.asked, remat=form), self.device
            )
            for form in BY_STRENGTH
        }

    def as_dict(self, *, tokens: float | None = None) -> dict[str, Any]:
        """Returns the plan as JSON values; bytes and seconds are per device and step."""
        model, layout = self.model, self.layout
        values: dict[str, Any] = {
            "model": model.name,
            "device": self.device.name,
            "devices": layout.devices,
            "params_total": total_parameters(model),
            "params_active": active_parameters(model),
            "params_by_role": parameters_by_role(model),
            "flops_per_token": model.training_flops(layout.length) / layout.length,
            "prefill_flops_per_token": model.forward_flops(layout.length) / layout.length,
            "decode_flops_per_token": model.decode_flops(layout.length),
            "kv_bytes_per_token": kv_bytes_per_token(model),
            "kv_bytes": kv_bytes(model, batch=1, context=layout.length),
            "mesh": layout.axes,
            "layout": {
                "batch": layout.batch,
                "length": layout.length,
                "accumulation": layout.accumulation,
                "micro_batch_rows": layout.micro_rows,
                "zero": layout.zero,
                "chunks": layout.chunks,
                "sequence_parallel": layout.sequence_parallel,
                "remat": layout.remat.value,
                "recipe": layout.recipe,
                "keep_gathered": layout.keep_gathered,
            },
            "gathered_weights": None if self.gathers is None else self.gathers.as_dict(),
            "fits": self.fits,
            "memory_bytes": {
                **{name: round(size) for name, size in dataclasses.asdict(self.memory).items()},
                "total": round(self.memory.total),
            },
            "logits_bytes": round(loss_form(model, layout).chunk_bytes),
            "memory_by_remat": self._memory_by_remat(),
            "hbm_bytes": self.device.hbm_bytes,
            "collective_bytes": self._by_kind(),
            "communication": [dataclasses.asdict(each) for each in self.traffic],
            "bubble_fraction": self.time.bubble_fraction,
            "step_s": self.time.total_s,
            "step_parts_s": self.time.parts,
            "hidden_s": self.time.hidden,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "mfu": self.mfu,
            "dollars_per_billion_tokens": self.dollars_per_billion_tokens,
            "constants": dict(self.device.sources),
        }
        if tokens is not None:
            values |= {
                "tokens": tokens,
                "days": self.days(tokens),
                "dollars": self.dollars(tokens),
            }
        return values

    def _memory_by_remat(self) -> dict[str, dict[str, float | bool]]:
        return {
            form: {
                "activations": round(plan.memory.activations),
                "total": round(plan.memory.total),
                "fits": plan.fits,
                "step_s": plan.time.total_s,
            }
            for form, plan in self.by_remat().items()
        }

    def _by_kind(self) -> dict[str, int]:
        kinds: dict[str, float] = {}
        for each in self.traffic:
            kinds[each.kind] = kinds.get(each.kind, 0.0) + each.array_bytes
        return {kind: round(size) for kind, size in kinds.items()}


def make_plan(model: PlannedModel, layout: Layout, device: Device) -> Plan:
    """Predicts a layout's memory, communication and time; raises ConfigError if impossible."""
    check(model, layout)
    found = sized(model, layout, device)
    layout = found.layout
    return Plan(
        model=model,
        layout=layout,
        device=device,
        memory=found.memory,
        time=step_time(model, layout, device),
        traffic=traffic(model, layout, device),
        gathers=found.gathers,
    )


def traffic(model: PlannedModel, layout: Layout, device: Device) -> tuple[Traffic, ...]:
    """Sums the bytes of a step's collectives by mesh axis and kind."""
    micro = layout.accumulation
    found: list[tuple[PlannedCollective, float]] = []
    for layer in model.layers:
        passes = layer_operations(layer, layout)
        operations = (*passes.forward, *passes.backward, *passes.recomputed)
        times = micro * layer.count / layout.mesh.num_stages
        found += [(each, times) for each in operations if isinstance(each, PlannedCollective)]
    ends = (*loss_operations(model, layout), *embedding(model, layout))
    found += [(each, float(micro)) for each in ends if isinstance(each, PlannedCollective)]
    found += [(each, 1.0) for each in data_collectives(model, layout)]
    if layout.mesh.num_stages > 1:
        found.append((stage_sends(model, layout, micro), 1.0))
    sums: dict[tuple[str, str], list[float]] = {}
    for each, times in found:
        members = layout.members(each.axis)
        if members == 1:
            continue
        entry = sums.setdefault((each.axis, each.kind), [0.0, 0.0, 0.0])
        sent = sent_bytes(each.kind, each.size, members)
        for i, amount in enumerate((1.0, each.size, sent)):
            entry[i] += times * each.count * amount
    return tuple(
        Traffic(
            axis=axis,
            kind=kind,
            link="node"
            if members_in_node(device, layout, axis) == layout.members(axis)
            else "network",
            count=count,
            array_bytes=size,
            wire_bytes=wire,
        )
        for (axis, kind), (count, size, wire) in sums.items()
    )
