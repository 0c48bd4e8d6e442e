"""Tables that ``jaxinfra plan`` prints in the terminal."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from jaxinfra.planning.devices import Device
from jaxinfra.planning.formats import CORRESPONDENCES, FORMATS, RECIPES, Correspondence
from jaxinfra.planning.memory import kv_table
from jaxinfra.planning.model import (
    PlannedModel,
    active_parameters,
    parameters_by_role,
    total_parameters,
)
from jaxinfra.planning.plan import Plan
from jaxinfra.planning.receipt import Receipt
from jaxinfra.planning.search import Found


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Builds a plain text table; every column but the first is right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _cells(rows: Iterable[object], *forms: str) -> list[list[str]]:
    """Formats each row by the same forms, such as ``{0.name}`` or ``{0[seconds]:.3g}``."""
    return [[form.format(row) for form in forms] for row in rows]


def show(*parts: RenderableType) -> None:
    """Prints tables to the terminal, or 110 columns wide if output is not a terminal."""
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    console.print(Group(*parts))


def gigabytes(size: float) -> str:
    """Formats a number of bytes in decimal gigabytes (GB)."""
    return f"{size / 1e9:,.2f} GB"


def plan_tables(plan: Plan, *, tokens: float | None) -> list[RenderableType]:
    """Builds the tables of one plan: memory, time and communication."""
    model, layout, device = plan.model, plan.layout, plan.device
    values = plan.as_dict()
    sizes = [(name, gigabytes(values["memory_bytes"][name])) for name in values["memory_bytes"]]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    sizes.append((f"of {gigabytes(device.hbm_bytes)}", verdict))
    logits = gigabytes(values["logits_bytes"])
    sizes.append(("a chunk of logits, while the loss runs (in buffers)", logits))
    forms = [
        (
            form if form != layout.remat.value else f"{form} (this plan)",
            gigabytes(each.memory.activations),
            gigabytes(each.memory.total),
            f"{each.time.total_s:.4g} s",
            "fits" if each.fits else "does not fit",
        )
        for form, each in plan.by_remat().items()
    ]
    parts = [
        (name, f"{1e3 * seconds:,.1f} ms", f"{seconds / plan.time.total_s:.1%}")
        for name, seconds in sorted(plan.time.parts.items(), key=lambda each: -each[1])
    ]
    traffic = [
        (each.axis, each.kind, each.link, f"{each.count:,.0f}", gigabytes(each.wire_bytes))
        for each in plan.traffic
    ]
    title = f"{model.name} on {layout.devices} {device.name}"
    tables: list[RenderableType] = [
        grid(title, ("", ""), _plan_facts(plan, values, tokens=tokens)),
        grid("Memory of the busiest device", ("role", "bytes"), sizes),
        grid("By recomputation", ("form", "activations", "all", "step", ""), forms),
        grid("A step's time", ("part", "time", "share"), parts),
    ]
    if traffic:
        columns = ("axis", "kind", "link", "calls", "sent")
        tables.append(grid("Communication of one device and step", columns, traffic))
    hidden = ", ".join(f"{axis} {1e3 * s:,.1f} ms" for axis, s in plan.time.hidden.items())
    if hidden:
        tables.append(f"Hidden behind compute: {hidden}")
    roles = [(role, f"{count:,}") for role, count in parameters_by_role(model).items()]
    tables.append(grid("Parameters", ("role", "elements"), roles))
    title = f"Constants of {device.name}"
    constants = Table("constant", "from", title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in device.sources.items():
        constants.add_row(*row)
    tables.append(constants)
    return tables


def _plan_facts(
    plan: Plan, values: Mapping[str, Any], *, tokens: float | None
) -> list[tuple[str, str]]:
    """The plan's figures by name, in the order shown."""
    model, layout = plan.model, plan.layout
    facts = [
        ("parameters", f"{total_parameters(model):,}"),
        ("active per token", f"{active_parameters(model):,}"),
        ("FLOPs per token: training", f"{values['flops_per_token']:.4g}"),
        ("    prefill", f"{values['prefill_flops_per_token']:.4g}"),
        (
            f"    decode after {layout.length:,} cached",
            f"{values['decode_flops_per_token']:.4g}",
        ),
        ("KV bytes per token, bf16", f"{values['kv_bytes_per_token']:,.0f}"),
        ("    of one such sequence", gigabytes(values["kv_bytes"])),
        ("mesh", layout.describe()),
        ("batch", f"{layout.batch} x {layout.length} tokens"),
        ("micro-batches", f"{layout.accumulation} of {layout.micro_rows} sequences a device"),
        ("recomputation, recipe, ZeRO", f"{layout.remat}, {layout.recipe}, {layout.zero}"),
        *([] if plan.gathers is None else [("gathered weights", plan.gathers.describe())]),
        ("predicted step", f"{plan.time.total_s:.4g} s"),
        ("tokens/s a device", f"{plan.tokens_per_s_per_device:,.0f}"),
        ("MFU", f"{plan.mfu:.1%}"),
        ("pipeline bubble", f"{plan.time.bubble_fraction:.1%}"),
        ("dollars a billion tokens", f"{plan.dollars_per_billion_tokens:,.2f}"),
    ]
    if tokens is not None:
        facts.append((f"days for {tokens:.3g} tokens", f"{plan.days(tokens):,.1f}"))
        facts.append(("dollars", f"{plan.dollars(tokens):,.0f}"))
    return facts


