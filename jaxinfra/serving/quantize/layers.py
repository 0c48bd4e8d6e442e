"""A model's layers one after another: a layer's weights on the device at a time.

Dims: B sequence, T position, D model width.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra.config.model import BlockConfig, ModelConfig, Stack
from jaxinfra.layers.passes import Pass
from jaxinfra.models.decoder import Decoder
from jaxinfra.models.definition import ModelDefinition, by_path, define_model, nest
from jaxinfra.numerics.policy import Policy
from jaxinfra.ops.quantized import Activations, contracted_dims
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.quantize.statistics import InputRecorder, InputStatistics, statistics_of
from jaxinfra.weights.parameter_sources import ParameterSource


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlace:
    """Where a layer is: ``blocks/BLOCK`` of our paths, repetition ``at``."""

    number: int
    block: int
    at: int

    def path(self, name: str) -> str:
        """Of a parameter of this layer, among the model's."""
        return f"blocks/{self.block}/{name}"


def places_of(config: ModelConfig) -> Iterator[LayerPlace]:
    """All layers, in order."""
    for number, (block, at) in enumerate(config.layer_places):
        yield LayerPlace(number=number, block=block, at=at)


def read_layer(
    source: ParameterSource, definition: ModelDefinition, place: LayerPlace
) -> dict[str, np.ndarray]:
    """A layer's arrays by their paths in the block, as the source holds them."""
    prefix = f"blocks/{place.block}/"
    found = {}
    for path, leaf in by_path(definition.arrays).items():
        if path.startswith(prefix):
            index = (slice(place.at, place.at + 1), *(slice(0, size) for size in leaf.shape[1:]))
            found[path.removeprefix(prefix)] = source.read(path, index)[0]
    return found


class CalibrationModel:
    """Embedding and single layers of a model, run layer by layer over sequences.

    Args:
        source: what is not in layers stays on the device.
        policy: of the products.
    """

    def __init__(self, config: ModelConfig, source: ParameterSource, policy: Policy):
        self.config, self.policy, self._source = config, policy, source
        self._recorder = InputRecorder()
        self._blocks: dict[int, _OneBlock] = {}

    def embedded(self, ids_BT: np.ndarray) -> np.ndarray:
        """The first layer's input, [B, T, D] on the host."""
        decoder = self._block(0).bound(self._source)
        positions = jnp.broadcast_to(jnp.arange(ids_BT.shape[1])[None], ids_BT.shape)
        return np.asarray(jax.jit(lambda: decoder.embed(jnp.asarray(ids_BT), positions, None))())

    def run(
        self,
        place: LayerPlace,
        parameters: Mapping[str, Any],
        x_BTD: np.ndarray,
        *,
        activations: Activations | None = None,
        rounded: tuple[str, ...] = (),
    ) -> tuple[jax.Array, dict[str, InputStatistics]]:
        """A layer's output, and what its projections were given, by path in the block.

        Args:
            activations: what inputs of the weights ``rounded`` are rounded to.
        """
        block = self._block(place.block)
        return block.run(dict(parameters), jnp.asarray(x_BTD), activations, rounded)

    def num_inputs(self, place: LayerPlace) -> dict[str, int]:
        """Dims that each projection contracts, by the path of its weight in the block."""
        return self._block(place.block).num_inputs

    def _block(self, number: int) -> "_OneBlock":
        if number not in self._blocks:
            block = self.config.blocks[number]
            self._blocks[number] = _OneBlock(self.config, block, self.policy, self._recorder)
        return self._blocks[number]


class _OneBlock:
    """A decoder of one layer."""

    def __init__(
        self, config: ModelConfig, block: BlockConfig, policy: Policy, recorder: InputRecorder
    ):
        config = dataclasses.replace(config, stacks=(Stack(pattern=(block,), repeats=1),))
        execution = dataclasses.replace(execution_on(policy=policy), multiply=recorder)
        self.recorder, self.config = recorder, config
        self.definition = define_model(config, execution)
        template = nnx.merge(self.definition.graphdef, self.definition.template)
        self.decoder = template  # of shapes
        self.num_inputs = {
            f"{path}/weight": contracted_dims(node.spec) or 1
            for path, node in _projections(template)
        }
        self.run = jax.jit(self._run, static_argnums=(2, 3))

    def bound(self, source: ParameterSource) -> Decoder:
        """With the source's embedding; what it does not need are shapes."""
        state = jax.tree.map(lambda leaf: leaf, self.definition.template)
        outside = {
            tuple(path.split("/")): jnp.asarray(
                source.read(path, tuple(slice(0, size) for size in leaf.shape))
            )
            for path, leaf in by_path(self.definition.arrays).items()
            if path.startswith(("embedding/", "positions/"))
        }
        nnx.replace_by_pure_dict(state, nest(outside))
        return nnx.merge(self.definition.graphdef, state)

    def _run(
        self,
        parameters: dict[str, jax.Array],
        x_BTD: jax.Array,
        activations: Activations | None,
        rounded: tuple[str, ...],
    ) -> tuple[jax.Array, dict[str, InputStatistics]]:
        self.recorder.activations = activations
        self.recorder.rounded = [parameters[path] for path in rounded]
        graphdef, state = nnx.split(self.decoder.blocks[0])
        nnx.replace_by_pure_dict(
            state, nest({tuple(path.split("/")): leaf for path, leaf in parameters.items()})
        )
        positions = jnp.broadcast_to(jnp.arange(x_BTD.shape[1])[None], x_BTD.shape[:2])
        rope = self.decoder.rope_tables(positions)[0]
        out = nnx.merge(graphdef, state)(x_BTD, Pass(positions_BT=positions, rope=rope))
        found = self.recorder.inputs(parameters)
        seen = {}
        for path, x in found.items():
            inputs = parameters[path].shape[: self.num_inputs.get(path, 1)]
            seen[path] = statistics_of(x, int(np.prod(inputs)))
        return out.x, seen


def _projections(decoder: Decoder) -> Iterator[tuple[str, Any]]:
    """Projections of the first block, by path."""
    block = decoder.blocks[0]
    for name in ("attention", "mlp"):
        for inner, node in vars(getattr(block, name)).items():
            if hasattr(node, "spec"):
                yield f"{name}/{inner}", node
