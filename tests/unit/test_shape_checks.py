"""Shape annotations are checked in these tests: types alone would let each fault below by."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jaxinfra.data.batch import rows_checksum
from jaxinfra.data.packing import permute
from jaxinfra.model.rope import apply_rope
from jaxinfra.parallel.zigzag import chunks_in_sequence, to_zigzag

FAULTS = {
    "too few dims": lambda: rows_checksum(np.zeros(4, np.int32), first=0),
    "another dtype": lambda: rows_checksum(np.zeros((2, 4), np.int64), first=0),
    "floats for numbers": lambda: permute(np.zeros(3), size=3, key=""),
    "an array of another library": lambda: to_zigzag(jnp.zeros((1, 4)), 2),
    "no batch dim": lambda: chunks_in_sequence(jnp.zeros(4), 2),
    "sizes that disagree": lambda: apply_rope(
        jnp.zeros((1, 4, 2, 8)), (jnp.zeros((1, 3, 4)), jnp.zeros((1, 3, 4)))
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_shape_is_refused(name):
    with pytest.raises(TypeCheckError):
        FAULTS[name]()
