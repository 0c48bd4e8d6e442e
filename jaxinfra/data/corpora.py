"""All texts of a run by name: a source or mixture to train on, and sets to evaluate on."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import final

from jaxinfra.config.data import (
    KEPT_WHOLE,
    OWN_SOURCE,
    PAIRED,
    STDLIB,
    DataConfig,
    DataFormat,
    Packing,
)
from jaxinfra.config.mixture import OWN
from jaxinfra.config.run import TrainingConfig
from jaxinfra.data.chat import ChatRow
from jaxinfra.data.corpus import Corpus, open_corpus, shared_tokenizer
from jaxinfra.data.mixture import MixedWindows, MixtureSchedule
from jaxinfra.data.pairs import prompt_of
from jaxinfra.data.sources import scan
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.whole_rows import WholeRows, conversation_rows, pair_rows
from jaxinfra.errors import DataError


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpora:
    """The corpora that a run trains and is evaluated on, all with one tokenizer."""

    config: DataConfig
    sources: dict[str, Corpus]  # to train on; without a mixture one corpus, named "own"
    validation: dict[str, Corpus]  # only the held-out side of each is used

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens of all corpora."""
        return next(iter(self.sources.values())).tokenizer

    @property
    def heldout(self) -> dict[str, TokenArrays]:
        """Token arrays of the held-out sets, by name; none of a source that is all trained on."""
        found = {name: each.heldout for name, each in self._all().items()}
        return {name: arrays for name, arrays in found.items() if arrays is not None}

    @property
    def ranking(self) -> tuple[str, ...]:
        """Names of the held-out sets whose tokens together give the run's held-out loss: the
        sources', or, if nothing is held out of them, all validation sets.
        """
        chosen = self.config.best_by
        names = tuple(self.sources) if chosen in (None, OWN) else (chosen,)
        return tuple(name for name in names if name in self.heldout) or tuple(self.heldout)

    def ranking_documents(self) -> list[bytes]:
        """Texts of the held-out sets that give the run's held-out loss."""
        return [text for name in self.ranking for text in self._all()[name].heldout_documents()]

    def changed(self, change: Callable[[TokenArrays], TokenArrays]) -> "Corpora":
        """Returns the corpora with ``change`` applied to each of their token arrays."""

        def heldout(each: Corpus) -> TokenArrays | None:
            return None if each.heldout is None else change(each.heldout)

        sources = {
            name: dataclasses.replace(each, train=change(each.train), heldout=heldout(each))
            for name, each in self.sources.items()
        }
        validation = {
            name: dataclasses.replace(each, heldout=heldout(each))
            for name, each in self.validation.items()
        }
        return dataclasses.replace(self, sources=sources, validation=validation)

    def with_heldout_tokens(self, most: int | None) -> "Corpora":
        """Returns the corpora with at most ``most`` tokens in each held-out set; None: all."""
        if most is None:
            return self
        together = 2 if self.config.format in PAIRED else 1
        sources, validation = (
            {name: each.with_heldout_tokens(most, together=together) for name, each in some.items()}
            for some in (self.sources, self.validation)
        )
        return dataclasses.replace(self, sources=sources, validation=validation)

    def _all(self) -> dict[str, Corpus]:
        return {**self.sources, **self.validation}

    def train_source(self, training: TrainingConfig) -> TokenArrays | WholeRows | MixedWindows:
        """Makes the source of training batches: windows, whole rows or a mixture."""
        data = self.config
        order = {"sequence_length": training.sequence_length, "seed": training.seed}
        if data.format in PAIRED:
            return pair_rows(self.sources[OWN].train, **order)
        rows_of = None
        if data.format in KEPT_WHOLE and data.packing is not Packing.WINDOWS:
            rows_of = functools.partial(
                conversation_rows, packing=data.packing, too_long=data.too_long, **order
            )
        if data.mixture:
            trained = {name: each.train for name, each in self.sources.items()}
            return MixedWindows(trained, schedule_of(data, training), **order, rows_of=rows_of)
        own = self.sources[OWN].train
        return own if rows_of is None else rows_of(own)


def schedule_of(config: DataConfig, training: TrainingConfig) -> MixtureSchedule:
    """Returns the schedule of how many rows of each source a step reads."""
    return MixtureSchedule(
        config.mixture,
        between=config.mixture_between,
        unit=config.mixture_unit,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        seed=training.seed,
    )


def open_corpora(
    config: DataConfig,
    *,
    vocab_size: int,
    cache_dir: Path,
    tokenizer: Tokenizer | None = None,
    template_directory: Path | None = None,
) -> Corpora:
    """Opens all texts that ``config`` names, each as ``open_corpus`` does.

    Without ``tokenizer``, a mixture uses the configured one, that of the first source of token
    arrays, or one trained on equal parts of all sources.

    Raises:
        DataError: a text cannot be read, or has no token to train on or to evaluate on.
    """
    if config.source == OWN_SOURCE:
        raise DataError(
            "the run has no text of its own: a script gave its batches (jaxinfra.train(..., "
            "data=...); give them again), or jaxinfra rl sampled them; evaluate it on a text "
            "with --data"
        )
    parts = {each.name: _alone(config, each.source, each.heldout_source) for each in config.mixture}
    if tokenizer is None and parts:
        tokenizer = shared_tokenizer(
            list(parts.values()), vocab_size=vocab_size, cache_dir=cache_dir
        )
    open_it = functools.partial(
        open_corpus,
        vocab_size=vocab_size,
        cache_dir=cache_dir,
        template_directory=template_directory,
    )
    parts = parts or {OWN: _alone(config, config.source, config.heldout_source)}
    sources = {name: open_it(part, tokenizer=tokenizer) for name, part in parts.items()}
    tokenizer = next(iter(sources.values())).tokenizer
    validation = {
        each.name: open_it(_alone(config, each.source, each.source), tokenizer=tokenizer)
        for each in config.validation
    }
    return Corpora(config=config, sources=sources, validation=validation)


def require_sources(config: DataConfig) -> None:
    """Raises DataError if a text that ``config`` names is not there; reads none of them."""
    named = [each.source for each in config.validation]
    for part in config.mixture or (config,):
        named += [part.source, part.heldout_source or part.source]
    for source in named:
        if source not in (OWN_SOURCE, STDLIB) and not Path(source).expanduser().exists():
            scan(source)  # a glob, or nothing


def first_prompt(config: DataConfig) -> str | ChatRow:
    """Returns the prompt of text that a trained model samples: the data's first prompt, if it has
    prompts. For the standard library it is the beginning of a function, for other text "".
    """
    source = config.mixture[0].source if config.mixture else config.source
    if config.format is DataFormat.TEXT:
        return "def " if source == STDLIB else ""
    return prompt_of(next(scan(source).documents(text_field=None)), config)


def _alone(config: DataConfig, source: str, heldout_source: str | None) -> DataConfig:
    """The config of one text."""
    return dataclasses.replace(
        config,
        source=source,
        heldout_source=heldout_source,
        mixture=(),
        validation=(),
        best_by=None,
    )
