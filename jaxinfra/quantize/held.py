"""Shapes of a loaded quantized model's arrays, from its config alone."""

import dataclasses
import functools

from jaxinfra.checkpoint.load_pretrained import form_of_part, shapes_in_few_bits
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.hf import to_hf_config, weight_map
from jaxinfra.hf.mapping import WeightMap
from jaxinfra.model.definition import (
    ModelDefinition,
    Parameters,
    by_path,
    define_model,
    merged,
    nest,
    without,
)
from jaxinfra.numerics.policy import POLICIES, stored_as_computed
from jaxinfra.ops.quantized import QuantizedWeight
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize.equivalence import scaled_inputs
from jaxinfra.quantize.matrices import (
    is_quantizable,
    require_matrices,
    require_sizes,
    scale_dtype,
)
from jaxinfra.quantize.recipes import QuantizationRecipe


def quantized_shapes(
    config: ModelConfig,
    recipe: QuantizationRecipe | None,
    *,
    policy: PolicyName = PolicyName.BF16,
) -> Parameters:
    """Returns shapes and dtypes of a quantized model's arrays after ``load``; reads no file.

    Args:
        recipe: the recipe that the files are quantized by; None for unquantized weights.
        policy: policy of the original checkpoint; unquantized weights have its compute dtype.

    Raises:
        ConfigError, UnsupportedError: a model that ``jaxinfra quantize`` does not make by this
            recipe.
    """
    definition = _definition(config, policy)
    if recipe is None:
        return definition.arrays
    for block in config.blocks:
        scaled_inputs(block, recipe.method)
    few = _in_few_bits(definition, recipe, kept=policy)
    return merged(without(definition.arrays, few), few)


@functools.lru_cache(maxsize=8)
def _definition(config: ModelConfig, policy: PolicyName) -> ModelDefinition:
    return define_model(config, execution_on(policy=stored_as_computed(POLICIES[policy])))


@functools.lru_cache(maxsize=8)
def _one_of_each(config: ModelConfig) -> tuple[WeightMap, dict[str, bool]]:
    """Tensors of a layer of each kind, since all of a kind are stored alike; and which of our
    parameters activations are multiplied with.
    """
    model_type = str(to_hf_config(config)["model_type"])
    stacks = tuple(dataclasses.replace(stack, repeats=1) for stack in config.stacks)
    once = define_model(dataclasses.replace(config, stacks=stacks), execution_on())
    weights = weight_map(model_type, once.config, once.arrays)
    matmuls = {info.path: info.matmul for info in once.table()}
    require_matrices(model_type, weights, matmuls)
    return weights, matmuls


def _in_few_bits(
    definition: ModelDefinition, recipe: QuantizationRecipe, *, kept: PolicyName
) -> Parameters:
    """Returns the quantized weights of all layers that a recipe's files have."""
    weights, matmuls = _one_of_each(definition.config)
    shapes = by_path(definition.arrays)
    found: dict[tuple[str | int, ...], QuantizedWeight] = {}
    for path in matmuls:
        weight = _weight(weights, path, shapes[path].shape, recipe, matmuls, kept)
        if weight is not None:
            keys = tuple(int(key) if key.isdigit() else key for key in path.split("/"))
            found[keys] = weight
    return nest(found)


def _weight(
    weights: WeightMap,
    path: str,
    shape: tuple[int, ...],
    recipe: QuantizationRecipe,
    matmuls: dict[str, bool],
    kept: PolicyName,
) -> QuantizedWeight | None:
    places = weights.parts_of(path)
    if not all(is_quantizable(tensor, matmuls) for tensor, _ in places):
        return None
    for tensor, _ in places:
        require_sizes(tensor, recipe)
    tensor, part = places[0]
    theirs, sizes = part.layout.theirs, part.layout.sizes
    return shapes_in_few_bits(
        shape,
        form_of_part(recipe.form, tensor, part),
        inputs=tuple(sizes[letter] for letter in theirs[1]),
        outputs=tuple(sizes[letter] for letter in theirs[0]),
        scale_dtype=scale_dtype(recipe, POLICIES[kept].compute),
        has_zeros=recipe.has_zeros,
    )
