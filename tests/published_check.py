"""How far the planner is from what others published and from what was measured here."""

import dataclasses
import statistics
from collections.abc import Iterator

import published_figures

from jaxinfra.config.presets.models import megatron_gpt
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.formats import RECIPES
from jaxinfra.planning.layout import check
from jaxinfra.planning.memory import activation_bytes, kv_bytes_per_token
from jaxinfra.planning.model import active_parameters, find_model, plan_model, total_parameters
from jaxinfra.planning.step import step_time

BOUND = 0.08
"""Largest mean error over the measured steps that the check passes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """A figure that a formula must reproduce as printed."""

    name: str
    published: str
    ours: str

    @property
    def holds(self) -> bool:
        """Whether they are the same characters."""
        return self.published == self.ours


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured step and its prediction."""

    name: str
    source: str
    device: str
    seconds: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative, signed: positive where the prediction is slower."""
        return self.predicted_s / self.seconds - 1.0


def exact_values() -> Iterator[Exact]:
    """Every value of the reference that a formula determines."""
    for name, count in published_figures.PARAMETERS.items():
        ours = total_parameters(find_model(name))
        yield Exact(name=f"{name} parameters", published=f"{count:,}", ours=f"{ours:,}")
    deepseek = find_model("deepseek_v3")
    active, shape = active_parameters(deepseek), deepseek.config
    counts = {
        "total": total_parameters(deepseek),
        "active": active,
        "active without input embedding": active - shape.vocab_size * shape.model_dim,
    }
    for (name, what), printed in published_figures.BILLIONS.items():
        yield _printed(f"{name} billions {what}", printed, counts[what] / 1e9)
    for name, size in published_figures.KV_BYTES.items():
        ours = kv_bytes_per_token(find_model(name))
        yield Exact(name=f"{name} KV bytes per token", published=f"{size:,}", ours=f"{ours:,.0f}")
    for stage, printed in enumerate(published_figures.ZERO_GB):
        yield _printed(f"ZeRO stage {stage}, GB", printed, zero_bytes(7.5e9, 64, stage) / 1e9)
    for case in published_figures.MEGATRON:
        for (how, form), printed in zip(
            published_figures.ACTIVATION_FORMS, case.activation_gib, strict=True
        ):
            size = activation_bytes(*published_figures.megatron_case(case, form))
            yield _printed(f"{case.name} activations GiB, {how}", printed, size / 2**30)
    for layers, width, heads, *_, printed in published_figures.SCALING:
        ours = total_parameters(plan_model(megatron_gpt(width, layers, heads))) / 1e9
        yield _printed(f"GPT of {layers} x {width}, billions", printed, ours)
    for name, tokens, parameters, devices, rate, printed in published_figures.DAYS:
        ours = training_days(
            tokens=tokens, parameters=parameters, devices=devices, flops_per_s=rate
        )
        yield _printed(f"{name} training days", printed, ours)
    for name, total in published_figures.RECIPE_BYTES.items():
        ours = str(RECIPES[name].total)
        yield Exact(name=f"{name} bytes per parameter", published=total, ours=ours)


def _printed(name: str, published: str, ours: float) -> Exact:
    """Ours rounded to as many places as theirs."""
    places = len(published.partition(".")[2])
    return Exact(name=name, published=published, ours=f"{ours:.{places}f}")


def measured_steps() -> list[Measured]:
    """Predictions of every measured step, one set of constants a GPU type."""
    found = []
    for case in published_figures.timed_steps():
        check(case.model, case.layout)
        parts = step_time(case.model, case.layout, find_device(case.device)).parts
        skipped = 0.0 if case.optimizer else parts.get("optimizer", 0.0)
        found.append(
            Measured(
                name=case.name,
                source=case.source,
                device=case.device,
                seconds=case.seconds,
                predicted_s=sum(parts.values()) - skipped,
            )
        )
    return found


def mean_error(steps: list[Measured], device: str | None = None) -> float:
    """Mean of absolute relative errors, of one GPU type or of all."""
    return statistics.fmean(
        abs(each.error) for each in steps if device is None or each.device == device
    )


def published_rates() -> list[tuple[str, float, float]]:
    """Name, TFLOP/s a GPU as published, and ours from its tokens/s and FLOPs a token.

    Published rates and tokens/s were rounded apart, so these agree within 1 TFLOP/s, not exactly.
    """
    found = []
    for name, tokens_per_s, tflops, (
        parameters,
        vocab,
        width,
        layers,
    ) in published_figures.NEMO_RATES:
        ours = tokens_per_s * nemo_flops_per_token(
            parameters=parameters, vocab=vocab, width=width, layers=layers, length=8192
        )
        found.append((name, tflops, ours / 1e12))
    return found


def zero_bytes(parameters: float, devices: int, stage: int, *, recipe: str = "fp16-adam") -> float:
    """Bytes a device of weights, gradients and optimizer at a ZeRO stage.

    (W + G + O), (W + G + O/N), (W + (G + O)/N), (W + G + O)/N (arXiv 1910.02054, figure 1).
    """
    sizes = RECIPES[recipe]
    by_stage = (
        (sizes.optimizer_bytes, 1),
        (sizes.gradient_bytes, 2),
        (sizes.weights, 3),
    )
    return sum(size * parameters / (devices if stage >= first else 1) for size, first in by_stage)


def training_days(*, tokens: float, parameters: float, devices: int, flops_per_s: float) -> float:
    """8 T P / (n X), in days: forward, backward and a second forward (arXiv 2104.04473, eq. 4)."""
    return 8 * tokens * parameters / (devices * flops_per_s) / 86_400


def nemo_flops_per_token(
    *, parameters: int, vocab: int, width: int, layers: int, length: int
) -> float:
    """6 (N - V h) + 6 L h s: what NVIDIA's published Llama-3 figures count, attention halved."""
    return 6.0 * (parameters - vocab * width) + 6.0 * layers * width * length
