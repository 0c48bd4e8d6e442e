"""Rules of the style guide that a syntax tree can check."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SYSTEM = sorted((ROOT / "jaxinfra").rglob("*.py"))
PRODUCT = SYSTEM + sorted((ROOT / "pallas_kernels").rglob("*.py"))

FLOAT = re.compile(r"b?float(16|32|64|8_\w+|4_\w+)")


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def device_floats(tree: ast.AST) -> list[str]:
    """`jnp.float32` and the like; NumPy tables on the host are not a policy's business."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in attributes
        if FLOAT.fullmatch(node.attr) and ast.unparse(node.value) in ("jnp", "jax.numpy")
    ]


def placements(tree: ast.AST) -> list[str]:
    """Every mention of a mesh layout."""
    found = []
    for node in ast.walk(tree):
        names = {
            ast.alias: lambda node: node.name,
            ast.Attribute: lambda node: node.attr,
            ast.Name: lambda node: node.id,
        }
        mentioned = names[type(node)](node) if type(node) in names else ""
        if mentioned in ("PartitionSpec", "NamedSharding"):
            found.append(f"line {node.lineno}: {mentioned}")
    return found


def test_only_numerics_names_float_dtypes():
    found = {
        name(path): named
        for path in SYSTEM
        if "numerics" not in path.parts and "float" in path.read_text()
        if (named := device_floats(tree_of(path)))
    }
    assert not found, "ask the precision policy"


def test_layers_declare_logical_axes_only():
    for path in (ROOT / "jaxinfra" / "model").rglob("*.py"):
        assert not placements(tree_of(path)), f"{name(path)}: parallel/ places"


def test_modules_are_named_for_what_they_do():
    vague = {"util", "utils", "helper", "helpers", "misc"}
    assert not [name(path) for path in PRODUCT if vague & {*path.parts, path.stem}]


def tracked_files() -> list[pathlib.Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    paths = [ROOT / line for line in listing.stdout.split("\0") if line]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize(
    "folder", ["experiments/examples", "tools", *map(name, (ROOT / "experiments/bench").glob("*/"))]
)
def test_scripts_hide_no_standard_module(folder):
    """Python puts a script's folder first on its path: a neighbour named ``copy`` broke JAX."""
    names = {path.stem for path in (ROOT / folder).iterdir()}
    assert not names & set(sys.stdlib_module_names)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is tracked is known to git only")
def test_tracked_files_name_no_registry_and_no_home():
    """They say what is installed; where from is the business of the machine that installs."""
    hosts = [r"\.".join(parts) for parts in (("py" + "pi", "org"), ("python" + "hosted", "org"))]
    private = re.compile("|".join([*hosts, r"(?<![\w.])/(root|home/\w+|Users/\w+)/"]))
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found = private.search(text)
        assert not found, f"{name(path)} names {found.group()}"


# A name stands for one class of the product, except where it is the same thing on two floors.
SHARED_NAMES = {
    "UnsupportedError": "pallas_kernels is a leaf: jaxinfra.ops raises ours from its own",
}


def public_classes(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.TypeAlias):
            names.append(node.name.id)
    return [each for each in names if not each.startswith("_")]


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for path in PRODUCT:
        for each in public_classes(tree_of(path)):
            places.setdefault(each, []).append(name(path))
    twice = {each for each, where in places.items() if len(where) > 1}
    assert twice == SHARED_NAMES.keys(), {each: places[each] for each in twice}


def called(node: ast.Call) -> str | None:
    """The last part of a name with dots."""
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def test_execution_is_built_in_one_module():
    builders = [
        name(path)
        for path in SYSTEM
        if "Execution" in path.read_text()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and called(node) == "Execution"
    ]
    assert set(builders) == {"jaxinfra/parallel/execution.py"}


def test_layers_know_no_prefill():
    """A prefill is a chunk after an empty cache: what a layer is given says so."""
    for path in (ROOT / "jaxinfra" / "model").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            assert not (isinstance(node, ast.arg) and "prefill" in node.arg), name(path)


def test_numerics_multiplies_nothing():
    """Products are an op's, which a kernel may take."""
    for path in (ROOT / "jaxinfra" / "numerics").rglob("*.py"):
        called = {
            ast.unparse(node.func).split(".")[-1]
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call)
        }
        assert not called & {"einsum", "dot", "dot_general", "matmul", "tensordot"}, name(path)


def test_functions_are_short():
    """One screen of 60 lines, but for a few: signatures and docstrings of public kernels."""
    lengths = {
        f"{name(path)}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in PRODUCT
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {each: lines for each, lines in lengths.items() if lines > 60}
    assert max(long.values()) <= 100, long
    assert len(long) <= 12, long
