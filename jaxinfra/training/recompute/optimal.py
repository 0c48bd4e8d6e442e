"""The cheapest recomputation under a memory budget: layers keep the values that save most time.

The cost of keeping a set of values is computed from the traced block, and the best set for each
layer by an exact search (``block_graph``). All other memory of a step is measured: the step that
keeps the least is compiled, then the chosen one. If XLA needs more or fewer bytes than predicted,
the prediction is corrected and the search repeated.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxinfra.config.model import ExpertsConfig
from jaxinfra.config.run import KeptValues, Remat, RunConfig
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import ModelDefinition
from jaxinfra.model.recomputation import as_kept, kept_by, repeats_in_body
from jaxinfra.model.repetition import in_eight_bits
from jaxinfra.parallel.place import Placement
from jaxinfra.runtime.devices import REFERENCE_PEAK, device_peak
from jaxinfra.runtime.picture_style import BLUE, GRAY, ORANGE, RED, new_picture, save_picture
from jaxinfra.training.recompute.block_graph import (
    BINS,
    Layers,
    Option,
    best_options,
    cheapest,
    cost_of_keeping,
    peak_bytes,
    trace_repetition,
)
from jaxinfra.training.recompute.budget import (
    CHEAPEST_FIRST,
    NEED_LESS,
    Choice,
    choose_remat,
    in_gib,
)

MOST_PROGRAMS = 6
"""Largest number of steps that are compiled for a choice."""
NUM_BUDGETS = 24
"""Number of points on the trade-off between bytes and seconds."""
CLOSE_ENOUGH = 0.01
"""Share of the budget that may stay unused without another step being compiled."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tradeoff:
    """The trade-off between bytes per device and predicted seconds of recomputation, for
    plotting: points (bytes, seconds).
    """

    cheapest: tuple[tuple[int, float], ...]  # best choice for each budget, fewest bytes first
    policies: dict[Remat, tuple[int, float]]  # fixed policies, one for all layers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeptChoice:
    """The chosen values that each layer keeps, with the step's predicted and measured bytes."""

    kept: tuple[KeptValues, ...]
    seconds: float  # predicted time of recomputation per step
    predicted_bytes: int  # of the step per device, before it was compiled
    need_bytes: int  # of the compiled step per device
    budget_bytes: int
    options: tuple[tuple[Option, ...], ...]  # chosen options, for each stack
    tradeoff: Tradeoff

    @property
    def remat(self) -> Remat:
        """The config's ``remat`` value that stands for this choice."""
        return Remat.CHOSEN

    def describe(self) -> str:
        """Describes the kept values, their cost and their bytes in lines for the log."""
        lines = [
            f"remat=optimal: a step needs {in_gib(self.need_bytes)} (predicted "
            f"{in_gib(self.predicted_bytes)}) of a budget of {in_gib(self.budget_bytes)}, and "
            f"computes for {1e3 * self.seconds:.1f} ms again"
        ]
        for run in self.kept:
            names = ", ".join(run.names) or "nothing but its input"
            lines.append(f"  {run.layers} layers keep {names}")
        return "\n".join(lines)


