"""What a preset resolves to, and where each of its parameters lies, as text to review in a diff."""

import pathlib

import jax
import pytest

from jaxinfra.config.codec import to_json
from jaxinfra.config.mesh import ShardingConfig, parse_mesh
from jaxinfra.config.presets import run_preset
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement, path_name

HERE = pathlib.Path(__file__).parent
# GPT-2's 50,257 tokens divide over no other number of devices.
MESHES = {
    "tiny": "fsdp=4,tensor=2",
    "small": "fsdp=4,tensor=2",
    "tiny_moe": "fsdp=4,tensor=2,expert=2",
    "llama32_1b": "fsdp=4,tensor=2",
    "gpt2": "fsdp=8",
}


def describe(preset: str) -> str:
    """The resolved run, and a row for each parameter: path | shape | dtype | dims | spec."""
    run = run_preset(preset)
    model, mesh = define_model(run.model, execution_on()), parse_mesh(MESHES[preset])
    shardings = Placement(
        mesh=make_mesh(mesh), rules=state_rules(ShardingConfig(), mesh)
    ).parameters(model)
    rows = [("path", "shape", "dtype", "dims", f"spec on {MESHES[preset]}")]
    for (path, shape), named, sharding in zip(
        jax.tree_util.tree_flatten_with_path(model.shapes)[0],
        jax.tree.leaves(model.dims),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        sizes, dims = "x".join(map(str, shape.shape)), " ".join(map(str, named.dims))
        spec = " ".join(str(axis) if axis else "-" for axis in sharding.spec)
        rows.append((path_name(path), sizes, str(shape.dtype), dims, spec))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return f"{to_json(run)}\n{model.num_parameters:,} parameters\n{table}\n"


@pytest.mark.parametrize("preset", MESHES)
def test_preset_is_as_reviewed(preset, request):
    path, text = HERE / f"{preset}.txt", describe(preset)
    if request.config.getoption("--update-golden", default=False):
        path.write_text(text)
    assert text == path.read_text(), "if meant: pytest tests/golden --update-golden"
