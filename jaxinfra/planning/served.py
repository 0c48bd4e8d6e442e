"""What serving keeps of a model's weights in each format, and what one pass reads of them."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax

from jaxinfra.errors import ConfigError, nearest
from jaxinfra.hf import quantization_of
from jaxinfra.model.definition import ParameterInfo, by_path, define_model, is_weight
from jaxinfra.ops.quantized import (
    MOST_ROWS_MEASURED,
    Activations,
    QuantizedWeight,
    kept_for_kernel,
)
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.model import PlannedModel, config_file, is_expert
from jaxinfra.quantize.held import held_shapes
from jaxinfra.quantize.recipes import (
    DEFAULT_GROUP,
    GROUPS,
    RECIPES,
    config_of,
    quantization_recipe,
)
from jaxinfra.runtime.files import read_json

PLAIN = "bf16"
WEIGHTS = (PLAIN, *RECIPES)
"""Formats of weights: plain ones, and what ``jaxinfra quantize`` makes."""

_TABLES = ("embedding/table", "positions/table")  # of which a token reads a row
_REBUILT = "attention/kv_up/weight"  # of latent attention: decode dequantizes it, then cuts it
_PLAIN_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedArray:
    """An array of the model, of all layers that have it."""

    held: jax.ShapeDtypeStruct | QuantizedWeight  # shapes, as an engine keeps them
    active: float = 1.0  # share of it that a token meets
    num_rows: int | None = None  # of a table that tokens read rows of; None: it is read whole
    is_dequantized: bool = False  # even where rows are few
    is_expert: bool = False

    @property
    def nbytes(self) -> int:
        """That are kept."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.held))

    def traffic(self, tokens: int) -> float:
        """Bytes that a pass over so many tokens reads of it, or writes and reads where the weight
        is dequantized first.
        """
        if self.num_rows is not None:
            return self.nbytes * min(tokens, self.num_rows) / self.num_rows
        # Expected share of experts that some token is sent to.
        met = 1.0 - (1.0 - self.active) ** tokens
        if not isinstance(self.held, QuantizedWeight):
            return met * self.nbytes
        plain = self.held.size * _PLAIN_BYTES
        if self.is_expert:  # as many are dequantized as tokens have choices, or all of a layer
            dequantized = min(tokens * self.active, 1.0)
            return dequantized * (self.nbytes + plain) + met * plain
        if self.is_dequantized and self.held.format.activations is Activations.INT8:
            # XLA multiplies the codes themselves, of more than one row transposed.
            return self.nbytes * (1.0 if tokens == 1 else 3.0)
        if self.is_dequantized or tokens > MOST_ROWS_MEASURED:
            return self.nbytes + 2.0 * plain
        return self.nbytes


def stored_format(name: str) -> tuple[str, int]:
    """The format and the group in which a model's files have its weights, as its config says.

    Raises:
        ConfigError: a format that ``jaxinfra quantize`` does not write.
    """
    file = config_file(name)
    stored = None if file is None else quantization_of(read_json(file))
    if stored is None:
        return PLAIN, DEFAULT_GROUP
    for each, group in itertools.product(RECIPES, GROUPS):
        written = config_of(quantization_recipe(each, group=group), kept=[])
        if quantization_of({"quantization_config": written}) == stored:
            return each, group
    raise ConfigError(
        f"{file}: weights in {stored}: planning knows the formats that jaxinfra quantize writes; "
        "name the nearest with --weights"
    )


def require_format(weights: str, group: int) -> None:
    """Raises ConfigError for no format of weights, or a group that none has."""
    if weights not in WEIGHTS:
        raise ConfigError(
            f"unknown weight format {weights!r}{nearest(weights, WEIGHTS)}; known: "
            f"{', '.join(WEIGHTS)}"
        )
    quantization_recipe(RECIPES[0], group=group)


@functools.lru_cache(maxsize=64)
def served_arrays(
    model: PlannedModel, weights: str, group: int, kind: str | None
) -> tuple[ServedArray, ...]:
    """All arrays of a model.

    Args:
        group: inputs that share a scale, of weights in 4 bits.
        kind: JAX's name of the one device that serves; None: several do, which have no kernel for
            weights in few bits.

    Raises:
        ConfigError, UnsupportedError: weights that ``jaxinfra quantize`` would not make.
    """
    recipe = None if weights == PLAIN else quantization_recipe(weights, group=group)
    held = by_path(held_shapes(model.config, recipe), is_leaf=is_weight)
    table = _table(model)
    is_tied = model.config.tie_embeddings
    return tuple(_served(table[path], leaf, kind, is_tied=is_tied) for path, leaf in held.items())


@functools.lru_cache(maxsize=8)
def _table(model: PlannedModel) -> dict[str, ParameterInfo]:
    return {info.path: info for info in define_model(model.config, execution_on()).table()}


def _served(info: ParameterInfo, leaf: Any, kind: str | None, *, is_tied: bool) -> ServedArray:
    kept = None
    if isinstance(leaf, QuantizedWeight) and kind is not None:
        kept = kept_for_kernel(leaf, kind)
    # A tied table is multiplied with for the logits.
    is_table = info.path in _TABLES and not (is_tied and info.path == _TABLES[0])
    return ServedArray(
        held=leaf if kept is None else kept,
        active=info.active,
        num_rows=info.shape[0] if is_table else None,
        is_dequantized=kept is None or info.path.endswith(_REBUILT),
        is_expert=is_expert(info),
    )
