"""Caches of past tokens: keys and values, contiguous or in pages, and states; their elements.

A cache stacks the arrays of all layers of one kind; ``in_layer`` selects one layer. Every layer
appends to the same stacked buffer, and reads a view of it. A mixer's ``CacheSpec`` defines the
names and widths of the arrays.

Dims: B batch, T new token, S slot, P page, M page of a row, L layers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxinfra.config.cache import SCALE, CacheFormat, CacheSpec, StateArray
from jaxinfra.config.model import MixerConfig, ModelConfig
from jaxinfra.config.own import OwnMixer
from jaxinfra.ops.cached_attention import Pages, storage, stored_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContiguousCache:
    """KV cache without pages: the token at position p of row b is in slot p of row b."""

    arrays: dict[str, Shaped[Array, "L B S ..."]]  # by the CacheSpec's names
    layer: Int[Array | np.ndarray, ""] | None = None  # index in the stack; None outside a layer
    # Whether nothing was cached before this pass, so that its tokens see only each other.
    is_empty: bool = dataclasses.field(default=False, metadata=dict(static=True))
    format: CacheFormat = dataclasses.field(default=CacheFormat.PLAIN, metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        spec: CacheSpec,
        *,
        num_layers: int,
        batch: int,
        num_slots: int,
        dtype: jnp.dtype,
        form: CacheFormat = CacheFormat.PLAIN,
    ) -> "ContiguousCache":
        """Makes an empty cache with ``num_slots`` positions per row and elements in ``dtype``."""
        arrays = _zeros(spec, (num_layers, batch, num_slots), dtype, form)
        return cls(arrays=arrays, is_empty=True, format=form)

    @property
    def num_slots(self) -> int:
        """Number of tokens that each row can cache."""
        return next(iter(self.arrays.values())).shape[2]

    def append(
        self, new: Mapping[str, Shaped[Array, "B T ..."]], positions_BT: Int[Array, "B T"]
    ) -> "ContiguousCache":
        """Returns the cache with new tokens' arrays [B, T, ...] written at their positions.

        A token whose position is below 0 (padding) or beyond the last slot is silently not
        written, so the caller must bound lengths.
        """
        rows_B1 = jnp.arange(len(positions_BT))[:, None]
        # Negative numbers would count from the end.
        slots_BT = jnp.where(positions_BT < 0, self.num_slots, positions_BT)
        return _appended(self, new, (rows_B1, slots_BT))

    def view(self) -> Pages:
        """Returns this layer's cache for attention: a view of all layers' rows, without a copy."""
        return Pages(arrays=self.arrays, layer=self.layer, format=self.format)

    def pages(self) -> Pages:
        """Returns the pages that this layer appends to; rows if their slots are no whole pages."""
        pages = self.view()
        return pages.paged() if pages.can_be_paged else pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PagedCache:
    """KV cache in a pool of pages, of ``size`` slots each.

    The token at position p of row b is in slot ``p % size`` of page ``tables_BM[b, p // size]``.
    Rows may share pages that they only read.
    """

    arrays: dict[str, Shaped[Array, "L P size ..."]]  # by the CacheSpec's names
    tables_BM: Int[Array, "B M"]  # below 0 where a row has no page yet
    layer: Int[Array | np.ndarray, ""] | None = None  # as in ContiguousCache
    is_empty: bool = dataclasses.field(default=False, metadata=dict(static=True))
    format: CacheFormat = dataclasses.field(default=CacheFormat.PLAIN, metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        spec: CacheSpec,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        tables_BM: Int[Array, "B M"],
        dtype: jnp.dtype,
        form: CacheFormat = CacheFormat.PLAIN,
    ) -> "PagedCache":
        """Makes an empty pool; ``tables_BM`` says which pages each row has."""
        arrays = _zeros(spec, (num_layers, num_pages, page_size), dtype, form)
        return cls(arrays=arrays, tables_BM=tables_BM, is_empty=True, format=form)

    def append(
        self, new: Mapping[str, Shaped[Array, "B T ..."]], positions_BT: Int[Array, "B T"]
    ) -> "PagedCache":
        """Returns the cache with new tokens; positions below 0 or without a page are skipped."""
        num_pages, size = next(iter(self.arrays.values())).shape[1:3]
        places_BT, slots_BT = jnp.divmod(positions_BT, size)
        pages_BT = jnp.take_along_axis(
            self.tables_BM, places_BT, axis=1, mode="fill", fill_value=-1
        )
        pages_BT = jnp.where((positions_BT < 0) | (pages_BT < 0), num_pages, pages_BT)
        return _appended(self, new, (pages_BT, slots_BT))

    def view(self) -> Pages:
        """Returns this layer's pages for attention: a view of all layers' pools, without a copy."""
        num_pages = next(iter(self.arrays.values())).shape[1]
        return self._pages(jnp.clip(self.tables_BM, 0, num_pages - 1))

    def pages(self) -> Pages:
        """Returns the pages that this layer appends to; a page number below 0 means none."""
        pages = self._pages(self.tables_BM)
        assert pages.tables_BM is not None
        tables_BM = jnp.where(self.tables_BM < 0, -1, pages.tables_BM)
        return dataclasses.replace(pages, tables_BM=tables_BM)

    def _pages(self, tables_BM: jax.Array) -> Pages:
        assert self.layer is not None, "in_layer"
        num_layers, num_pages, *_ = next(iter(self.arrays.values())).shape
        return Pages(
            arrays={
                name: stored.reshape(num_layers * num_pages, *stored.shape[2:])
                for name, stored in self.arrays.items()
            },
            tables_BM=tables_BM + self.layer * num_pages,
            format=self.format,
        )


HELD = "held/"
"""Prefix of arrays that a tentative pass keeps of its tokens, [L, B, T, ...]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """State of all tokens before, of a size that does not grow, in a slot for each sequence.

    Without slot numbers row b has slot b. With them, a row's state is read from one slot and
    written to another or the same; a number beyond the last slot writes nothing.
    """

    arrays: dict[str, Shaped[Array, "L S ..."]]  # by the CacheSpec's names
    from_B: Int[Array, "B"] | None = None  # slots that the rows read
    to_B: Int[Array, "B"] | None = None  # slots that they write
    layer: Int[Array | np.ndarray, ""] | None = None  # as in ContiguousCache
    is_empty: bool = dataclasses.field(default=False, metadata=dict(static=True))
    # Whether a pass holds its tokens apart and leaves the state as it is: how many of them count is
    # known after it (``Decoder.settled``).
    is_tentative: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        arrays: Sequence[StateArray],
        *,
        num_layers: int,
        num_slots: int,
        accum: jnp.dtype,
        compute: jnp.dtype,
    ) -> "StateCache":
        """Makes the state before the first token: zeros."""
        stored = {
            each.name: jnp.zeros(
                (num_layers, num_slots, *each.shape), accum if each.is_sum else compute
            )
            for each in arrays
        }
        return cls(arrays=stored, is_empty=True)

    def read(self) -> dict[str, Shaped[Array, "B ..."]]:
        """Returns this layer's arrays, of each row after the tokens before this pass."""
        place = self.layer if self.from_B is None else (self.layer, self.from_B)
        kept = ((n, x) for n, x in self.arrays.items() if not n.startswith(HELD))
        return {name: stored[place] for name, stored in kept}

    def write(self, new: Mapping[str, Shaped[Array, "B ..."]]) -> "StateCache":
        """Returns the state with this layer's arrays after the tokens of this pass."""
        place = self.layer if self.to_B is None else (self.layer, self.to_B)
        written = {
            name: self.arrays[name].at[place].set(x.astype(self.arrays[name].dtype), mode="drop")
            for name, x in new.items()
        }
        return dataclasses.replace(self, arrays=self.arrays | written)

    def slots(self, name: str) -> tuple[Shaped[Array, "LS ..."], Int[Array, "B"], Int[Array, "B"]]:
        """Returns an array with all layers' slots in one dim, and this layer's slots in it.

        Returns:
            The array, the slots that the rows read, and those that they write.
        """
        stored = self.arrays[name]
        num_layers, num_slots = stored.shape[:2]
        assert self.layer is not None, "in_layer"
        # A constant: a kernel would read a computed one from a launch of its own.
        rows, first = np.arange(num_slots, dtype=np.int32), self.layer * num_slots
        read_B, written_B = (rows if x is None else x for x in (self.from_B, self.to_B))
        last = num_layers * num_slots
        written_B = jnp.where(written_B < num_slots, first + written_B, last)
        return stored.reshape(last, *stored.shape[2:]), jnp.asarray(first + read_B), written_B

    def with_slots(self, name: str, array: Shaped[Array, "LS ..."]) -> "StateCache":
        """Returns the cache with an array in the form of ``slots``."""
        array = array.reshape(self.arrays[name].shape)
        return dataclasses.replace(self, arrays=self.arrays | {name: array})

    def hold(self, tokens: Mapping[str, Shaped[Array, "B T ..."]]) -> "StateCache":
        """Returns the cache that also has these arrays of the pass's tokens, of this layer."""
        num_layers, held = len(next(iter(self.arrays.values()))), {}
        for name, x in tokens.items():
            stack = self.arrays.get(HELD + name)
            stack = jnp.zeros((num_layers, *x.shape), x.dtype) if stack is None else stack
            held[HELD + name] = stack.at[self.layer].set(x)
        return dataclasses.replace(self, arrays=self.arrays | held)

    @property
    def held(self) -> dict[str, Shaped[Array, "L B T ..."]]:
        """Arrays that a tentative pass held, of all layers."""
        return {
            name.removeprefix(HELD): x for name, x in self.arrays.items() if name.startswith(HELD)
        }


