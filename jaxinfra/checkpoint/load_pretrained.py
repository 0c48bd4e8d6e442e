"""A model from a directory of safetensors, as Hugging Face or ``jaxinfra convert`` writes them."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.checkpoint.onto_mesh import place_parameters
from jaxinfra.checkpoint.packed_parameters import packed_shapes, place_packed
from jaxinfra.checkpoint.parameter_sources import ParameterSource
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.model.definition import ModelDefinition, Parameters, define_model, merged, without
from jaxinfra.numerics.policy import POLICIES, held_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedModel:
    """A model, its parameters and its state on a mesh."""

    definition: ModelDefinition
    parameters: Parameters  # with the state, as ``ModelDefinition.bind`` takes them
    placement: Placement


def load_pretrained(
    path: Path,
    *,
    policy: PolicyName | None = None,
    placement: Placement | None = None,
    keep_packed: bool = False,
) -> PretrainedModel:
    """Reads a model directory, tensor by tensor, each device its shard only.

    Parameters are held in the compute dtype, as nothing trains them: half the memory of fp32
    masters, and exact where the checkpoint has no more precision.

    Args:
        policy: None: that of the dtype in which the embedding is stored.
        placement: on the first device by default.
        keep_packed: weights that the files hold in 4 or 8 bits stay in them, as
            ``QuantizedWeight``; else they become plain arrays.
    """
    source, definition, placement = _opened(path, policy, placement)
    shardings = merged(placement.parameters(definition), placement.model_state(definition))
    packed = place_packed(source, definition, placement) if keep_packed else {}
    plain = place_parameters(source, definition, without(shardings, packed))
    return PretrainedModel(
        definition=definition, parameters=merged(plain, packed), placement=placement
    )


def pretrained_shapes(
    path: Path, *, policy: PolicyName | None = None, placement: Placement | None = None
) -> PretrainedModel:
    """The same with shapes in the place of arrays, packed ones kept: what there is to be held.

    Only the files' headers are read.
    """
    source, definition, placement = _opened(path, policy, placement)
    shardings = merged(placement.parameters(definition), placement.model_state(definition))
    packed = packed_shapes(source, definition, placement)
    plain = jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        without(merged(definition.shapes, definition.state_shapes), packed),
        without(shardings, packed),
    )
    return PretrainedModel(
        definition=definition, parameters=merged(plain, packed), placement=placement
    )


def _opened(
    path: Path, policy: PolicyName | None, placement: Placement | None
) -> tuple[ParameterSource, ModelDefinition, Placement]:
    """What a directory holds, checked, and the model that it is of."""
    directory = read_model_directory(path)
    if placement is None:
        placement = Placement(mesh=make_mesh(MeshConfig(), devices=jax.local_devices()))

    def defined(policy: PolicyName) -> ModelDefinition:
        numbers = held_as_computed(POLICIES[policy])
        return define_model(directory.config, execution_on(placement, policy=numbers))

    # Names and shapes do not depend on the policy, and the files say which one fits them.
    assumed = policy or PolicyName.FP32
    definition = defined(assumed)
    source = directory.open(definition)
    fitting = policy or _policy_of(source.dtype("embedding/table"))
    if fitting is not assumed:
        definition = defined(fitting)
    return source, definition, placement


def _policy_of(dtype: np.dtype) -> PolicyName:
    names = {policy.compute.name: name for name, policy in POLICIES.items()}
    return names.get(dtype.name, PolicyName.FP32)