class KeptSearch:
    """Search for the values to keep within a budget. The bytes of each compiled step correct the
    search's predictions.
    """

    def __init__(self, stacks: Sequence[tuple[tuple[Layers, ...], int]], *, budget_bytes: int):
        """Args:
        stacks: of each its layers, and its repetitions: as many as layers, or all in one.
        """
        self.layers = tuple(each for layers, _ in stacks for each in layers)
        self.repeats = [repeats // len(layers) for layers, repeats in stacks for _ in layers]
        self.budget_bytes = budget_bytes
        self.least = tuple(each.options[0] for each in self.layers)
        # ``peak_bytes`` of what was compiled, and what its step needs beside them.
        self._beside: dict[int, int] = {}
        self._needs: dict[tuple[Option, ...], int] = {}

    def run(self, need: Callable[[tuple[KeptValues, ...]], int]) -> KeptChoice:
        """Compiles steps until no better one is expected; returns the best that fits.

        Args:
            need: returns the bytes per device of a step that keeps these values, training state
                included.

        Raises:
            ConfigError: even the step that keeps least does not fit.
        """
        chosen: tuple[Option, ...] | None = self.least
        predicted: dict[tuple[Option, ...], int] = {}
        while chosen is not None:
            peak, needs = peak_bytes(self.layers, chosen), need(self.kept(chosen))
            predicted[chosen] = int(self._need_of(np.array(peak))) if self._beside else needs
            self._needs[chosen], self._beside[peak] = needs, needs - peak
            chosen = self._next()
        best = self.best
        if best is None:
            need_bytes = min(self._needs.values())
            raise ConfigError(
                f"remat=optimal: a device needs {in_gib(need_bytes)} at least (all is computed "
                f"again), and its budget is {in_gib(self.budget_bytes)}; {NEED_LESS}"
            )
        return KeptChoice(
            kept=self.kept(best),
            seconds=self.seconds(best),
            predicted_bytes=predicted[best],
            need_bytes=self._needs[best],
            budget_bytes=self.budget_bytes,
            options=tuple(dict.fromkeys(each.options for each in self.layers)),
            tradeoff=self.tradeoff(),
        )

    def _next(self) -> tuple[Option, ...] | None:
        """The next set of kept values to compile; None if no better one is expected."""
        if len(self._needs) >= MOST_PROGRAMS:
            return None
        chosen = cheapest(self.layers, room=self._room()) or self.least
        best = self.best
        if chosen in self._needs:
            return None
        if best is not None:
            left = self.budget_bytes - self._needs[best]
            if best != self.least and left <= CLOSE_ENOUGH * self.budget_bytes:
                return None
            if self.seconds(chosen) >= self.seconds(best):
                return None
        return chosen

    def _need_of(self, peaks: np.ndarray) -> np.ndarray:
        """Predicted: between what was compiled what a step needs beside changes evenly."""
        known = sorted(self._beside)
        return peaks + np.interp(peaks, known, [self._beside[each] for each in known])

    def _room(self) -> int:
        """The largest ``peak_bytes`` whose step is predicted to fit."""
        peaks = np.linspace(0, self.budget_bytes, 4 * BINS)
        return int(np.max(peaks, where=self._need_of(peaks) <= self.budget_bytes, initial=0))

    @property
    def best(self) -> tuple[Option, ...] | None:
        """Choice with the least recomputation among compiled steps that fit."""
        fitting = [each for each, need in self._needs.items() if need <= self.budget_bytes]
        return min(fitting, key=self.seconds, default=None)

    def seconds(self, chosen: Sequence[Option]) -> float:
        """Returns the predicted seconds of recomputation per step for a choice."""
        return sum(
            option.seconds * each.count for each, option in zip(self.layers, chosen, strict=True)
        )

    def kept(self, chosen: Sequence[Option]) -> tuple[KeptValues, ...]:
        """Returns a choice in the form that a config stores."""
        each = [
            option.names
            for option, repeats in zip(chosen, self.repeats, strict=True)
            for _ in range(repeats)
        ]
        return as_kept(each)

    def tradeoff(self) -> Tradeoff:
        """Returns the cheapest choice for each of many budgets, and the fixed policies. Bytes are
        measured for steps that were compiled, predicted for others.
        """

        def point(chosen: tuple[Option, ...]) -> tuple[int, float]:
            predicted = int(self._need_of(np.array(peak_bytes(self.layers, chosen))))
            return self._needs.get(chosen, predicted), self.seconds(chosen)

        fixed = {
            remat: tuple(each.policies[at] for each in self.layers)
            for at, remat in enumerate(CHEAPEST_FIRST)
            if all(each.policies for each in self.layers)
        }
        most = tuple(each.options[-1] for each in self.layers)
        low, high = (peak_bytes(self.layers, each) for each in (self.least, most))
        peaks = [peak_bytes(self.layers, each) for each in fixed.values()]
        peaks = [*np.linspace(low, high, NUM_BUDGETS), *(each for each in peaks if each < high)]
        found = [self.least, most]
        for peak in peaks:
            # Above it by what the search may round bytes up by.
            room = int(peak * (1 + len(self.layers) / BINS))
            found.append(cheapest(self.layers, room=room) or self.least)
        best: list[tuple[int, float]] = []
        for size, seconds in sorted({point(each) for each in found}):
            if not best or seconds < best[-1][1]:
                best.append((size, seconds))
        policies = {remat: point(each) for remat, each in fixed.items()}
        return Tradeoff(cheapest=tuple(best), policies=policies)


def choose(
    config: RunConfig,
    model: ModelDefinition,
    placement: Placement,
    *,
    budget_bytes: int,
    need: Callable[..., int],
) -> Choice | KeptChoice:
    """Chooses the recomputation of a config with ``auto`` or ``optimal``.

    Args:
        need: returns the bytes per device of a step, training state included. Its arguments are a
            remat policy and, for ``chosen``, the values to keep.

    Raises:
        ConfigError: the budget is below the least that is possible.
    """
    if config.training.remat is Remat.AUTO:
        return choose_remat(budget_bytes=budget_bytes, need=need)
    search = KeptSearch(layers_of(config, model, placement), budget_bytes=budget_bytes)
    return search.run(functools.partial(need, Remat.CHOSEN))


def layers_of(
    config: RunConfig, model: ModelDefinition, placement: Placement | None
) -> list[tuple[tuple[Layers, ...], int]]:
    """Lists, for each stack, its groups of repetitions that may choose separately, and its number
    of repetitions.

    If the stack is a loop, it is one group: all repetitions keep the same values. An unrolled stack
    has one group per repetition.
    """
    training, parts = config.training, []
    device = jax.devices()[0] if placement is None else placement.mesh.devices.flat[0]
    peak = device_peak(device.device_kind) or REFERENCE_PEAK
    shards = 1 if placement is None else placement.batch_shards * placement.sequence_shards
    rows = training.batch_size // training.accumulation
    first = 0
    for index, stack in enumerate(config.model.stacks):
        pattern = len(stack.pattern)
        kinds = in_eight_bits(config.model, model.execution.policy, slice(first, first + pattern))
        options, policies = {}, {}
        for kind in dict.fromkeys(kinds):
            graph = trace_repetition(
                model,
                index,
                rows=rows,
                length=training.sequence_length,
                number=kinds.index(kind),
            )
            options[kind] = best_options(graph, peak, shards=shards)
            policies[kind] = tuple(
                cost_of_keeping(graph, kept_by(remat), peak, shards=shards)
                for remat in CHEAPEST_FIRST
            )
        blocks = [model.shapes["blocks"][first + i] for i in range(pattern)]
        first += pattern
        leaves = [leaf for leaf in jax.tree.leaves(blocks) if leaf.ndim > 0]
        elements = sum(leaf.size for leaf in leaves) // stack.repeats
        stored = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // stack.repeats
        compute = model.execution.policy.compute.itemsize
        is_cast = any(leaf.dtype.itemsize != compute for leaf in leaves)
        stream = rows * training.sequence_length * config.model.model_dim * compute // shards
        whole = repeats_in_body(stack, training.unroll) == stack.repeats
        in_place = any(isinstance(each.feed_forward, ExpertsConfig) for each in stack.pattern)
        if not whole:
            loop = Layers(
                options=options[kinds[0]], policies=policies[kinds[0]], count=stack.repeats
            )
            parts.append(((loop,), stack.repeats))
            continue
        layer = functools.partial(
            Layers,
            # XLA casts the weights of all layers at once, before the first.
            fixed_bytes=stream + (elements * compute // shards if is_cast else 0),
            gradient_bytes=0 if in_place or training.accumulation > 1 else stored // shards,
        )
        layers = (layer(options=options[kind], policies=policies[kind]) for kind in kinds)
        parts.append((tuple(layers), stack.repeats))
    return parts


def draw_choice(choice: Choice | KeptChoice | None, file: Path) -> None:
    """Plots the cheapest recomputation per budget, the fixed policies and the choice. Does nothing
    unless ``choice`` came from a search (``optimal``).
    """
    if not isinstance(choice, KeptChoice):
        return
    sizes, seconds = zip(*choice.tradeoff.cheapest, strict=True)
    everything = [*sizes, choice.budget_bytes, choice.need_bytes]
    unit, name = (2**30, "GiB") if max(sizes) >= 2**30 else (2**20, "MiB")
    figure, axes = new_picture(8, 4.5)
    axes.step(
        [size / unit for size in sizes],
        [1e3 * each for each in seconds],
        where="post",
        color=BLUE,
        marker=".",
        label="the cheapest for each budget, predicted",
    )
    for remat, (size, time) in choice.tradeoff.policies.items():
        axes.plot(size / unit, 1e3 * time, "o", color=ORANGE, clip_on=False)
        axes.annotate(
            f"remat={remat.value}",
            (size / unit, 1e3 * time),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=9,
        )
        everything.append(size)
    axes.plot(
        choice.need_bytes / unit,
        1e3 * choice.seconds,
        "*",
        color=RED,
        markersize=13,
        clip_on=False,
        label="chosen: bytes of its compiled step",
    )
    # A budget far above all that a step can use would squeeze the rest.
    right = 1.15 * max(size for size in everything if size != choice.budget_bytes)
    if choice.budget_bytes <= right:
        axes.axvline(choice.budget_bytes / unit, color=GRAY, linewidth=1.0, linestyle=":")
        top = axes.get_xaxis_transform()
        axes.text(choice.budget_bytes / unit, 1.0, " budget", color=GRAY, transform=top)
    axes.set_xlim(0.97 * min(everything) / unit, right / unit)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{name} of a device that a step needs")
    axes.set_ylabel("ms computed again in a step, predicted")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    save_picture(figure, file)