def cache_spec(mixer: MixerConfig, model_dim: int) -> CacheSpec:
    """Returns what a mixer keeps of past tokens; of a user's own mixer the state that it declares.

    Raises:
        UnsupportedError: a mixer of a user's own that declares none.
    """
    shapes = mixer.state(model_dim) if isinstance(mixer, OwnMixer) else None
    if shapes is None:
        return mixer.cache
    return CacheSpec(
        arrays=(),
        state=tuple(
            StateArray(name=name, shape=shape, dims=(None,) * len(shape))
            for name, shape in shapes.items()
        ),
    )


def placed_state(
    arrays: Mapping[str, Shaped[Array, "L S ..."]], spec: CacheSpec, place: Callable[..., jax.Array]
) -> dict[str, Shaped[Array, "L S ..."]]:
    """Returns a state's arrays, sharded by their logical dims; ``place`` is an execution's."""
    dims = {each.name: (None, None, *each.dims) for each in spec.state}
    return {name: place(x, dims[name]) for name, x in arrays.items()}


type TokenCache = ContiguousCache | PagedCache
"""Entries per token, of all layers of one kind or of one: append(new, positions) and view()."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JointCache:
    """Entries per token and a state, of layers that have both; their arrays' names differ."""

    entries: TokenCache
    state: StateCache

    @property
    def arrays(self) -> dict[str, Shaped[Array, "..."]]:
        """All arrays of both."""
        return self.entries.arrays | self.state.arrays

    @property
    def is_empty(self) -> bool:
        """Whether nothing was cached before this pass."""
        return self.entries.is_empty

    def parts(
        self, arrays: Mapping[str, Shaped[Array, "..."]]
    ) -> tuple[dict[str, Shaped[Array, "..."]], dict[str, Shaped[Array, "..."]]]:
        """Splits arrays like these into those of the entries and those of the state."""
        mine = {name: x for name, x in arrays.items() if name in self.entries.arrays}
        return mine, {name: x for name, x in arrays.items() if name not in mine}


