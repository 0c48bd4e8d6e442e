"""Checks that all ranks run the same program and hold the same state.

Ranks that compile different programs hang in the first collective that they do not share, or,
worse, sum different things. So fingerprints are compared before the first step, when the run can
still be refused.

A replicated tensor has a copy on several devices, and the same program over the same numbers
keeps the copies equal to the last bit. Where one differs, a bit has flipped in a device's memory or
arithmetic, and nothing else in the system would notice.

The sum of a shard is sum_i (2 i + 1) w_i mod 2^32 over its 32-bit words w: the factors are odd,
so one flipped bit always changes it; others pass with probability about 2^-32.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxinfra.errors import ConfigError

_BYTES = 32


def fingerprint(text: str) -> bytes:
    """Computes the SHA-256 of a text in hexadecimal."""
    return hashlib.sha256(text.encode()).digest()


def require_same(parts: Mapping[str, str]) -> dict[str, str]:
    """Checks that all processes have the same texts; returns short fingerprints. A collective.

    Args:
        parts: texts by name, such as the config and the program; all processes pass the same names.

    Raises:
        ConfigError: names the differing text, and the ranks that differ from the majority.
    """
    mine = np.frombuffer(b"".join(map(fingerprint, parts.values())), np.uint8)
    table = np.asarray(multihost_utils.process_allgather(mine))
    table = table.reshape(-1, len(parts), _BYTES)
    for number, name in enumerate(parts):
        prints = [bytes(row[number]).hex() for row in table]
        odd, _ = minority_indices(prints)
        if odd:
            raise ConfigError(describe(name, prints, odd))
    return {name: fingerprint(text).hex()[:16] for name, text in parts.items()}


def describe(name: str, prints: Sequence[str], odd: Sequence[int]) -> str:
    """Formats the error message that names the ranks whose text ``name`` differs."""
    rest = next(rank for rank in range(len(prints)) if rank not in odd)
    ranks = ", ".join(f"rank {rank} ({prints[rank][:16]})" for rank in odd)
    return (
        f"the {name} of {ranks} is not that of rank {rest} ({prints[rest][:16]}); all ranks must "
        "run the same: compare their commands, environment variables and installed versions"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A shard whose copies on different devices are not equal."""

    tensor: str
    odd: tuple[int, ...]  # rows of the hash table that differ from the majority; all in a tie
    is_tie: bool


@final
class StateHash:
    """Computes and compares hashes of a training state's copies on different devices.

    Args:
        abstract: pytree of ShapeDtypeStructs with NamedShardings on one mesh.
    """

    def __init__(self, abstract: Any):
        named = jax.tree_util.tree_leaves_with_path(abstract)
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
        leaves = [leaf for _, leaf in named]
        self._mesh: Mesh = leaves[0].sharding.mesh
        self.devices = list(self._mesh.devices.ravel())
        self._copies = [_copies(leaf, self.devices) for leaf in leaves]
        self._hash = _make_hash(self._mesh, [leaf.sharding.spec for leaf in leaves])

    @property
    def compares(self) -> bool:
        """Whether any shard of the state has copies on different devices."""
        return any(len(group) > 1 for groups in self._copies for group in groups)

    def __call__(self, state: Any) -> UInt32[Array, "devices tensors"]:
        """Computes the hash of each device's shard of each tensor, without waiting for it."""
        return self._hash(jax.tree.leaves(state))

    def compare(self, table: UInt32[np.ndarray, "devices tensors"]) -> list[Mismatch]:
        """Returns the tensors whose copies differ, from the table of their hashes."""
        found = []
        for number, groups in enumerate(self._copies):
            for group in groups:
                odd, is_tie = minority_indices([int(table[row, number]) for row in group])
                if odd:
                    rows = tuple(group if is_tie else (group[position] for position in odd))
                    found.append(Mismatch(tensor=self._names[number], odd=rows, is_tie=is_tie))
        return found

    def processes(self, rows: Sequence[int]) -> list[int]:
        """Returns the processes that own the devices of these rows of the hash table."""
        return sorted({self.devices[row].process_index for row in rows})


def minority_indices(values: Sequence[int | str]) -> tuple[list[int], bool]:
    """Returns the indices of values that differ from the most common value, and whether there is a
    tie. In a tie, the most common value that comes first is taken.
    """
    counts = Counter(values)
    common = [value for value, count in counts.items() if count == max(counts.values())]
    odd = [position for position, value in enumerate(values) if value != common[0]]
    return odd, len(common) > 1


def _copies(leaf: jax.ShapeDtypeStruct, devices: Sequence[jax.Device]) -> list[list[int]]:
    assert leaf.sharding is not None
    held = leaf.sharding.devices_indices_map(leaf.shape)
    groups: dict[Any, list[int]] = {}
    for row, device in enumerate(devices):
        index = tuple(
            part.indices(size) for part, size in zip(held[device], leaf.shape, strict=True)
        )
        groups.setdefault(index, []).append(row)
    return list(groups.values())


def _make_hash(
    mesh: Mesh, specs: Sequence[PartitionSpec]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    def own(leaves: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([_sum(leaf) for leaf in leaves])[None]

    # check_vma: copies that differ are what this is for.
    each = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=PartitionSpec(tuple(mesh.axis_names)),
        check_vma=False,
    )
    return jax.jit(each, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _sum(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32).ravel()
    factors = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * factors, dtype=jnp.uint32)
