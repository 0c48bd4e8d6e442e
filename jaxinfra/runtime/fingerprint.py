"""Do all ranks run the same program? Asked before the first step, when it can still be refused.

Ranks that compile different programs hang in the first collective that they do not share, or, what
is worse, add up different things.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jax.experimental import multihost_utils

from jaxinfra.errors import ConfigError

_BYTES = 32


def fingerprint(text: str) -> bytes:
    """SHA-256."""
    return hashlib.sha256(text.encode()).digest()


def require_same(parts: Mapping[str, str]) -> dict[str, str]:
    """Compares texts between all processes; returns their fingerprints, shortened. A collective.

    Args:
        parts: name to text, such as the config and the program; the same names everywhere.

    Raises:
        ConfigError: names the part, and the ranks whose text is not that of most.
    """
    mine = np.frombuffer(b"".join(map(fingerprint, parts.values())), np.uint8)
    table = np.asarray(multihost_utils.process_allgather(mine))
    table = table.reshape(-1, len(parts), _BYTES)
    for number, name in enumerate(parts):
        prints = [bytes(row[number]).hex() for row in table]
        if odd := deviating(prints):
            raise ConfigError(describe(name, prints, odd))
    return {name: fingerprint(text).hex()[:16] for name, text in parts.items()}


def deviating(prints: Sequence[str]) -> list[int]:
    """Ranks that differ from the commonest value (of equally common ones, the lowest rank's)."""
    counts = Counter(prints)
    common = max(counts.values())
    expected = next(value for value in prints if counts[value] == common)
    return [rank for rank, value in enumerate(prints) if value != expected]


def describe(name: str, prints: Sequence[str], odd: Sequence[int]) -> str:
    """The refusal."""
    rest = next(rank for rank in range(len(prints)) if rank not in odd)
    ranks = ", ".join(f"rank {rank} ({prints[rank][:16]})" for rank in odd)
    return (
        f"the {name} of {ranks} is not that of rank {rest} ({prints[rest][:16]}); all ranks must "
        "run the same: compare their commands, environment variables and installed versions"
    )
