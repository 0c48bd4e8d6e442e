"""Recipes of weight quantization, and the ``quantization_config`` that each writes."""

import dataclasses
import enum
from typing import Any

from jaxinfra.errors import ConfigError, nearest
from jaxinfra.ops.quantized import Activations, WeightCode, WeightFormat

DEFAULT_GROUP = 128
BLOCK = 128
GROUPS = (32, 64, 128)


class Method(enum.StrEnum):
    """Methods that prepare weights before rounding: none (plain), AWQ or SmoothQuant."""

    PLAIN = "plain"
    AWQ = "awq"
    SMOOTH = "smooth"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationRecipe:
    """A named weight format, and the method that prepares weights before rounding."""

    name: str
    form: WeightFormat
    method: Method
    what: str

    @property
    def has_zeros(self) -> bool:
        """Tells whether scales come with zero points."""
        return self.method is Method.AWQ

    @property
    def needs_text(self) -> bool:
        """Tells whether the recipe needs a calibration text."""
        return self.method is not Method.PLAIN


_INT4 = WeightFormat(code=WeightCode.INT4, group_rows=DEFAULT_GROUP)
_INT8, _E4M3 = WeightFormat(code=WeightCode.INT8), WeightFormat(code=WeightCode.E4M3)
_BY_NAME = {
    "awq-int4": (_INT4, Method.AWQ, "4 bits with zero points, scales searched (AWQ)"),
    "rtn-int4": (_INT4, Method.PLAIN, "4 bits, rounded to the nearest"),
    "int8": (_INT8, Method.PLAIN, "8 bits, a scale for each output"),
    "w8a8": (
        dataclasses.replace(_INT8, activations=Activations.INT8),
        Method.SMOOTH,
        "8 bits of weights and of activations (SmoothQuant)",
    ),
    "fp8": (_E4M3, Method.PLAIN, "e4m3, a scale for each output"),
    "fp8-blocks": (
        dataclasses.replace(_E4M3, group_rows=BLOCK, group_columns=BLOCK),
        Method.PLAIN,
        "e4m3, a scale for 128 x 128, as DeepSeek-V3",
    ),
    "w8a8-fp8": (
        dataclasses.replace(_E4M3, activations=Activations.E4M3),
        Method.PLAIN,
        "e4m3 of weights and of activations",
    ),
}
RECIPES = tuple(_BY_NAME)


def quantization_recipe(name: str, *, group: int = DEFAULT_GROUP) -> QuantizationRecipe:
    """Returns the quantization recipe of this name.

    Args:
        group: number of inputs that share a scale, for 4 bits.

    Raises:
        ConfigError: no such recipe, or a group that other programs do not read.
    """
    if group not in GROUPS:
        raise ConfigError(
            f"group size {group}: scales are of 32, 64 or 128 inputs, which other programs read"
        )
    if name not in _BY_NAME:
        raise ConfigError(f"unknown recipe {name!r}{nearest(name, _BY_NAME)}")
    form, method, what = _BY_NAME[name]
    if form.code is WeightCode.INT4:
        form = dataclasses.replace(form, group_rows=group)
    return QuantizationRecipe(name=name, form=form, method=method, what=what)


def config_of(recipe: QuantizationRecipe, *, kept: list[str]) -> dict[str, Any]:
    """Returns the ``quantization_config`` that a recipe's model directory has in its config.

    Args:
        kept: modules whose weights stay unquantized.
    """
    form = recipe.form
    if recipe.method is Method.AWQ:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": form.group_rows,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": kept,
        }
    if form.group_columns == BLOCK:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    kind = "float" if form.code is WeightCode.E4M3 else "int"
    weights: dict[str, Any] = {
        "num_bits": form.code.bits,
        "type": kind,
        "strategy": "group" if form.group_rows else "channel",
        "group_size": form.group_rows or None,
        "symmetric": True,
        "dynamic": False,
    }
    inputs = None
    if form.activations is not None:
        inputs = {
            "num_bits": 8,
            "type": kind,
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": layout_of(form),
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def layout_of(form: WeightFormat) -> str:
    """Returns compressed-tensors' name for a weight format's storage."""
    if form.code is WeightCode.E4M3:
        return "float-quantized"
    return "pack-quantized" if form.activations is None else "int-quantized"
