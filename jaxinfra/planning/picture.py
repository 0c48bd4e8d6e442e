"""Pictures of a plan: memory, time, rooflines, the search and number formats."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxinfra.planning.devices import Device
from jaxinfra.planning.formats import FORMATS, RECIPES
from jaxinfra.planning.inference import Phase, Serving, attainable, by_batch, decode, prefill, ridge
from jaxinfra.planning.model import PlannedModel
from jaxinfra.planning.plan import Plan
from jaxinfra.planning.search import Found
from jaxinfra.runtime.picture_style import COLORS, new_picture

_MOST_NAMED = 14  # layouts that a picture of the search names


def draw_plan(plan: Plan, directory: Path, *, found: Found | None = None) -> None:
    """Writes memory.png, time.png, roofline.png and, if searched, pareto.png."""
    others = [other for other, _ in found.runners_up] if found else []
    figures = {
        "memory": memory_figure([plan, *others]),
        "time": time_figure(plan),
        "roofline": roofline_figure(plan.model, plan.device),
    }
    if found is not None:
        figures["pareto"] = pareto_figure(found)
    _write(figures, directory)


def draw_serving(
    model: PlannedModel, device: Device, serving: Serving, directory: Path, *, context: int
) -> None:
    """Writes roofline.png and decode.png of a served model."""
    figures = {
        "roofline": roofline_figure(model, device, serving, context=context),
        "decode": decode_figure(model, device, serving, context=context),
    }
    _write(figures, directory)


def draw_formats(directory: Path) -> None:
    """Writes formats.png and recipes.png into a directory."""
    _write({"formats": formats_figure(), "recipes": recipes_figure()}, directory)


def _write(figures: dict[str, Figure], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png", dpi=120)


def memory_figure(plans: list[Plan]) -> Figure:
    """Plots bytes of the busiest device by role, one bar per plan, beside the device's memory."""
    figure, axes = new_picture(8, 1.4 + 0.6 * len(plans))
    bars = {f"{p.layout.describe()}\nremat {p.layout.remat}": p.memory for p in plans}
    roles = ("weights", "gradients", "optimizer", "activations", "buffers", "reserved")
    _stacked(axes, bars, roles, unit=1e9)
    limit = plans[0].device.hbm_bytes / 1e9
    axes.axvline(limit, color="black", linestyle="--", linewidth=1)
    axes.text(limit, -0.6, f" {limit:.0f} GB", va="top", ha="right", fontsize=9)
    axes.set_xlabel("GB on the busiest device")
    axes.set_title(f"{plans[0].model.name} on {plans[0].layout.devices} {plans[0].device.name}")
    figure.legend(ncols=6, loc="outside lower center", frameon=False, fontsize=9)
    return figure


def _stacked(
    axes: Axes, bars: Mapping[str, object], parts: Sequence[str], *, unit: float = 1.0
) -> list[float]:
    """Draws a bar per name, a colored stretch per attribute in ``parts``; returns their lengths."""
    left = [0.0] * len(bars)
    for color, part in zip(COLORS, parts, strict=False):
        sizes = [getattr(bar, part) / unit for bar in bars.values()]
        axes.barh(list(bars), sizes, left=left, color=color, label=part)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    return left


def time_figure(plan: Plan) -> Figure:
    """Plots a step's time as a waterfall: each part begins where the one before it ends."""
    parts = sorted(plan.time.parts.items(), key=lambda each: -each[1])
    figure, axes = new_picture(8, 1.6 + 0.35 * len(parts))
    total, start = plan.time.total_s, 0.0
    for i, (name, seconds) in enumerate(parts):
        waits = "communication" in name or name.startswith("pipeline")
        color = COLORS[1] if waits else COLORS[0]
        axes.barh(name, seconds, left=start, color=color)
        axes.text(
            start + seconds + 0.01 * total, i, f"{1e3 * seconds:,.0f} ms", va="center", fontsize=9
        )
        start += seconds
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * total)
    axes.set_xlabel("seconds")
    axes.set_title(
        f"{plan.model.name}, {plan.layout.describe()}: {total:.3g} s per step, MFU {plan.mfu:.0%}\n"
        "blue: work, orange: waiting for other devices",
        fontsize=11,
    )
    return figure


def decode_figure(model: PlannedModel, device: Device, serving: Serving, *, context: int) -> Figure:
    """Plots decode tokens/s by batch size, one line per context length, as far as caches fit."""
    figure, axes = new_picture(8, 4.5)
    for color, length in zip(COLORS, sorted({1024, 8192, context}), strict=False):
        steps = by_batch(model, device, serving, context=length)
        fitting = [each for each in steps if each["fits"]]
        if not fitting:
            continue
        axes.plot(
            [each["batch"] for each in fitting],
            [each["tokens_per_s"] for each in fitting],
            "o-",
            color=color,
            markersize=4,
            label=f"{length:,} cached tokens",
        )
        bound = [each for each in fitting if each["bound"] == "compute"]
        axes.plot(
            [each["batch"] for each in bound],
            [each["tokens_per_s"] for each in bound],
            "s",
            color=color,
            markersize=9,
            markerfacecolor="none",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("sequences in a batch, as many as fit")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False, fontsize=9)
    copies = f"{serving.devices} {device.name}"
    axes.set_title(
        f"Decode of {model.name} on {copies}, weights {serving.weights}, cache {serving.cache}\n"
        "squares: bound by compute, others by memory",
        fontsize=11,
    )
    return figure


