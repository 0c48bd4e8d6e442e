"""A model that is run layer by layer, with one layer's weights on the device at a time.

Dims: B sequence, T position, D model width.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfra import axes
from jaxinfra.checkpoint.parameter_sources import ParameterSource
from jaxinfra.config.model import BlockConfig, ModelConfig, Stack
from jaxinfra.model.decoder import Decoder
from jaxinfra.model.definition import ModelDefinition, by_path, define_model, nest
from jaxinfra.model.passes import Pass
from jaxinfra.model.projection import Projection
from jaxinfra.numerics.policy import Policy
from jaxinfra.ops.quantized import Activations, contracted_dims
from jaxinfra.parallel.execution import execution_on
from jaxinfra.quantize.statistics import InputRecorder, InputStatistics, statistics_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPosition:
    """Index of a layer in the model. Its parameters are under ``blocks/BLOCK``, at index ``at`` of
    the stacked arrays.
    """

    number: int
    block: int
    at: int

    def path(self, name: str) -> str:
        """Returns the model-wide path of a parameter that this layer names ``name``."""
        return f"blocks/{self.block}/{name}"


def positions_of_layers(config: ModelConfig) -> Iterator[LayerPosition]:
    """Iterates over the ``LayerPosition`` of each layer of a model, first to last."""
    for number, (block, at) in enumerate(config.layer_positions):
        yield LayerPosition(number=number, block=block, at=at)


def read_layer(
    source: ParameterSource, definition: ModelDefinition, place: LayerPosition
) -> dict[str, np.ndarray]:
    """Reads one layer's arrays from the source, by their paths in the block."""
    prefix = f"blocks/{place.block}/"
    found = {}
    for path, leaf in by_path(definition.arrays).items():
        if path.startswith(prefix):
            index = (slice(place.at, place.at + 1), *(slice(0, size) for size in leaf.shape[1:]))
            found[path.removeprefix(prefix)] = source.read(path, index)[0]
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixDims:
    """Input dims of a weight: their number, and whether an expert dim precedes them."""

    num_inputs: int  # dims that are contracted
    has_experts: bool = False  # in front of those

    def matrix(self, weight: jax.Array) -> jax.Array:
        """Returns the weight reshaped to [K, N], or [E, K, N] for experts."""
        lead = weight.shape[: int(self.has_experts)]
        return weight.reshape(*lead, self.width(weight), -1)

    def width(self, weight: jax.Array) -> int:
        """Returns the number of input channels K of the weight."""
        first = int(self.has_experts)
        return math.prod(weight.shape[first : first + self.num_inputs])


class CalibrationModel:
    """A model run one layer at a time over calibration sequences.

    Args:
        source: the model's weights; weights outside layers stay on the device.
        policy: dtypes of the matmuls.
    """

    def __init__(self, config: ModelConfig, source: ParameterSource, policy: Policy):
        self.config, self.policy, self._source = config, policy, source
        self._matrices = _matrices(define_model(config, execution_on(policy=policy)))
        self._recorder = InputRecorder(execution_on(policy=policy).kernels.exchange)
        self._blocks: dict[int, _OneBlock] = {}

    def embedded(self, ids_BT: np.ndarray) -> np.ndarray:
        """Embeds token ids; returns the first layer's input [B, T, D] on the host."""
        decoder = self._block(0).bound(self._source)
        positions = jnp.broadcast_to(jnp.arange(ids_BT.shape[1])[None], ids_BT.shape)
        # Not jitted: the table would be a constant of the program, which XLA folds.
        return np.asarray(decoder.embed(jnp.asarray(ids_BT), positions, None))

    def run(
        self,
        place: LayerPosition,
        parameters: Mapping[str, Any],
        x_BTD: np.ndarray,
        *,
        activations: Activations | None = None,
        rounded: tuple[str, ...] = (),
        statistics: int | None = None,
    ) -> tuple[jax.Array, dict[str, InputStatistics]]:
        """Runs one layer; returns its output and its weights' input statistics by path.

        Args:
            activations: format that inputs of the weights named in ``rounded`` are quantized to.
            statistics: block size of the products x^T x that are summed for experts; None: no
                statistics.
        """
        block = self._block(place.block)
        return block.run(dict(parameters), jnp.asarray(x_BTD), activations, rounded, statistics)

    def on_device(
        self, place: LayerPosition, values: Mapping[str, np.ndarray]
    ) -> dict[str, jax.Array]:
        """Puts one layer's parameters and state on the device, in their compute dtypes."""
        dtypes = self._block(place.block).dtypes
        return {path: jnp.asarray(value).astype(dtypes[path]) for path, value in values.items()}

    def matrices(self, place: LayerPosition) -> dict[str, MatrixDims]:
        """Returns the matrix dims of each of a layer's matmul weights, by path."""
        return self._matrices[place.block]

    def _block(self, number: int) -> "_OneBlock":
        if number not in self._blocks:
            block = self.config.blocks[number]
            dims = self._matrices[number]
            self._blocks[number] = _OneBlock(self.config, block, self.policy, self._recorder, dims)
        return self._blocks[number]


