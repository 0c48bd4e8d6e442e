"""Number formats and their arithmetic, and the bytes per parameter of each training recipe."""

import dataclasses
import functools
import math


@dataclasses.dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number format, given by its exponent and fraction bits and its largest finite value.

    Formats reserve different codes for infinities and NaN. IEEE formats reserve the largest
    exponent, e4m3fn only its all-ones fraction, e2m1 none. An integer format has no exponent bits.
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    largest: float

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal value: the least with full precision."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1)) if self.exponent_bits else 1.0

    @property
    def smallest(self) -> float:
        """The smallest positive value, which is subnormal in formats with subnormals."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger value of the format."""
        return 2.0**-self.fraction_bits if self.exponent_bits else 1.0

    @property
    def decimal_digits(self) -> float:
        """The number of significant decimal digits: log10(2^(fraction bits + 1))."""
        if not self.exponent_bits:
            return math.log10(self.largest)
        return (self.fraction_bits + 1) * math.log10(2)


FORMATS = (
    NumberFormat("fp32", 32, 8, 23, (2 - 2.0**-23) * 2.0**127),
    NumberFormat("tf32", 19, 8, 10, (2 - 2.0**-10) * 2.0**127),
    NumberFormat("bf16", 16, 8, 7, (2 - 2.0**-7) * 2.0**127),
    NumberFormat("fp16", 16, 5, 10, 65504.0),
    NumberFormat("fp8 e5m2", 8, 5, 2, 57344.0),
    NumberFormat("fp8 e4m3", 8, 4, 3, 448.0),
    NumberFormat("fp4 e2m1", 4, 2, 1, 6.0),
    NumberFormat("int8", 8, 0, 7, 127),
)
"""tf32 is a matmul operand: 19 significant bits stored in 32."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Bytes per parameter in training, by role (weights, gradients...), and the matmuls' format."""

    name: str
    compute: str  # format of matmul operands: bf16, fp8, ...
    weights: int  # as the model stores them
    gradients: int
    accumulated: int  # another array of gradients, summed over micro-batches; 0 if none
    master: int  # another, wider copy of the weights in the optimizer; 0 if none
    moments: int  # both moments of Adam

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of gradients, including their sum over micro-batches."""
        return self.gradients + self.accumulated

    @property
    def summed_bytes(self) -> int:
        """Bytes per parameter of the summed gradients that the optimizer reads."""
        return self.accumulated or self.gradients

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per parameter that the optimizer keeps between steps, beside the weights."""
        return self.master + self.moments

    @property
    def activation_bytes(self) -> float:
        """Bytes per element of an activation."""
        return 4.0 if self.compute == "fp32" else 2.0

    @property
    def total(self) -> int:
        """Bytes per parameter of weights, gradients and optimizer state together."""
        return self.weights + self.gradient_bytes + self.optimizer_bytes


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # jaxinfra's bf16 policy: fp32 masters are the model, cast where they are used.
        TrainingRecipe("bf16", "bf16", 4, 4, 0, 0, 8),
        TrainingRecipe("fp32", "fp32", 4, 4, 0, 0, 8),
        # ZeRO, arXiv 1910.02054, section 3.1: 2 + 2 + 12.
        TrainingRecipe("fp16-adam", "bf16", 2, 2, 0, 4, 8),
        # The rows of the precision comparison in Hugging Face's Ultra-Scale Playbook.
        TrainingRecipe("bf16-fp32-accumulation", "bf16", 2, 2, 4, 4, 8),
        TrainingRecipe("bf16-no-accumulation", "bf16", 2, 2, 0, 4, 8),
        TrainingRecipe("fp8-transformer-engine", "fp8", 4, 4, 0, 0, 8),
        TrainingRecipe("fp8-lm-o3", "fp8", 1, 1, 2, 2, 3),
        TrainingRecipe("fp8-deepseek-v3", "fp8", 1, 2, 4, 4, 4),
        TrainingRecipe("fp8-nanotron", "fp8", 1, 1, 4, 2, 2),
        # jaxinfra's settings that correspond to those rows.
        TrainingRecipe("bf16-summed", "bf16", 4, 4, 4, 0, 8),
        TrainingRecipe("fp8", "fp8", 4, 4, 0, 0, 8),
        TrainingRecipe("fp8-as-fp8-lm", "fp8", 2, 2, 4, 0, 3),
        TrainingRecipe("fp8-as-deepseek-v3", "fp8", 4, 4, 4, 0, 4),
        TrainingRecipe("fp8-as-nanotron", "fp8", 2, 2, 4, 0, 2),
    )
}
"""Recipes by name. Totals: 16, 16, 16, 20, 16, 16, 9, 15, 10; then 20, 16, 11, 16, 10."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Correspondence:
    """A published training recipe, and the jaxinfra settings that match it."""

    published: str  # in ``RECIPES``
    ours: str  # in ``RECIPES``
    settings: tuple[str, ...]  # values for ``--set``
    differs: tuple[str, ...] = ()  # arrays that jaxinfra lacks, or keeps in another format


_BF16 = "precision.policy=bf16"
_SUMMED = "training.accumulation=2"
_NO_COPY = "weights + master: no copy of all weights for matmuls; a layer's is made where it runs"
_AS_WEIGHTS = "grads: in the format of the kept weights, which the optimizer reads"

CORRESPONDENCES = (
    Correspondence(
        published="bf16-fp32-accumulation",
        ours="bf16-summed",
        settings=(_BF16, _SUMMED),
        differs=(_NO_COPY, _AS_WEIGHTS),
    ),
    Correspondence(
        published="bf16-no-accumulation",
        ours="bf16",
        settings=(_BF16,),
        differs=(_NO_COPY, _AS_WEIGHTS),
    ),
    Correspondence(
        published="fp8-transformer-engine",
        ours="fp8",
        settings=(_BF16, 'precision.fp8={"scaling": "squares"}'),
    ),
    Correspondence(
        published="fp8-lm-o3",
        ours="fp8-as-fp8-lm",
        settings=(
            _BF16,
            'precision.fp8={"scaling": "squares"}',
            "precision.weights=bf16",
            "optimizer.first_moment=fp8",
            "optimizer.second_moment=fp16",
            _SUMMED,
        ),
        differs=(_NO_COPY, _AS_WEIGHTS, "summed: in fp32, not in fp16 with a scale"),
    ),
    Correspondence(
        published="fp8-deepseek-v3",
        ours="fp8-as-deepseek-v3",
        settings=(
            _BF16,
            'precision.fp8={"scaling": "blocks"}',
            "optimizer.first_moment=bf16",
            "optimizer.second_moment=bf16",
            _SUMMED,
        ),
        differs=(_NO_COPY, _AS_WEIGHTS),
    ),
    Correspondence(
        published="fp8-nanotron",
        ours="fp8-as-nanotron",
        settings=(
            _BF16,
            'precision.fp8={"scaling": "squares"}',
            "precision.weights=bf16",
            "optimizer.first_moment=fp8",
            "optimizer.second_moment=fp8",
            _SUMMED,
        ),
        differs=(_NO_COPY, _AS_WEIGHTS),
    ),
)
"""Correspondences for AdamW, without Muon."""

OURS = frozenset({"bf16", "fp32", *(each.ours for each in CORRESPONDENCES)})
"""Recipes that train here: of several micro-batches, fp32 sums stand beside one's gradients."""


@functools.cache
def recipe_of(name: str, *, sums: bool) -> TrainingRecipe:
    """Returns a recipe by name; if ``sums``, jaxinfra's recipes add fp32 gradient sums.

    Examples:
        >>> recipe_of("bf16", sums=True) == dataclasses.replace(RECIPES["bf16-summed"], name="bf16")
        True
    """
    recipe = RECIPES[name]
    if name not in OURS:
        return recipe
    return dataclasses.replace(recipe, accumulated=4 if sums else 0)
