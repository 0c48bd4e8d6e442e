"""Whether fully sharded weights, once gathered, stay for the backward pass.

A job compiles its step and looks (``training.job``). Here predicted bytes take the place of
compiled ones, under the same rule: what a step needs is at most what JAX may take of a device, less
a share that stays free.
"""

import dataclasses

from jaxinfra.planning.devices import Device
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.memory import Memory, memory
from jaxinfra.planning.model import PlannedModel
from jaxinfra.training.recompute.budget import FREE_SHARE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatherForms:
    """Predicted memory of a step in both forms, and which one is planned."""

    kept: Memory
    again: Memory  # where the backward pass gathers again
    budget_bytes: float  # without what is reserved
    asked: bool | None  # None: the default, which looks whether they fit

    @property
    def keeps(self) -> bool:
        """Whether weights stay."""
        return self.kept.arrays <= self.budget_bytes if self.asked is None else self.asked

    def describe(self) -> str:
        """One line: what is planned, and what both forms need."""
        form = "stay for the backward pass" if self.keeps else "are gathered again"
        kept, again, budget = (
            f"{size / 1e9:,.1f}"
            for size in (self.kept.arrays, self.again.arrays, self.budget_bytes)
        )
        return f"{form}: a step needs {kept} GB where they stay, {again} where not, of {budget}"

    def as_dict(self) -> dict[str, float | bool]:
        """For ``--json``."""
        return {
            "keeps": self.keeps,
            "by_default": self.asked is None,
            "kept_bytes": round(self.kept.arrays),
            "again_bytes": round(self.again.arrays),
            "budget_bytes": round(self.budget_bytes),
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """A layout that says whether gathered weights stay, and its memory."""

    layout: Layout
    memory: Memory
    gathers: GatherForms | None  # None where no gathered weights could stay


def sized(model: PlannedModel, layout: Layout, device: Device) -> Sized:
    """A layout's memory; where ``keep_gathered`` is open, of the form that a job would choose."""
    if not layout.may_keep_gathered:
        layout = dataclasses.replace(layout, keep_gathered=False)
        return Sized(layout=layout, memory=memory(model, layout, device), gathers=None)
    kept, again = (dataclasses.replace(layout, keep_gathered=keep) for keep in (True, False))
    forms = GatherForms(
        kept=memory(model, kept, device),
        again=memory(model, again, device),
        budget_bytes=(1 - FREE_SHARE) * (device.hbm_bytes - device.reserved_bytes),
        asked=layout.keep_gathered,
    )
    if forms.keeps:
        return Sized(layout=kept, memory=forms.kept, gathers=forms)
    return Sized(layout=again, memory=forms.again, gathers=forms)
