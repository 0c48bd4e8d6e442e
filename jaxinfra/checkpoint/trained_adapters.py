"""Trained adapters on the host, and merged into the weights on their way out.

Dims: L layers, I inputs of a projection, O its outputs, R rank.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from jaxinfra.checkpoint.parameter_sources import LiveParameters, ParameterSource
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.hf.tensor_layout import Index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterArrays:
    """One projection's adapter in all layers that have it, fp32."""

    a: np.ndarray  # [L, ...I, R]
    b: np.ndarray  # [L, R, ...O]
    magnitude: np.ndarray | None  # [L, ...O], of DoRA

    @property
    def num_inner(self) -> int:
        """Dims of the projection's inputs."""
        return self.a.ndim - 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """A and B of every adapted projection, and DoRA's magnitudes, by path, on the host."""

    lora: LoraConfig
    arrays: Mapping[str, np.ndarray]

    def of(self, weight_path: str) -> AdapterArrays | None:
        """The adapter beside a weight [L, ...I, ...O], if there is one."""
        prefix = weight_path.removesuffix("weight") + "adapter/"
        if prefix + "a" not in self.arrays:
            return None
        return AdapterArrays(
            a=self.arrays[prefix + "a"],
            b=self.arrays[prefix + "b"],
            magnitude=self.arrays.get(prefix + "magnitude"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MergedParameters:
    """The weights with what adapters do to them, a slice at a time: W + scale A B, with DoRA each
    output scaled to its magnitude; summed in fp32, rounded once to the type of W.
    """

    base: ParameterSource
    adapters: Adapters
    # Of the model: training changed it, in place of the base's.
    state: LiveParameters = LiveParameters(arrays={})
    _gains: dict[tuple[str, int], np.ndarray] = dataclasses.field(default_factory=dict)

    def dtype(self, path: str) -> np.dtype:
        """Element type of the base's parameter."""
        return (self.state if path in self.state.arrays else self.base).dtype(path)

    def read(self, path: str, index: Index) -> np.ndarray:
        """The slice of the base, with the adapter merged into it where there is one."""
        if path in self.state.arrays:
            return self.state.read(path, index)
        found = self.adapters.of(path)
        if found is None:
            return self.base.read(path, index)
        changed = self._changed(path, found, index)
        if found.magnitude is not None:
            layers = range(index[0].start, index[0].stop)
            outer = index[1 + found.num_inner :]
            gains = np.stack([self.gain(path, found, layer)[outer] for layer in layers])
            changed *= np.expand_dims(gains, tuple(range(1, 1 + found.num_inner)))
        return changed.astype(self.base.dtype(path))

    def _changed(self, path: str, found: AdapterArrays, index: Index) -> np.ndarray:
        """W + scale A B, fp32."""
        weight = self.base.read(path, index)
        inner, outer = index[1 : 1 + found.num_inner], index[1 + found.num_inner :]
        a = found.a[(index[0], *inner, slice(None))]
        b = found.b[(index[0], slice(None), *outer)]
        layers, rank = len(a), self.adapters.lora.rank
        product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        delta = np.float32(self.adapters.lora.scale) * product.reshape(weight.shape)
        return weight.astype(np.float32) + delta

    def gain(self, path: str, found: AdapterArrays, layer: int) -> np.ndarray:
        """DoRA's factor on each output of a layer; its norm needs all inputs, so it is kept."""
        if (path, layer) not in self._gains:
            assert found.magnitude is not None
            shape = (*found.a.shape[1:-1], *found.b.shape[2:])
            index = (slice(layer, layer + 1), *(slice(0, size) for size in shape))
            norms = column_norms(self._changed(path, found, index)[0], found.num_inner)
            self._gains[path, layer] = found.magnitude[layer] / np.where(norms == 0, 1, norms)
        return self._gains[path, layer]


def column_norms(weight: np.ndarray, num_inner: int) -> np.ndarray:
    """The length of each output's weights over all inputs, [...O] fp32 of [...I, ...O]."""
    squares = np.square(weight.astype(np.float32))
    return np.sqrt(squares.sum(axis=tuple(range(num_inner)), dtype=np.float32))


def host_adapters(lora: LoraConfig, arrays: Mapping[str, jax.Array]) -> Adapters:
    """Fetches adapters from the devices; other parameters among ``arrays`` stay there."""
    chosen = {path: np.asarray(x) for path, x in arrays.items() if "/adapter/" in path}
    return Adapters(lora=lora, arrays=chosen)
