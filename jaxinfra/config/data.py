"""Settings of the text that a run reads, and of how it becomes tokens."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from jaxinfra.config.limits import require_within
from jaxinfra.config.mixture import (
    MixtureBetween,
    MixtureSource,
    MixtureUnit,
    ValidationSet,
    check_mixture,
)
from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError

STDLIB = "stdlib"
OWN_SOURCE = "train(data=...)"
"""The source in the config of a run whose batches a script gave."""


class DataFormat(enum.StrEnum):
    """Kinds of documents: text, conversations, or answers of which some are better."""

    TEXT = "text"
    CHAT = "chat"  # a row of messages, of ShareGPT's or of Alpaca's form: docs/fine-tuning.md
    COMPLETIONS = "completions"  # a row of a prompt and its completion, plain text; it counts
    PREFERENCES = "preferences"  # a row of a prompt, a chosen and a rejected answer: there, too
    SCORED = "scored"  # the same rows, for a reward model
    LABELLED = "labelled"  # a row of a prompt, a completion and whether it is good: kto


PAIRED = (DataFormat.PREFERENCES, DataFormat.SCORED, DataFormat.LABELLED)
"""Formats for ``preferences``, in which two documents that are compared share a row."""

KEPT_WHOLE = (DataFormat.CHAT, DataFormat.COMPLETIONS)
"""Formats whose documents ``DataConfig.packing`` keeps whole in rows."""


class Packing(enum.StrEnum):
    """Ways to pack documents into rows."""

    AUTO = "auto"  # windows for text; best_fit for conversations
    WINDOWS = "windows"  # documents one after another, cut at the end of a row
    BEST_FIT = "best_fit"  # whole documents, longest first, each into the fullest row that fits it
    IN_ORDER = "in_order"  # whole documents in order; one that does not fit begins a new row
    ALONE = "alone"  # one document per row


class Turns(enum.StrEnum):
    """Messages of the model that count in a conversation, and the texts that they are in.

    Some chat templates change earlier text as a conversation goes on: they drop the thoughts of
    earlier messages, or move tools. Their texts ask for the last message alone.
    """

    PREFIXES = "prefixes"  # all; beside the whole, prefixes that end with those it does not ask for
    LAST = "last"  # the last one, in the whole


class TooLong(enum.StrEnum):
    """Ways to treat a conversation that is longer than a row."""

    DROP = "drop"
    CUT = "cut"  # its beginning is kept


class TokenizerKind(enum.StrEnum):
    """Kinds of tokenizers."""

    BPE = "bpe"  # byte-level BPE trained on the corpus
    BYTES = "bytes"
    FILE = "file"  # any tokenizer.json


@record
class TokenizerConfig:
    """A tokenizer; its vocabulary may not exceed the model's.

    Raises:
        ConfigError: kind=file without a path, or a path with another kind.

    Examples:
        >>> jaxinfra.DataConfig(tokenizer=jaxinfra.TokenizerConfig(kind="bytes")).tokenizer.kind
        'bytes'
    """

    kind: TokenizerKind = TokenizerKind.BPE  # byte-level BPE trained on the corpus, bytes, or file
    path: str | None = None  # of a tokenizer.json, with kind=file

    def __post_init__(self) -> None:
        if (self.kind == TokenizerKind.FILE) != (self.path is not None):
            raise ConfigError(
                f"tokenizer kind={self.kind} with path={self.path!r}: "
                "a path goes with kind=file, and only with it"
            )


@record
class DataConfig:
    """A corpus, its tokenizer, and its split into training and held-out documents.

    ``source`` is ``"stdlib"`` (the standard library source of the running Python), a directory, a
    glob, or a file. Files hold text, or rows in JSON or CSV (plain, gzip, zstd), Parquet or Arrow.
    Directories may also be saved by Hugging Face's ``datasets``, or hold pre-tokenized arrays
    written by this package. ``heldout_source`` names separate held-out text. Without it
    ``heldout_fraction`` of the documents is set aside, chosen by a hash of their names: at least
    one of two or more, and none if the fraction is 0.

    ``mixture`` takes the place of ``source``: several sources, each with its weight.

    Raises:
        ConfigError: a setting out of range, or a chat template without conversations.

    Examples:
        >>> data = jaxinfra.DataConfig(source="texts/", heldout_fraction=0.1)
        >>> config = dataclasses.replace(jaxinfra.preset("tiny"), data=data)
    """

    source: str = STDLIB  # text to train on
    heldout_source: str | None = None  # text to evaluate on; None: a part of source
    heldout_fraction: float = 0.03  # of documents, without heldout_source; 0: none is held out
    mixture: tuple[MixtureSource, ...] = ()  # several weighted sources instead of source
    mixture_unit: MixtureUnit = MixtureUnit.STEPS  # unit of time in the mixture's weights
    mixture_between: MixtureBetween = MixtureBetween.LINEAR  # weight between two given times
    validation: tuple[ValidationSet, ...] = ()  # further texts to evaluate on
    # Name of the evaluation set whose loss is heldout_loss, by which checkpoints are ranked; None:
    # the held-out documents of all sources together.
    best_by: str | None = None
    text_field: str = "text"  # of JSON lines and Parquet rows
    format: DataFormat = DataFormat.TEXT  # what a document is
    chat_template: str | None = None  # a model's directory; its template renders conversations
    # Variables that the template reads, such as {"enable_thinking": false}.
    template_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    turns: Turns = Turns.PREFIXES  # of the model that count, where a template changes earlier text
    packing: Packing = Packing.AUTO  # how documents become rows
    too_long: TooLong = (
        TooLong.DROP
    )  # conversations that no row holds, where packing keeps them whole
    tokenizer: TokenizerConfig = TokenizerConfig()  # how text becomes tokens
    num_prefetch_threads: int = 2  # threads that read ahead
    prefetch_batches: int = 4  # batches read ahead

    def __post_init__(self) -> None:
        if not 0.0 <= self.heldout_fraction < 1.0:
            raise ConfigError(f"heldout_fraction={self.heldout_fraction} must be in [0, 1)")
        if self.mixture and (self.source != STDLIB or self.heldout_source is not None):
            raise ConfigError(
                f"source={self.source!r} with heldout_source={self.heldout_source!r} beside a "
                f"mixture of {len(self.mixture)} sources, which takes their place: make them "
                "sources of the mixture, or leave data.mixture empty"
            )
        check_mixture(
            self.mixture, self.validation, between=self.mixture_between, best_by=self.best_by
        )
        if self.format not in PAIRED and (
            (self.format == DataFormat.CHAT) != (self.chat_template is not None)
        ):
            raise ConfigError(
                f"data format={self.format} with chat_template={self.chat_template!r}: a model's "
                "directory, whose template renders them, goes with conversations and only with them"
            )
        if self.chat_template is None and (self.template_settings or self.turns != Turns.PREFIXES):
            raise ConfigError(
                f"template_settings={dict(self.template_settings)} and the choice of messages "
                f"{self.turns!s} without a chat_template: name one, or leave them out"
            )
        if self.format not in KEPT_WHOLE and self.packing != Packing.AUTO:
            raise ConfigError(
                f"packing={self.packing} of data format={self.format}: conversations and "
                "completions alone have a choice; leave packing=auto"
            )
        if self.format != DataFormat.TEXT and self.tokenizer.kind == TokenizerKind.BPE:
            raise ConfigError(
                f"data format={self.format} with tokenizer kind=bpe: conversations and "
                "pairs of answers are written for a tokenizer that there is; choose kind=file and "
                "its path, or kind=bytes"
            )
        if self.num_prefetch_threads < 0 or self.prefetch_batches < 1:
            raise ConfigError(
                f"num_prefetch_threads={self.num_prefetch_threads} must not be negative and "
                f"prefetch_batches={self.prefetch_batches} at least 1"
            )
        require_within(
            num_threads=self.num_prefetch_threads, prefetch_batches=self.prefetch_batches
        )