type Cache = TokenCache | StateCache | JointCache
"""The cache of all layers of one kind, or of one of them."""


def is_tentative(cache: Cache) -> bool:
    """Whether a pass holds its tokens apart from the state, which stays as it is."""
    state = cache.state if isinstance(cache, JointCache) else cache
    return isinstance(state, StateCache) and state.is_tentative


def in_layer[C: Cache](
    cache: C,
    arrays: dict[str, Shaped[Array, "..."]],
    layer: Int[Array | np.ndarray, ""],
) -> C:
    """Returns the cache of one layer: the stacked arrays and the layer's index in them.

    Args:
        arrays: the cache's arrays after the earlier layers have appended to them.
    """
    return updated(cache, arrays, layer=layer)


def with_pages(cache: TokenCache, arrays: Mapping[str, Shaped[Array, "..."]]) -> TokenCache:
    """Returns the cache with these arrays in place of its stored ones, by name."""
    stored = {name: arrays[name].reshape(x.shape) for name, x in cache.arrays.items()}
    return dataclasses.replace(cache, arrays=stored)


def after_pass[C: Cache](cache: C, arrays: dict[str, Shaped[Array, "..."]]) -> C:
    """Returns the cache with the arrays to which all layers have appended."""
    return updated(cache, arrays, layer=None, is_empty=False)


