"""Base classes of configs for a user's own layers, which replace a built-in layer in a block.

Such a config is a frozen dataclass whose fields are the layer's settings. Mark it with
``jaxinfra.part``: ``config.json`` then names it, and any process that can import it can read it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxinfra.config.cache import CacheSpec
from jaxinfra.config.rope import RopeConfig
from jaxinfra.errors import UnsupportedError

_PLANNED = ("num_q_heads", "num_kv_heads", "head_dim", "hidden_dim", "kind")
"""Attributes of a record that only the planner and exchanges of heads read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnLayer:
    """Base class of configs for a user's own layers: a layer class and its settings.

    Set ``layer`` to the layer's class, a ``flax.nnx.Module`` built with ``(config, *, model_dim,
    std, out_std, execution, rngs)``. It is called with ``(x, given)``, x [B, T, D] in the compute
    dtype, and returns a ``LayerOutput``. ``jaxinfra.model.mlp.Mlp`` is an example.
    """

    layer: ClassVar[Callable[..., Any]]

    def __getattr__(self, name: str) -> Any:
        # No properties: a record may have fields of these names.
        if name in _PLANNED:
            raise UnsupportedError(f"{type(self).__name__} is not known to the planner")
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def tensor_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor parallelism divides."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnFeedForward(OwnLayer):
    """Base class of configs for a feed-forward layer of your own, which maps each position
    separately. The planner leaves out its costs.

    Examples:
        >>> class Square(nnx.Module):
        ...     def __init__(self, config, *, model_dim, std, out_std, execution, rngs):
        ...         self.scale = nnx.Param(jnp.full(model_dim, config.start), axes=("embed",))
        ...
        ...     def __call__(self, x, given):
        ...         return jaxinfra.LayerOutput(x=x * x * self.scale[...])
        >>> @jaxinfra.part
        ... @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class SquareConfig(jaxinfra.OwnFeedForward):
        ...     start: float = 0.1
        ...     layer = Square
        >>> config = jaxinfra.customize(jaxinfra.preset("tiny"), feed_forward=SquareConfig())
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMixer(OwnLayer):
    """Base class of configs for a mixer of your own: a layer that mixes positions of a sequence.

    It trains on every mesh without a context axis; the planner does not know its costs. It
    generates with ``jaxinfra.generate``, not in a server: by computing the whole text again for
    each token, or, with ``state``, from what its layer keeps.

    Examples:
        >>> class Average(nnx.Module):  # of all positions so far
        ...     def __init__(self, config, *, model_dim, std, out_std, execution, rngs):
        ...         self.scale = nnx.Param(jnp.ones(model_dim), axes=("embed",))
        ...
        ...     def __call__(self, x, given):
        ...         count = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        ...         return jaxinfra.LayerOutput(x=jnp.cumsum(x, axis=1) / count * self.scale[...])
        >>> @jaxinfra.part
        ... @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class AverageConfig(jaxinfra.OwnMixer):
        ...     layer = Average
        >>> config = jaxinfra.customize(jaxinfra.preset("tiny"), mixer=AverageConfig())
    """

    rope: RopeConfig | None = None  # if set, ``given.rope`` has its cos and sin per position
    window: int | None = dataclasses.field(default=None, init=False)
    scale: float | None = dataclasses.field(default=None, init=False)
    logit_soft_cap: float | None = dataclasses.field(default=None, init=False)

    @property
    def rotated_dim(self) -> int:
        """Width that is rotated (RoPE); override it where ``rope`` is given."""
        return 0

    @property
    def score_width(self) -> int:
        """Width of scores between positions, for counting FLOPs; none by default."""
        return 0

    @property
    def value_width(self) -> int:
        """Width of values that scores weigh, for counting FLOPs; none by default."""
        return 0

    def state(self, model_dim: int) -> dict[str, tuple[int, ...]] | None:
        """Shapes per row, by name, of the arrays that the layer keeps between tokens; None: none.

        While text is generated the layer finds in ``given.cache`` what it kept: ``read()`` gives
        the arrays [B, ...] in fp32, zeros before the first token, and ``write(new)`` what to return
        as ``LayerOutput.cache``. A pass then has one token per row or more, and no padding.
        """
        return None

    @property
    def cache(self) -> CacheSpec:
        """Raises UnsupportedError, since this mixer has no pages of tokens."""
        raise UnsupportedError(
            f"{type(self).__name__} has no pages of cached tokens, which servers, dialogues and "
            "files of prompts need; use jaxinfra.generate, or jaxinfra generate with --prompt"
        )
