"""Batches and held-out sets that a script gives to ``train`` in place of the config's texts."""

import abc
import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, final

import jax
import numpy as np
from jaxtyping import Int64

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config.data import OWN_SOURCE, DataConfig, DataFormat, TokenizerKind
from jaxinfra.config.mixture import OWN
from jaxinfra.config.run import RunConfig
from jaxinfra.data.batch import Batch, batch_of
from jaxinfra.data.corpora import Corpora
from jaxinfra.data.tokenizer import Tokenizer, bytes_tokenizer
from jaxinfra.data.train_iterator import TrainIterator, sample_ids
from jaxinfra.errors import ConfigError, DataError
from jaxinfra.training.job import Job
from jaxinfra.training.state import State

_REMEMBERED = 4  # last batches, which a report of a bad step reads again
_STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Methods that give and take a state: those of PyTorch's and Hugging Face's loaders, of Grain's."""

type Batches = TrainIterator | OwnBatches | PolicyBatches
"""An iterator over this process's rows of each step's batch."""
type Texts = Corpora | OwnTexts
"""The tokenizer of a run, and the sets that it is evaluated on."""


class PolicyBatches(abc.ABC):
    """Iterator over batches that depend on the state of the model, with the methods of
    ``TrainIterator``.
    """

    busy_fraction = 1.0
    num_ready = 0  # batches are made when they are asked for
    step = 0  # of the next batch

    @abc.abstractmethod
    def follow(self, state: State) -> None:
        """Takes the state that the next batch is made with; it is read before the next step."""

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> Batch[np.ndarray]: ...

    @abc.abstractmethod
    def batch(self, step: int) -> Batch[np.ndarray]:
        """Returns one of the last batches again."""

    @abc.abstractmethod
    def sample_ids(self, step: int) -> Int64[np.ndarray, "B"]:
        """Returns the numbers of the rows of a step's batch."""

    @abc.abstractmethod
    def read(self, step: int) -> dict[str, float]:
        """Returns what the record of a step says of its batch."""

    def row_sources(self, step: int) -> None:
        """Returns None: there are no named sources."""
        del step

    @abc.abstractmethod
    def state(self, step: int | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint, to continue with the batch of ``step``."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continues with the step in ``state``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what makes batches."""


class PolicyData(abc.ABC):
    """Data that a run's own model makes, as reinforcement learning does."""

    validation: Mapping[str, Iterable[Any]] = {}
    makes_batches = True

    @abc.abstractmethod
    def named_in(self, config: RunConfig) -> RunConfig:
        """Returns the config with ``data.source`` set to a mark that batches are given."""

    @abc.abstractmethod
    def texts(self, config: RunConfig, tokenizer: Tokenizer | None) -> "OwnTexts":
        """Returns the tokenizer given or the configured one; there are no texts to evaluate on."""

    @abc.abstractmethod
    def batches(self, job: Job, run: RunDirectory, say: Callable[[str], None]) -> PolicyBatches:
        """Opens the batches of a run from step 0."""


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnData:
    """The data that a script gives to ``train``: batches to train on, sets to evaluate on."""

    data: Iterable[Any] | None
    validation: Mapping[str, Iterable[Any]]

    @classmethod
    def of(cls, data: Any, validation: Any) -> "OwnData | PolicyData | None":
        """Returns the script's data, or None; raises ConfigError for what is not iterable."""
        if isinstance(data, PolicyData):
            return data
        if data is None and validation is None:
            return None
        sets = validation if isinstance(validation, Mapping) else {OWN: validation}
        sets = {} if validation is None else sets
        given = {"validation" if n == OWN else f"validation {n}": each for n, each in sets.items()}
        for name, each in {**given, **({} if data is None else {"data": data})}.items():
            if not isinstance(each, Iterable) or isinstance(each, str | bytes | Mapping):
                raise ConfigError(
                    f"{name}={each!r:.60} is a {type(each).__name__}; give an iterable of batches, "
                    "each of token ids [batch_size, sequence_length + 1] or of batch_of"
                )
            if name != "data" and isinstance(each, Iterator):
                raise ConfigError(
                    f"{name}={each!r:.60} can be read only once, and every evaluation "
                    "reads it from its start; give a list, or an object whose __iter__ begins anew"
                )
        return cls(data=data, validation=sets)

    @property
    def makes_batches(self) -> bool:
        """Whether the script gives batches to train on."""
        return self.data is not None

    def batches(self, job: Job, run: RunDirectory, say: Callable[[str], None]) -> "OwnBatches":
        """Opens the script's batches from its first one."""
        del run
        assert self.data is not None, "makes_batches"
        return OwnBatches(self.data, job.config, share=job.process_share(), say=say)

    def named_in(self, config: RunConfig) -> RunConfig:
        """Returns the config with ``data.source`` set to a mark that a script gives the batches.

        Raises:
            ConfigError: the config's data have settings that batches of a script cannot follow.
        """
        if self.data is None:
            return config
        data, plain = config.data, DataConfig(source=OWN_SOURCE, tokenizer=config.data.tokenizer)
        given = [
            name
            for name in ("mixture", "validation", "best_by", "heldout_source", "chat_template")
            if getattr(data, name) != getattr(plain, name)
        ]
        if given or data.format is not DataFormat.TEXT:
            raise ConfigError(
                f"data= with data.{(given or ['format'])[0]}: a script's batches take the place of "
                "the config's texts; leave it out, and give sets to evaluate on as validation="
            )
        if data.tokenizer.kind is TokenizerKind.BPE:
            raise ConfigError(
                "data= with tokenizer kind=bpe, which is trained on data.source: choose kind=file "
                "with the path of the tokenizer.json that made the tokens, or kind=bytes"
            )
        return dataclasses.replace(config, data=dataclasses.replace(data, source=OWN_SOURCE))

    def texts(self, config: RunConfig, tokenizer: Tokenizer | None) -> "OwnTexts":
        """Returns the sets to evaluate on, with the tokenizer given or the configured one."""
        found = configured_tokenizer(config) if tokenizer is None else tokenizer
        return OwnTexts(tokenizer=found, heldout=dict(self.validation))


def configured_tokenizer(config: RunConfig) -> Tokenizer:
    """Loads the tokenizer of a config whose kind is file or bytes."""
    path = config.data.tokenizer.path
    return Tokenizer.load(Path(path).expanduser()) if path else bytes_tokenizer()


@final
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnTexts:
    """A script's sets to evaluate on, and the tokenizer of the run."""

    tokenizer: Tokenizer
    heldout: dict[str, Iterable[Any]]  # by name

    @property
    def ranking(self) -> tuple[str, ...]:
        """Names of the sets whose tokens together give the run's held-out loss: all of them."""
        return tuple(self.heldout)

    def batches(self, name: str, config: RunConfig, share: tuple[int, int]) -> Iterator[Batch]:
        """Iterates over this process's rows of the batches of one set, from its start."""
        for number, each in enumerate(self.heldout[name]):
            yield _rows(each, config, share, what=f"batch {number} of validation {name}")


@final
class OwnBatches:
    """Iterator over this process's rows of a script's batches, with the methods of
    ``TrainIterator``.

    Every process iterates over all batches, and takes its rows of each.

    Args:
        share: this process's part of a batch, and the number of parts.
        say: prints a message.
    """

    busy_fraction = 1.0
    num_ready = 0  # batches are made when they are asked for

    def __init__(
        self,
        data: Iterable[Any],
        config: RunConfig,
        *,
        share: tuple[int, int],
        say: Callable[[str], None],
    ):
        self._data, self._config, self._share, self._say = data, config, share, say
        self._iterator = iter(data)
        self.step = 0  # of the next batch
        self._states: dict[int, Any] = {0: self._state()}
        self._last: collections.OrderedDict[int, Batch] = collections.OrderedDict()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch[np.ndarray]:
        steps = self._config.training.steps
        try:
            found = next(self._iterator)
        except StopIteration:
            raise DataError(
                f"data ended after {self.step} of {steps} steps; give an iterable that goes on, "
                f"such as itertools.cycle, or training.steps={self.step}"
            ) from None
        batch = _rows(found, self._config, self._share, what=f"batch {self.step} of data")
        self._last[self.step] = batch
        self.step += 1
        self._states[self.step] = self._state()
        while len(self._last) > _REMEMBERED:
            self._states.pop(self._last.popitem(last=False)[0] or -1, None)  # that of 0 stays
        return batch

    def batch(self, step: int) -> Batch[np.ndarray]:
        """Returns this process's rows of one of the last batches again."""
        if step not in self._last:
            raise DataError(f"batch {step} of data is read, and cannot be read again")
        return self._last[step]

    def sample_ids(self, step: int) -> Int64[np.ndarray, "B"]:
        """Returns the numbers of the rows of a step's batch, over all processes."""
        return sample_ids(step, batch_size=self._config.training.batch_size)

    def read(self, step: int) -> dict[str, float]:
        """Returns an empty dict: a script's data have no sources to count."""
        del step
        return {}

    def row_sources(self, step: int) -> None:
        """Returns None: a script's data have no named sources."""
        del step

    def state(self, step: int | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint, to continue with the batch of ``step``."""
        step = self.step if step is None else step
        return {"step": step, "own": self._states[step]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues with the step in ``state``: exactly, if the data can take their state back.

        Raises:
            DataError: the checkpoint is of a run without ``data=``, or the run has to go back to
                batches that its data cannot give again.
        """
        if "own" not in state:
            raise DataError(
                "the run has read the texts of its config so far; leave data= out, or start "
                "another run"
            )
        kept, goes_back = state["own"], bool(self._last)
        self.step = state["step"]
        if kept is None:
            if goes_back:
                raise DataError(
                    f"the run has to go back to step {self.step}, and data cannot: give it "
                    "state_dict and load_state_dict; --resume begins its data anew"
                )
            if self.step:
                self._say(
                    "WARNING: data says no state (state_dict and load_state_dict), so it begins "
                    f"from its start: from step {self.step} on the run is not what it would have "
                    "been without the stop"
                )
        else:
            self._load(kept)
        self._states[self.step] = kept

    def close(self) -> None:
        """Does nothing: there are no threads to stop."""

    def _state(self) -> Any:
        for owner in (self._data, self._iterator):
            for give, take in _STATES:
                if hasattr(owner, give) and hasattr(owner, take):
                    return _as_json(getattr(owner, give)())
        return None

    def _load(self, state: Any) -> None:
        for give, take in _STATES:
            if hasattr(self._data, give) and hasattr(self._data, take):
                getattr(self._data, take)(state)
                self._iterator = iter(self._data)
                return
        self._iterator = iter(self._data)
        for give, take in _STATES:
            if hasattr(self._iterator, give) and hasattr(self._iterator, take):
                getattr(self._iterator, take)(state)
                return
        raise DataError(
            "the checkpoint has a state of data, and this data takes none; give the data that the "
            "run was begun with"
        )


def _as_json(state: Any) -> Any:
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the state of data is no JSON value ({error}); a checkpoint keeps numbers, text, "
            "lists and dicts of these"
        ) from error


def _rows(found: Any, config: RunConfig, share: tuple[int, int], *, what: str) -> Batch[np.ndarray]:
    """This process's rows of a whole batch, checked against the config."""
    try:
        batch = found if isinstance(found, Batch) else batch_of(found)
    except ConfigError as error:
        raise DataError(f"{what}: {error}") from error
    batch = jax.tree.map(np.asarray, batch)
    training, vocab_size = config.training, config.model.vocab_size
    shape, asked = batch.tokens.shape, (training.batch_size, training.sequence_length)
    if shape != asked:
        raise DataError(
            f"{what} has rows of {shape[0]} x {shape[1]} tokens, the config batch_size={asked[0]} "
            f"and sequence_length={asked[1]}; give whole batches of token ids {asked[0]} x "
            f"{asked[1] + 1}, of which the last is a target only"
        )
    for ids in (batch.tokens, batch.targets):
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise DataError(
                f"{what} has token ids {ids.min()}..{ids.max()}, the model's vocabulary is "
                f"0..{vocab_size - 1}"
            )
    part, parts = share
    rows = len(batch.tokens) // parts
    return jax.tree.map(lambda x: x[part * rows : (part + 1) * rows], batch)
