"""Layers between the order of checkpoints and the order of a schedule's stages.

The executor's runs of layers are equally long. Where the layers do not divide over them, later runs
have one layer less, and one whose weights are zero instead: with nothing added to the residual
stream it is the identity, its gradients are not looked at, and it costs what the longest run's last
layer does, for which its stage would wait.

Parameters are stored in natural order, stage s holding the s-th part of the stack, so that a
checkpoint does not depend on the schedule. A schedule with several chunks per stage wants other
layers there; they are exchanged before and after a step, each run of layers sent once:
bytes per device = parameters of a stage * (1 - 1/stages), in both directions.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfra.parallel.pipeline.schedule import Schedule
from jaxinfra.parallel.pipeline.slices import Tree


def layer_places(num_layers: int, runs: int) -> np.ndarray:
    """Int [runs * layers of the longest]: which layer stands there, -1 for one of zeros."""
    longest, first_short = -(-num_layers // runs), num_layers % runs or runs
    places = np.full((runs, longest), -1)
    start = 0
    for run in range(runs):
        size = longest - (run >= first_short)
        places[run, :size] = np.arange(start, start + size)
        start += size
    return places.reshape(-1)


def pad_layers(tree: Tree, places: np.ndarray) -> Tree:
    """[layers, ...] to [places, ...], with zeros where no layer stands."""
    if np.all(places >= 0):
        return tree

    def pad(x: jax.Array) -> jax.Array:
        is_layer = (places >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(
            is_layer, jnp.take(x, np.maximum(places, 0), axis=0), jnp.zeros_like(x[:1])
        )

    return jax.tree.map(pad, tree)


def unpad_layers(tree: Tree, places: np.ndarray) -> Tree:
    """Undoes ``pad_layers``."""
    if np.all(places >= 0):
        return tree
    return jax.tree.map(lambda x: jnp.take(x, np.flatnonzero(places >= 0), axis=0), tree)


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
