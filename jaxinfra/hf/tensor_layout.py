"""Layouts of Hugging Face tensors, relative to our parameters.

A layout is written like an einsum over named dims. ``"(N H) D -> D N H"`` says that the Hugging
Face tensor is a matrix [N*H, D] and our parameter is [D, N, H]. A layout is a reshape and a
transposition, so it can be inverted exactly.

Letters: D model width, N query heads, K key/value heads, H head width, F mlp width, V vocabulary,
P positions of a learned table, E experts, R compressed (latent) width. An indexer has I heads of
width J.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

type Index = tuple[slice, ...]
"""A slice of every dim, with start and stop, without steps."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """Layouts of a Hugging Face tensor and of our parameter, with the sizes of their dims."""

    theirs: tuple[tuple[str, ...], ...]  # letters that each of their dims is made of
    ours: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor, or of our part of a fused one."""
        return tuple(math.prod(self.sizes[letter] for letter in dim) for dim in self.theirs)

    @property
    def our_shape(self) -> tuple[int, ...]:
        """Shape of one layer of our parameter."""
        return tuple(self.sizes[letter] for letter in self.ours)

    def to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """Converts our whole array to the Hugging Face tensor."""
        order = [self.ours.index(letter) for dim in self.theirs for letter in dim]
        return ours.transpose(order).reshape(self.their_shape)

    def read(self, read_theirs: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """Reads a slice of our parameter, reading only the needed part of the Hugging Face tensor.

        A merged dim is sliced along its first part before reading, and along the others after.
        """
        wanted = dict(zip(self.ours, index, strict=True))
        their_index, shape = [], []
        for dim in self.theirs:
            if not dim:
                their_index.append(slice(0, 1))
                continue
            first, *inner = dim
            width = math.prod(self.sizes[letter] for letter in inner)
            rows = wanted[first]
            their_index.append(slice(rows.start * width, rows.stop * width))
            shape += [rows.stop - rows.start, *(self.sizes[letter] for letter in inner)]
            wanted[first] = slice(0, rows.stop - rows.start)
        letters = [letter for dim in self.theirs for letter in dim]
        block = read_theirs(tuple(their_index)).reshape(shape)
        block = block.transpose([letters.index(letter) for letter in self.ours])
        return block[tuple(wanted[letter] for letter in self.ours)]


@functools.cache  # the same for every layer and expert
def parse_layout(text: str, our_shape: tuple[int, ...]) -> TensorLayout:
    """Parses ``"(N H) D -> D N H"``; sizes are those of our parameter."""
    theirs, ours = text.split("->")
    letters = tuple(ours.split())
    # A dim of theirs that is no letter of ours, such as 1, has one element.
    dims = tuple(
        tuple(letter for letter in dim.strip("()").split() if letter in letters)
        for dim in re.findall(r"\([^)]*\)|\S", theirs)
    )
    assert sorted(letter for dim in dims for letter in dim) == sorted(letters), text
    sizes = dict(zip(letters, our_shape, strict=True))
    return TensorLayout(theirs=dims, ours=letters, sizes=sizes)
