"""Rows through a Hopper GPU, by the way that suits their length. Dims: R row, C column."""

from collections.abc import Sequence

import jax

from .blocks import block_rows
from .choice import config_for
from .config import Blocks, Flat, Odd, RowConfig, Stream, Wide
from .flat import flat_rows
from .formula import Formula, RowCall
from .odd import odd_rows
from .stream import stream_rows
from .twice import twice_rows
from .wide import wide_rows


def apply_rows(
    formula: Formula,
    inputs_RC: Sequence[jax.Array],
    *,
    vectors_C: Sequence[jax.Array] = (),
    config: RowConfig | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Applies a formula to every row.

    Args:
        inputs_RC: of one shape and one of ``rows.DTYPES``, and after these masks, of int8.
        vectors_C: fp32, the same for all rows.
        config: instead of ``config_for``'s.

    Returns:
        Results, of the inputs' shape and by default dtype, those of rows, fp32 [R], and sums over
        rows in parts, fp32 [N, C].

    Raises:
        UnsupportedError: no kernel takes such rows.
    """
    call = RowCall.of(formula, inputs_RC, vectors_C)
    config = config or config_for(inputs_RC[0].shape[0], call)
    if isinstance(config, Blocks):
        return block_rows(formula, inputs_RC, config=config, vectors_C=vectors_C), ()
    if isinstance(config, Wide):
        return wide_rows(formula, inputs_RC, config=config, vectors_C=vectors_C)
    if isinstance(config, Stream):
        return stream_rows(formula, inputs_RC, config=config, vectors_C=vectors_C)
    if isinstance(config, Odd):
        return odd_rows(formula, inputs_RC, config=config, vectors_C=vectors_C)
    if isinstance(config, Flat):
        return flat_rows(formula, inputs_RC, config=config, vectors_C=vectors_C)
    return twice_rows(formula, inputs_RC, config=config, vectors_C=vectors_C)