def ranking(found: Found) -> list[RenderableType]:
    """Builds tables of the best layout, its best alternatives, and why they are slower."""
    several = len(found.question.recipes) > 1
    rows = [_ranked(found.best, several)]
    rows += [(*_ranked(plan, several), why) for plan, why in found.runners_up]
    title = f"{found.tried:,} layouts tried, {found.fitting:,} fit; the fastest of each mesh"
    columns = ["mesh", "ZeRO", "micro", "remat", "step", "MFU", "GB", "loses by"]
    others = [
        (
            f"{each.choice} {each.value}",
            each.plan.layout.describe(),
            f"{each.plan.time.total_s:.3g} s",
            f"{each.plan.memory.total / 1e9:,.0f}",
            each.why,
        )
        for each in found.alternatives
    ]
    return [
        grid(title, columns, rows),
        grid(
            "The best with another choice than the winner's",
            ("choice", "mesh", "step", "GB", "is not chosen"),
            others,
        ),
    ]


def _ranked(plan: Plan, with_recipe: bool) -> tuple[object, ...]:
    layout = plan.layout
    form = layout.remat.value
    return (
        layout.describe(),
        layout.zero,
        f"{layout.accumulation} x {layout.micro_rows}",
        f"{form}, {layout.recipe}" if with_recipe else form,
        f"{plan.time.total_s:.3g} s",
        f"{plan.mfu:.1%}",
        f"{plan.memory.total / 1e9:,.0f}",
    )


def receipt_tables(receipt: Receipt) -> list[RenderableType]:
    """Builds tables of predicted and compiled bytes, with the program's calls if they differ."""
    arguments = [(name, f"{size:,}", "") for name, size in receipt.predicted_arguments.items()]
    predicted = sum(receipt.predicted_arguments.values())
    arguments.append(("all", f"{predicted:,}", f"{receipt.argument_bytes:,}"))
    temporaries = receipt.predicted_temporaries
    arguments.append(("temporaries", f"{temporaries:,.0f}", f"{receipt.temporary_bytes:,}"))
    whole = f"{predicted + temporaries:,.0f}"
    arguments.append(("the whole step", whole, f"{receipt.step_bytes:,}"))
    if receipt.budget_bytes is not None:
        verdict = "fits" if receipt.fits else "DOES NOT FIT"
        arguments.append(("that a run may use", f"{receipt.budget_bytes:,.0f}", verdict))
    exchanged = [
        (
            f"{line.axis} {line.purpose}",
            " + ".join(sorted(line.compiled.kinds)) or "none",
            f"{line.predicted.array_bytes:,.0f}",
            f"{line.compiled.array_bytes:,.0f}",
            "as predicted" if line.holds else f"{line.error:+.1%}",
            f"{line.predicted.sent_bytes:,.0f}",
            f"{line.compiled.sent_bytes:,.0f}",
        )
        for line in receipt.lines
    ]
    columns = ("what", "compiled to", "bytes predicted", "compiled", "", "sent predicted", "sent")
    tables: list[RenderableType] = [
        grid(f"Bytes of one of {receipt.target}", ("", "predicted", "compiled"), arguments),
        grid("Arrays exchanged by one device and step", columns, exchanged),
    ]
    for line in receipt.lines:
        if line.calls:
            calls = [(name, f"{size:,}") for name, size in line.calls.items()]
            title = f"{line.axis} {line.purpose}: the program's largest calls"
            tables.append(grid(title, ("call", "bytes"), calls))
    return tables


def _weights_row(each: Mapping[str, Any]) -> tuple[str, ...]:
    if "unsupported" in each:
        return (each["weights"], each["unsupported"], *("",) * 4)
    return (
        each["weights"],
        f"{each['weight_bytes'] / 1e9:,.2f} GB",
        f"{each['bits_per_weight']:.2f}",
        f"{each['max_batch']:,}",
        f"{1e3 * each['decode_s']:,.2f} ms",
        f"{each['over_bf16']:.2f}x",
    )