def roofline_figure(
    model: PlannedModel, device: Device, serving: Serving | None = None, *, context: int = 4096
) -> Figure:
    """Plots attainable FLOP/s by intensity, with prefill and decode at several batch sizes."""
    figure, axes = new_picture(8, 5)
    serving = serving or Serving()
    point = ridge(device, serving.compute)
    intensities = sorted([point, *(2.0**i for i in range(-1, 15))])
    roof = [attainable(device, each, serving.compute) / 1e12 for each in intensities]
    axes.plot(intensities, roof, color="black", linewidth=1.5)
    axes.axvline(point, color="gray", linestyle=":", linewidth=1)
    axes.text(point * 1.1, roof[0] * 1.3, f"ridge: {point:.0f} FLOPs per byte", fontsize=9)

    def mark(name: str, phase: Phase, form: str, color: str, align: str, xytext: tuple[int, int]):
        at = phase.intensity, attainable(device, phase.intensity, serving.compute) / 1e12
        axes.plot(*at, form, color=color)
        axes.annotate(name, at, fontsize=8, ha=align, xytext=xytext, textcoords="offset points")

    for i, batch in enumerate((1, 4, 16, 64, 256)):
        phase = decode(model, device, serving, batch=batch, context=context)
        # Long contexts bring them close together.
        place = ("right", (-8, 3)) if i % 2 else ("left", (7, -9))
        mark(f"decode, batch {batch}", phase, "o", COLORS[1], *place)
    for length in (128, 1024, 8192):
        phase = prefill(model, device, serving, batch=1, length=length)
        place = ("right", (-8, 2)) if phase.intensity < point else ("center", (0, 8))
        mark(f"prefill {length:,}", phase, "s", COLORS[0], *place)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=roof[-1] * 2)
    axes.set_xlabel("FLOPs per byte of memory traffic")
    axes.set_ylabel(f"attainable TFLOP/s, {serving.compute}")
    axes.set_title(f"{model.name} on one {device.name}; decode after {context:,} cached tokens")
    return figure


def pareto_figure(found: Found) -> Figure:
    """Plots step time against memory of the layouts that no other layout beats in both."""
    figure, axes = new_picture(11, 4.5)
    sizes = [each.bytes_total / 1e9 for each in found.pareto]
    seconds = [each.seconds for each in found.pareto]
    axes.step(sizes, seconds, where="post", color=COLORS[0], linewidth=1)
    axes.plot(sizes, seconds, "o", color=COLORS[0])
    apart = max(1, -(-len(found.pareto) // _MOST_NAMED))
    for number, i in enumerate(range(len(found.pareto) - 1, -1, -apart), 1):
        layout = found.pareto[i].layout
        axes.annotate(
            str(number),
            (sizes[i], seconds[i]),
            xytext=(3, 5),
            textcoords="offset points",
            fontsize=9,
        )
        name = (
            f"{number}: {layout.describe()}, ZeRO {layout.zero}, {layout.accumulation} x "
            f"{layout.micro_rows}, {layout.remat}"
        )
        axes.plot([], [], " ", label=name)
    title = "layout, micro-batches, recomputation"
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, handlelength=0, title=title)
    axes.set_ylim(0, 1.15 * max(seconds))
    axes.set_xlabel("GB on the busiest device")
    axes.set_ylabel("seconds per step")
    best = found.best
    axes.set_title(
        f"{best.model.name} on {best.layout.devices} {best.device.name}: "
        f"{found.fitting:,} layouts fit, {len(found.pareto)} are best at their size"
    )
    return figure


def formats_figure() -> Figure:
    """Plots each number format's range on a logarithmic axis, and its resolution."""
    figure, axes = new_picture(9, 4.2)
    for i, each in enumerate(FORMATS):
        for low, high, alpha in (
            (each.smallest, each.smallest_normal, 0.35),
            (each.smallest_normal, each.largest, 1.0),
        ):
            line = {"color": COLORS[0], "alpha": alpha, "linewidth": 9}
            axes.plot([low, high], [i, i], solid_capstyle="butt", **line)
        axes.text(
            1e40, i, f"epsilon {each.epsilon:.3g}, max {each.largest:.3g}", va="center", fontsize=9
        )
    axes.set_yticks(range(len(FORMATS)), [each.name for each in FORMATS])
    axes.set_xscale("log")
    axes.set_xlim(1e-46, 1e62)
    axes.set_xticks([10.0**k for k in range(-40, 41, 20)])
    axes.invert_yaxis()
    axes.set_xlabel("magnitude; lighter: subnormal")
    axes.set_title("Range and resolution of number formats")
    return figure


def recipes_figure() -> Figure:
    """Plots bytes per parameter of each training recipe, by role."""
    figure, axes = new_picture(8, 4.2)
    roles = ("weights", "gradients", "accumulated", "master", "moments")
    left = _stacked(axes, RECIPES, roles)
    for i, total in enumerate(left):
        axes.text(total + 0.2, i, f"{total:.0f}", va="center", fontsize=9)
    axes.set_xlabel("bytes per parameter")
    axes.set_xlim(0, 23)
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.4, -0.15), frameon=False, fontsize=9)
    axes.set_title("What training recipes keep for each parameter")
    return figure
