"""Layers between the order of checkpoints and the order of a schedule's stages.

Parameters are stored in natural order, stage s holding the s-th part of the stack, so that a
checkpoint does not depend on the schedule. A schedule with several chunks a stage wants other
layers there; they are exchanged before and after a step, each run of layers sent once:
bytes a device = parameters of a stage * (1 - 1/stages), in both directions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.parallel.pipeline.schedule import Schedule

type Tree = Any


def to_stage_order(tree: Tree, schedule: Schedule, *, axis: str) -> Tree:
    """[layers of a stage, ...] in natural order to the stage's chunks, one after the other."""
    return _move(tree, schedule, axis=axis, back=False)


def to_natural_order(tree: Tree, schedule: Schedule, *, axis: str) -> Tree:
    """Undoes ``to_stage_order``."""
    return _move(tree, schedule, axis=axis, back=True)


def _move(tree: Tree, schedule: Schedule, *, axis: str, back: bool) -> Tree:
    chunks = schedule.num_chunks
    if chunks == 1:
        return tree
    rounds = exchange_rounds(schedule)
    if back:
        rounds = [[(target, source) for source, target in pairs] for pairs in rounds]
    stage = jax.lax.axis_index(axis)

    def move(x: jax.Array) -> jax.Array:
        runs = x.reshape(chunks, -1, *x.shape[1:])
        result = jnp.zeros_like(runs)
        for pairs in rounds:
            take, put = (np.zeros(schedule.num_stages, np.int32) for _ in range(2))
            for (source, slot), (target, place) in pairs:
                take[source], put[target] = slot, place
            run = jax.lax.dynamic_index_in_dim(runs, jnp.asarray(take)[stage], keepdims=False)
            run = jax.lax.ppermute(run, axis, [(s[0], t[0]) for s, t in pairs])
            result = jax.lax.dynamic_update_index_in_dim(
                result, run, jnp.asarray(put)[stage], axis=0
            )
        return result.reshape(x.shape)

    return jax.tree.map(move, tree)


type _Place = tuple[int, int]
"""Stage, and run of layers within it."""


def exchange_rounds(schedule: Schedule) -> list[list[tuple[_Place, _Place]]]:
    """(from, to) places of every run of layers, in rounds in which each stage sends one run and
    receives one.

    A stage sends as many runs as it receives, so the moves are a regular bipartite graph, which
    splits into perfect matchings (Koenig 1916); each round is one, found by augmenting paths.
    """
    stages, chunks = schedule.num_stages, schedule.num_chunks
    moves = [
        ((j // chunks, j % chunks), (int(schedule.stage_of[j]), int(schedule.chunk_of[j])))
        for j in range(schedule.num_positions)
    ]
    rounds = []
    for _ in range(chunks):
        matched: dict[int, tuple[_Place, _Place]] = {}  # by target stage
        for source in range(stages):
            _augment(source, moves, matched, set())
        rounds.append(list(matched.values()))
        moves = [move for move in moves if move not in rounds[-1]]
    return rounds


def _augment(
    source: int,
    moves: list[tuple[_Place, _Place]],
    matched: dict[int, tuple[_Place, _Place]],
    seen: set[int],
) -> bool:
    for move in moves:
        target = move[1][0]
        if move[0][0] != source or target in seen:
            continue
        seen.add(target)
        if target not in matched or _augment(matched[target][0][0], moves, matched, seen):
            matched[target] = move
            return True
    return False