def serving_tables(
    model: PlannedModel, device: Device, figures: Mapping[str, Any]
) -> list[RenderableType]:
    """Builds tables for serving: what fits, how fast it is, and other weight and cache formats.

    Args:
        figures: ``inference.summary`` of the model.
    """
    batch, context = figures["batch"], figures["context"]
    caches = _cells(
        kv_table(model),
        *("{0[form]}", "{0[cache_format]}", "{0[bytes_per_token]:,.0f}", "{0[over_mha]:.1f}x"),
    )
    fits = [
        (
            each["cache"],
            f"{each['max_batch']:,}",
            f"{each['max_context']:,}",
            _crossing(each["compute_bound_batch"]),
        )
        for each in figures["by_cache"]
    ]
    weights = [_weights_row(each) for each in figures["by_weights"]]
    steps = [
        (
            f"{each['batch']:,}",
            f"{1e3 * each['seconds']:,.2f} ms",
            f"{each['tokens_per_s']:,.0f}",
            f"{each['intensity']:,.1f}",
            each["bound"],
            "" if each["fits"] else "does not fit",
        )
        for each in figures["by_batch"]
    ]
    fitting = ("cache", f"batch of {context:,} tokens", "longest sequence", "compute-bound from")
    kept = ("weights", "kept", "bits each", f"batch of {context:,} tokens", "per step", "of bf16")
    columns = ("batch", "per step", "tokens/s", "FLOPs per byte", "bound by", "")
    return [
        grid(f"Serving {model.name} on {device.name}", ("", ""), _serving_facts(figures)),
        grid("KV cache", ("heads", "format", "bytes per token", "less than MHA"), caches),
        grid(f"Weights by format, and a decode step of {batch:,}", kept, weights),
        grid("What fits beside the weights", fitting, fits),
        grid(f"Decode after {context:,} cached tokens", columns, steps),
    ]


def _serving_facts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of a served model by name and unit, in the order shown."""
    batch, context = figures["batch"], figures["context"]
    crossing = [_crossing(figures[f"compute_bound_batch{each}"]) for each in ("", "_without_cache")]
    return [
        ("devices, for one copy", f"{figures['devices']:,}"),
        ("weights", f"{figures['weights']}, {gigabytes(figures['weight_bytes'])}"),
        ("KV cache", f"{figures['cache']}, {figures['kv_bytes_per_token']:,.0f} bytes per token"),
        (f"sequences of {context:,} tokens that fit", f"{figures['max_batch']:,}"),
        ("tokens of the longest sequence that fits", f"{figures['max_context']:,}"),
        ("tokens of the longest sequence trained", f"{figures['trained_positions']:,}"),
        (
            f"prefill of {batch:,} x {context:,} tokens",
            f"{1e3 * figures['prefill_s']:,.1f} ms, bound by {figures['prefill_bound']}",
        ),
        (
            f"decode step of {batch:,} after {context:,}",
            f"{1e3 * figures['decode_s']:,.2f} ms, bound by {figures['decode_bound']}",
        ),
        ("    tokens/s", f"{figures['decode_tokens_per_s']:,.0f}"),
        ("    FLOPs per byte", f"{figures['decode_intensity']:,.1f}"),
        ("ridge of the roofline, FLOPs per byte", f"{figures['ridge_flops_per_byte']:,.1f}"),
        (f"compute-bound batch after {context:,}", crossing[0]),
        ("compute-bound batch without caches", crossing[1]),
    ]


def _crossing(batch: int | None) -> str:
    """Formats the batch size from which decode is compute-bound."""
    return "none" if batch is None else f"{batch:,}"


def format_tables() -> list[RenderableType]:
    """Builds tables of number formats, and of bytes per parameter in each training recipe."""
    formats = _cells(
        FORMATS,
        *("{0.name}", "{0.bits}", "{0.exponent_bits}, {0.fraction_bits}", "{0.largest:.6g}"),
        *("{0.smallest_normal:.4g}", "{0.smallest:.4g}", "{0.epsilon:.4g}"),
        "{0.decimal_digits:.1f}",
    )
    recipes = [(*dataclasses.astuple(each), each.total) for each in RECIPES.values()]
    columns = ("format", "bits", "exp, frac", "largest", "normal", "smallest", "epsilon", "digits")
    parts = ("recipe", "matmul", "weights", "grads", "summed", "master", "moments", "bytes")
    return [
        grid("Number formats", columns, formats),
        grid("Bytes per parameter", parts, recipes),
        "Published recipes as settings, and what differs",
        *(_correspondence(each) for each in CORRESPONDENCES),
    ]


def _correspondence(each: Correspondence) -> str:
    published, ours = RECIPES[each.published], RECIPES[each.ours]
    lines = [
        f"\n{each.published}, {published.total} bytes: {each.ours}, {ours.total} bytes",
        *(f"  --set '{setting}'" for setting in each.settings),
        *(f"  {line}" for line in each.differs),
    ]
    return "\n".join(lines)
