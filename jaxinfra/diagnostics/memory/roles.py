"""What a buffer is for."""

import re
from collections.abc import Iterable

from jaxinfra.diagnostics.trace import scope_of
from jaxinfra.hlo.live import Life, Lives

WEIGHTS = "weights"
COPIES = "weight copies"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
STATE = "model state"
ACTIVATIONS = "activations"
CACHES = "caches"
BATCH = "batch"
COLLECTIVES = "collective buffers"
TEMPORARIES = "temporaries"
RESULTS = "results"
FRAGMENTATION = "fragmentation"

ROLES = (
    WEIGHTS, COPIES, GRADIENTS, OPTIMIZER, STATE, ACTIVATIONS, CACHES, BATCH, COLLECTIVES,
    TEMPORARIES, RESULTS, FRAGMENTATION,
)  # fmt: skip
"""All roles, in the order shown."""

_ARGUMENTS = (
    (r"^(state\.)?optimizer", OPTIMIZER),
    (r"^state\.model_state", STATE),
    (r"cache|pages|pools", CACHES),
    (r"^(batch|rows|targets_BT)", BATCH),
    (r"parameters|frozen|weights|tree", WEIGHTS),
)
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-\w+)"
    r"(-start|-done)?"
)


def argument_role(path: str) -> str:
    """The role of a program's argument by its path, such as ``state.optimizer[0].mu['w']``."""
    return next((role for pattern, role in _ARGUMENTS if re.search(pattern, path)), STATE)


def argument_name(path: str) -> str:
    """A path as people write it: ``state.parameters['mlp']['up']`` is ``mlp/up``."""
    keys = re.findall(r"\['?([^'\]]+)'?\]", path)
    return "/".join(keys) if "[" in path else path


def buffer_role(life: Life, lives: Lives) -> str:
    """The role of a buffer that the program makes for itself."""
    life = _of_loop(life, lives)
    operation = life.operation
    if _COLLECTIVE.fullmatch(operation.opcode):
        return COLLECTIVES
    in_optimizer = _in_optimizer(operation.op_name)
    feeds_optimizer = any(_in_optimizer(use.op_name) for use in life.uses)
    if in_optimizer or not life.from_batch:
        return OPTIMIZER if in_optimizer or feeds_optimizer else COPIES
    if feeds_optimizer:
        return GRADIENTS
    forward = "jvp(" in operation.op_name and "transpose(" not in operation.op_name
    if forward and any("transpose(" in use.op_name for use in life.uses):
        return ACTIVATIONS
    return TEMPORARIES


def _of_loop(life: Life, lives: Lives) -> Life:
    """The loop's result that a buffer becomes part of, in its place; else the buffer itself."""
    operation = life.operation
    loops = {use.id for use in life.uses if use.opcode == "while"}
    # What a loop's body is given lies in the loop's place, and comes out of the next loop to end.
    is_state = operation.opcode == "parameter"
    if loops or is_state:
        for other in lives.by_place[life.place]:
            result = other.operation
            next_loop = is_state and result.opcode == "while" and other.born > life.born
            if other is not life and (result.id in loops or next_loop):
                return _of_loop(other, lives)
    return life


def buffer_name(life: Life, lives: Lives, *, depth: int = 3) -> str:
    """The named scope that a buffer is of, such as ``mlp``; of a loop's result that of its use."""
    life = _of_loop(life, lives)
    name = _scope([life.operation.op_name])
    if name == "other":
        name = _scope(use.op_name for use in life.uses)
    if name == "other" and depth:
        for use in life.uses:
            for other in lives.made_by.get(use.id, ()):
                found = buffer_name(other, lives, depth=depth - 1)
                if other is not life and found != "other":
                    return found
    return name


def _in_optimizer(op_name: str) -> bool:
    return scope_of(op_name) == "optimizer"


def _scope(op_names: Iterable[str]) -> str:
    for op_name in op_names:
        scope = scope_of(op_name).removesuffix(" backward").removesuffix(" recomputed")
        if scope != "other":
            return scope
    return "other"
