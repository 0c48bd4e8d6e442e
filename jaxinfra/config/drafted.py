"""A model and the published EAGLE-3 head that an engine drafts with."""

import itertools

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError, UnsupportedError


@record
class EagleConfig:
    """An EAGLE-3 draft head (Li et al. 2025, arXiv 2503.01840), as its files describe it."""

    part: ModelConfig  # a model of its width, its one layer and its draft vocabulary
    vocab_size: int  # of the model that it was trained for
    target_dim: int  # width of that model
    # Numbers of that model's layers after which it reads the stream; empty: 2, half, all but 3.
    layers: tuple[int, ...]
    norm_before_residual: bool  # its stream begins with normalized hidden states
    has_embedding: bool  # its files have a token embedding table; else it reads the model's
    has_offsets: bool  # they say which of the model's ids it has; else it has the first ones


@record
class DraftedConfig(ModelConfig):
    """A model whose ``mtp`` module is a published draft head; for serving only."""

    eagle: EagleConfig

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        eagle, part, ends = self.eagle, self.eagle.part, self._ends
        own_width = self.model_dim if eagle.has_embedding else part.model_dim
        own_rows = eagle.vocab_size if eagle.has_offsets else part.vocab_size
        theirs = eagle.vocab_size, own_rows, eagle.target_dim, own_width
        ours = self.vocab_size, self.vocab_size, self.model_dim, self.model_dim
        if theirs != ours:
            raise ConfigError(
                f"the draft head is of a model of vocabulary {eagle.vocab_size} and width "
                f"{eagle.target_dim}, and has {part.vocab_size} ids and width {part.model_dim} "
                f"itself; this model has {self.vocab_size} and {self.model_dim}: take the head "
                "that was trained for it, with d2t where it has fewer ids"
            )
        if len(self.read_layers) != 3 or not set(self.read_layers) <= set(ends):
            raise ConfigError(
                f"the draft head reads the model after layers {self.read_layers}; these must be "
                f"three, and each the last of a repetition of this model's layers, from {ends[0]} "
                f"to {ends[-1]}: take the head that was trained for this model"
            )
        if self.embedding_scale != 1.0 or self.logit_scale != 1.0 or self.blocks[0].streams:
            raise UnsupportedError(
                "a draft head beside a model with embedding_scale, logit_scale or streams: heads "
                "differ in what they read there; leave --draft out, and n-grams draft"
            )

    @property
    def read_layers(self) -> tuple[int, ...]:
        """Numbers of layers after which the head reads the model's stream."""
        return self.eagle.layers or (2, self.num_layers // 2, self.num_layers - 3)

    @property
    def read_repetitions(self) -> tuple[int, ...]:
        """Indices of the stacks' repetitions, over all stacks, after which the head reads."""
        return tuple(self._ends.index(each) for each in self.read_layers)

    @property
    def mtp_part(self) -> ModelConfig:
        """A model of the head's one layer."""
        return self.eagle.part

    @property
    def _ends(self) -> list[int]:
        """Number of layers up to the end of each repetition."""
        lengths = [len(stack.pattern) for stack in self.stacks for _ in range(stack.repeats)]
        return list(itertools.accumulate(lengths))
