"""Steps that other benchmarks measured, as the planner's questions.

Read by ``plan_check --against``: results of ``parallel_step``, ``pipeline`` and ``context_step``.
What the planner does not model is left out: plain JAX, XLA's O1, schedules other than 1F1B and
interleaved.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from experiments.bench.training.parallel_step import PARTS
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.presets import MODELS
from jaxinfra.config.run import Remat
from jaxinfra.errors import DataError
from jaxinfra.planning.layout import Layout, lay_out
from jaxinfra.planning.model import PlannedModel, plan_model


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A step of ours, where it was measured, and what the planner is asked about it."""

    name: str
    environment: dict[str, Any]  # device, clocks, versions, command
    model: PlannedModel
    layout: Layout
    optimizer: bool  # whether the program updates the parameters
    seconds: float
    temporary_bytes: float


def measured_steps(file: pathlib.Path) -> list[Measured]:
    """The steps in a results file; raises DataError where it is none of those known."""
    values = json.loads(file.read_text(encoding="utf-8"))
    command = values["environment"]["command"]
    for benchmark, reader in _READERS.items():
        if f".{benchmark} " in command:
            environment = values["environment"]
            return [dataclasses.replace(each, environment=environment) for each in reader(values)]
    raise DataError(f"{file}: made by {command!r}; steps are read of {', '.join(_READERS)}")


def _parallel_step(values: dict[str, Any]) -> Iterator[Measured]:
    # Some results hold arguments as text.
    arguments = {name: _plain(value) for name, value in values["arguments"].items()}
    preset = arguments["preset"] or PARTS[arguments["part"]][0]
    config = MODELS[preset]()
    layers = arguments["layers"]
    if layers is None and arguments["part"] == "tensor" and arguments["preset"] is None:
        layers = 8  # parallel_step cuts the 8B model to as many
    if layers is not None:
        config = config.with_layers(layers)
    model = plan_model(config, name=preset)
    for name, row in values["rows"].items():
        devices = row["devices"]
        axes: dict[str, dict[str, Any]] = {
            "one": {},
            "fsdp": {"fsdp": devices},
            "tensor": {"tensor": devices},
            "tensor-sp": {"tensor": devices, "sequence_parallel": True},
        }
        if name not in axes or "ms" not in row:
            continue
        layout = lay_out(
            length=arguments["length"],
            batch=arguments["batch"] * devices,
            remat=Remat(arguments["remat"]),
            **axes[name],
        )
        yield Measured(
            name=f"{preset} of {model.config.num_layers} layers, {name}",
            environment={},
            model=model,
            layout=layout,
            optimizer=True,
            seconds=row["ms"] / 1e3,
            temporary_bytes=row["temp_gib"] * 2**30,
        )


def _plain(value: Any) -> Any:
    if value == "None":
        return None
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _pipeline(values: dict[str, Any]) -> Iterator[Measured]:
    settings, devices = values["settings"], values["environment"]["num_devices"]
    sizes = {name: int(settings[name]) for name in _SIZES}
    for row in values["rows"]:
        schedule, _, micro = row["name"].partition(" m=")
        forms: dict[str, dict[str, Any]] = {
            "alone": {},
            "1f1b": {"pipe": devices},
            "interleaved": {"pipe": devices, "chunks": int(settings["chunks"])},
            "fsdp": {"fsdp": devices},
        }
        if schedule not in forms or "step_s" not in row:
            continue
        count = int(micro)
        layers = sizes["layers"] // (devices if schedule == "alone" else 1)
        layout = lay_out(
            length=sizes["length"],
            batch=count * sizes["rows"],
            accumulation=count // devices if schedule == "fsdp" else count,
            remat=Remat(settings["remat"]),
            **forms[schedule],
        )
        yield Measured(
            name=f"{layers} layers of {sizes['width']}, {row['name']}, gradients only",
            environment={},
            model=_llama("llama", layers, sizes, tie=False),
            layout=layout,
            optimizer=False,
            seconds=row["step_s"],
            temporary_bytes=row["temp_gib"] * 2**30,
        )


_SIZES = ("layers", "width", "hidden", "heads", "kv_heads", "head_dim", "vocab", "length", "rows")


def _context_step(values: dict[str, Any]) -> Iterator[Measured]:
    arguments, devices = values["arguments"], values["environment"]["num_devices"]
    width = arguments["heads"] * arguments["head_width"]
    sizes = {
        "width": width,
        "hidden": 4 * width,
        "heads": arguments["heads"],
        "kv_heads": arguments["kv_heads"],
        "head_dim": arguments["head_width"],
        "vocab": arguments["vocabulary"],
        "length": arguments["tokens"],
    }
    yield Measured(
        name=f"{arguments['layers']} layers of {width}, {arguments['tokens']:,} tokens",
        environment={},
        model=_llama("small llama", arguments["layers"], sizes, tie=True),
        layout=lay_out(
            length=arguments["tokens"],
            batch=1,
            context=devices,
            remat=Remat(arguments["remat"]),
        ),
        optimizer=True,
        seconds=min(values["step_s"][1:] or values["step_s"]),
        temporary_bytes=values["temp_gib"] * 2**30,
    )


def _llama(name: str, layers: int, sizes: dict[str, int], *, tie: bool) -> PlannedModel:
    attention = GroupedAttentionConfig(
        num_q_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        rope=None,
    )
    block = BlockConfig(mixer=attention, feed_forward=MlpConfig(hidden_dim=sizes["hidden"]))
    config = ModelConfig(
        vocab_size=sizes["vocab"],
        model_dim=sizes["width"],
        max_positions=sizes["length"],
        stacks=stacked(block, num_layers=layers),
        tie_embeddings=tie,
    )
    return plan_model(config, name=name)


_READERS = {
    "parallel_step": _parallel_step,
    "pipeline": _pipeline,
    "context_step": _context_step,
}