def updated[C: Cache](cache: C, arrays: dict[str, Shaped[Array, "..."]], **changes: Any) -> C:
    """Returns the cache with other arrays of the same names, and other fields."""
    if isinstance(cache, JointCache):
        entries, state = cache.parts(arrays)
        parts = {
            "entries": updated(cache.entries, entries, **changes),
            "state": updated(cache.state, state, **changes),
        }
        return dataclasses.replace(cache, **parts)
    return dataclasses.replace(cache, arrays=arrays, **changes)


def _appended[C: (ContiguousCache, PagedCache)](
    cache: C, new: Mapping[str, jax.Array], where: tuple[jax.Array, jax.Array]
) -> C:
    """The cache with [B, T, ...] new numbers at these indices behind its layer's."""
    written = dict(new)
    if cache.format is not CacheFormat.PLAIN:
        for name, x in new.items():
            scale_dtype = cache.arrays[name + SCALE].dtype
            written[name], written[name + SCALE] = stored_tokens(x, cache.format, scale_dtype)
    arrays = {
        name: stored.at[cache.layer, *where].set(written[name].astype(stored.dtype), mode="drop")
        for name, stored in cache.arrays.items()
    }
    return dataclasses.replace(cache, arrays=arrays)


def _zeros(
    spec: CacheSpec, dims: tuple[int, ...], dtype: jnp.dtype, form: CacheFormat
) -> dict[str, jax.Array]:
    kind = storage(form, dtype)
    return {
        each.name: jnp.zeros((*dims, *each.shape), dtype if each.name.endswith(SCALE) else kind)
        for each in spec.stored_as(form).arrays
    }


def cached_numbers(config: ModelConfig, num_tokens: int, *, evicted: bool) -> tuple[int, int]:
    """Counts the elements and the quantization scales that all layers cache per sequence.

    Args:
        evicted: whether layers with a window drop the tokens outside it.
    """
    elements = scales = 0
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        cache = block.mixer.cache
        kept = num_tokens if cache.window is None or not evicted else min(num_tokens, cache.window)
        elements += repeats * cache.elements * kept
        scales += repeats * cache.scales * kept
    return elements, scales


def recurrent_bytes(config: ModelConfig, *, accum: int = 4, compute: int = 2) -> int:
    """Counts the bytes of all layers' states per sequence.

    Args:
        accum, compute: bytes per element of the dtypes that sums and other arrays have.
    """
    return sum(
        repeats * math.prod(array.shape) * (accum if array.is_sum else compute)
        for block, repeats in zip(config.blocks, config.repeats, strict=True)
        for array in block.mixer.cache.state
    )
