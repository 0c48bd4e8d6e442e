"""Cases that `make test` leaves to `make test-full`, each with a test that fails by its faults.

The default command has one case of each capability, at the cheapest level that catches the fault.
A test that is slow in itself is marked at its place. These are cases of parametrized tests, or
tests beside one that fails where they do. Each file of this package has those of a folder of
tests: by test file, names as pytest writes them and who fails instead.
"""

from collections.abc import Sequence

import pytest

from near_copies.e2e import E2E
from near_copies.kernels import KERNELS
from near_copies.sharded import SHARDED
from near_copies.unit import UNIT

NEAR_COPIES = {
    f"{folder}/{file}": names
    for folder, files in (("e2e", E2E), ("kernels", KERNELS), ("sharded", SHARDED), ("unit", UNIT))
    for file, names in files.items()
}


def mark_slow(items: Sequence[pytest.Item]) -> set[str]:
    """Marks them, and returns what is listed here of a file that was collected and is not in it."""
    collected = {"/".join(item.path.parts[-2:]) for item in items}
    unknown = {
        f"tests/{file}::{name}"
        for file, names in NEAR_COPIES.items()
        if file in collected
        for name in names
    }
    for item in items:
        file = "/".join(item.path.parts[-2:])
        if item.name in NEAR_COPIES.get(file, {}):
            item.add_marker(pytest.mark.slow)
            unknown.discard(f"tests/{file}::{item.name}")
    return unknown
