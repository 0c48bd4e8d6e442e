"""Weights as the compiled programs are given them at every step."""

import dataclasses

import jax
from flax import nnx

from jaxinfra.model.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Structure:
    """Of a state; one is like itself alone, which is quickly told."""

    treedef: jax.tree_util.PyTreeDef
    names: tuple[str, ...]  # of the leaves in their order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedArrays:
    """An ``nnx.State`` by its leaves' paths: Python would walk through the state at every call."""

    arrays: dict[str, jax.Array]
    structure: _Structure = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def of(cls, state: nnx.State) -> "NamedArrays":
        """The same arrays."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
        }
        assert len(arrays) == len(leaves), "paths differ"
        return cls(arrays=arrays, structure=_Structure(treedef, tuple(arrays)))

    @property
    def state(self) -> nnx.State:
        """As it was."""
        leaves = [self.arrays[name] for name in self.structure.names]
        return jax.tree.unflatten(self.structure.treedef, leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Parameters of the model, and of the one that drafts."""

    model: NamedArrays
    draft: NamedArrays | None

    def drafting(self, graphdef: nnx.GraphDef[Decoder]) -> Decoder:
        """The model that drafts."""
        assert self.draft is not None, "there is none"
        return nnx.merge(graphdef, self.draft.state)
