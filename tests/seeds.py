"""Seeds of random test data, which `make numerics` varies through the environment."""

import os

_SEED = int(os.environ.get("JAXINFRA_TEST_SEED", "0"))


def seeded(seed: int) -> int:
    """``seed`` itself in an ordinary run, another one for each value of the variable."""
    return seed + 1_000_003 * _SEED