class _OneBlock:
    """A decoder model of one layer.

    Args:
        matrices: dims of the layer's matmul weights, by path.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: BlockConfig,
        policy: Policy,
        recorder: InputRecorder,
        matrices: Mapping[str, MatrixDims],
    ):
        config = dataclasses.replace(config, stacks=(Stack(pattern=(block,), repeats=1),))
        plain = execution_on(policy=policy)
        execution = dataclasses.replace(
            plain,
            multiply=dataclasses.replace(plain.multiply, watch=recorder.watch),
            kernels=dataclasses.replace(plain.kernels, exchange=recorder.exchange),
        )
        self.recorder, self.config, self.matrices = recorder, config, matrices
        self.definition = define_model(config, execution)
        # Of shapes.
        self.decoder = nnx.merge(self.definition.graphdef, self.definition.template)
        arrays = by_path(self.definition.arrays)
        own = {path.removeprefix("blocks/0/"): leaf for path, leaf in arrays.items()}
        self.dtypes = {path: leaf.dtype for path, leaf in own.items()}
        self.run = jax.jit(self._run, static_argnums=(2, 3, 4))

    def bound(self, source: ParameterSource) -> Decoder:
        """Binds the source's embedding; other parameters outside the layer stay abstract shapes."""
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
        statistics: int | None,
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
        found, routed = self.recorder.taken(parameters)
        seen: dict[str, InputStatistics] = {}
        if statistics is None:
            return out.x, seen
        for path, x in found.items():
            seen[path] = statistics_of(x, self.matrices[path].width(parameters[path]))
        if routed is not None:
            inward, outward = routed.statistics(block=statistics)
            seen |= {path: inward for path in ("mlp/gate", "mlp/up") if path in parameters}
            seen["mlp/down"] = outward
        return out.x, seen


def _matrices(definition: ModelDefinition) -> list[dict[str, MatrixDims]]:
    """Dims of the matmul weights of each block, by path."""
    found = []
    for block in nnx.merge(definition.graphdef, definition.template).blocks:
        layers = {"attention": block.attention, "mlp": block.mlp}
        found.append(
            {
                "/".join([layer, *map(str, path), "weight"]): MatrixDims(
                    num_inputs=contracted_dims(node.spec) or 1
                )
                for layer, each in layers.items()
                if isinstance(each, nnx.Module)
                for path, node in nnx.iter_modules(each)
                if isinstance(node, Projection)
            }
        )
    for info in definition.table():
        if info.matmul and axes.EXPERTS in info.dims:
            _, block, path = info.path.split("/", 2)
            found[int(block)][path] = MatrixDims(num_inputs=1, has_experts=True)
    return found
