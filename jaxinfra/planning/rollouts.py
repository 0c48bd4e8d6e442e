"""Prediction of a step of reinforcement learning: sampling, scoring, training, and their memory.

Sampling and training alternate on the same devices. While completions are sampled, a device holds
training's weights and optimizer state, the engine's weights in 16 bits and its pages.
"""

import dataclasses
from typing import Any

from jaxinfra.planning.inference import (
    Serving,
    cached_bytes,
    decode,
    device_budget,
    memory_needs,
)
from jaxinfra.planning.plan import Plan

_FORWARD_SHARE = 1 / 3  # of a training step's time, without recomputation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """A rollout of as many completions as a training step has rows, and that step."""

    plan: Plan  # of training
    running: int  # completions sampled at a time on all devices; 0: none fits
    sampling_bytes: float  # per device, with the pages of these
    sampling_s: float
    scoring_s: float  # the trainer's own probabilities, before its step

    @property
    def fits(self) -> bool:
        """Whether both phases fit in memory."""
        return self.plan.fits and self.running > 0

    @property
    def total_s(self) -> float:
        """Seconds of a rollout and its step."""
        return self.sampling_s + self.scoring_s + self.plan.time.total_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Sampled tokens per second and device, over all phases."""
        layout = self.plan.layout
        return layout.batch * layout.length / self.total_s / layout.devices

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return {
            "running": self.running,
            "sampling_bytes": self.sampling_bytes,
            "sampling_s": self.sampling_s,
            "scoring_s": self.scoring_s,
            "training_s": self.plan.time.total_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "fits": self.fits,
        }

    def lines(self) -> list[str]:
        """Returns the figures in sentences."""
        layout, size = self.plan.layout, self.plan.device.hbm_bytes / 1e9
        if not self.running:
            return [
                f"reinforcement learning does not fit: {self.sampling_bytes / 1e9:,.1f} of "
                f"{size:,.0f} GB without the pages of one completion"
            ]
        return [
            f"rollout of {layout.batch} x {layout.length} tokens, {self.running} completions at a "
            f"time: {self.sampling_s:.4g} s sampling, {self.scoring_s:.4g} s scoring, "
            f"{self.plan.time.total_s:.4g} s training; {self.tokens_per_s_per_device:,.0f} "
            "sampled tokens/s per GPU",
            f"  memory per GPU: sampling {self.sampling_bytes / 1e9:,.1f}, training "
            f"{self.plan.memory.total / 1e9:,.1f} of {size:,.0f} GB",
        ]


def plan_rollouts(plan: Plan) -> RolloutPlan:
    """Plans rollouts for a planned training step; every token of a row counts as sampled."""
    model, device, layout = plan.model, plan.device, plan.layout
    serving = Serving(devices=layout.devices)
    needs = memory_needs(model, device, serving)
    fixed = needs.fixed_bytes + plan.memory.weights + plan.memory.optimizer
    one = cached_bytes(model, serving, batch=1, context=layout.length) / layout.devices
    room = int(max(0.0, device_budget(device) - fixed) // one)
    running = min(room, layout.batch)
    sampling_s = 0.0
    if running:
        waves = -(-layout.batch // running)
        middle = decode(model, device, serving, batch=running, context=layout.length // 2)
        sampling_s = waves * layout.length * middle.seconds
    return RolloutPlan(
        plan=plan,
        running=running,
        sampling_bytes=fixed + running * one,
        sampling_s=sampling_s,
        scoring_s=_FORWARD_SHARE * plan.time.total_s,
    )
