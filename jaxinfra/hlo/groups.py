"""Who takes part in a collective of compiled HLO: the devices of a group, and the mesh axes that
tell them apart.

XLA writes groups in three ways: listed (``{{0,1},{2,3}}``), as a reshaped and transposed iota
(``[2,2]<=[2,2]T(1,0)``), and as axes of a mesh whose names it made up (``mesh['a'=2,'b'=2]
{'b'}``). Its device numbers are places in the mesh's order.
"""

import re
from collections.abc import Mapping

import numpy as np

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def first_group(rest: str) -> tuple[int, ...]:
    """Device numbers of one group, as the text of a collective's instruction gives them; of a
    permute, a sender and its receiver.

    Raises ValueError for another way of writing.
    """
    if match := _MESH.search(rest):
        return _of_mesh(*match.groups())
    if match := _IOTA.search(rest):
        groups, size, shape, order = match.groups()
        ids = np.arange(int(groups) * int(size)).reshape(_numbers(shape))
        if order:
            ids = ids.transpose(_numbers(order))
        return tuple(ids.reshape(int(groups), int(size))[0].tolist())
    if match := _LISTED.search(rest):
        return tuple(_numbers(match[1]))
    if match := _PAIRS.search(rest):
        return int(match[1]), int(match[2])
    raise ValueError(f"groups of a collective were not understood: {rest[:200]}")


def _of_mesh(mesh: str, device_ids: str | None, axes: str) -> tuple[int, ...]:
    sizes = [(name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)]
    if device_ids:
        raise ValueError(f"groups over a mesh with its own device order: {device_ids[:80]}")
    ids = np.arange(np.prod([size for _, size in sizes], dtype=int)).reshape([n for _, n in sizes])
    # A part of an axis, 'x':(2)4, is the second of its factors 2, 4, rest.
    chosen: dict[str, tuple[int, int]] = {}
    for name, before, part in _AXIS.findall(axes):
        chosen[name] = (int(before or 1), int(part or dict(sizes)[name]))
    index: list[slice | int] = []
    for name, size in sizes:
        before, part = chosen.get(name, (size, 1))
        step = size // (before * part)
        index.append(slice(0, part * step, step) if part > 1 else 0)
    return tuple(np.atleast_1d(ids[tuple(index)]).ravel().tolist())


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def axes_between(group: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes over which these devices differ.

    Args:
        mesh: axes and sizes in the mesh's order, whose places the numbers are.
    """
    places = np.array(np.unravel_index(group, tuple(mesh.values())))
    return tuple(axis for axis, each in zip(mesh, places, strict=True) if len(np.unique(each)) > 1)
