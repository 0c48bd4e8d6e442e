"""Mixtures of several sources, each with its fraction of a batch, and named evaluation sets."""

import bisect
import enum
import itertools
import math
import re
from collections.abc import Sequence

from jaxinfra.config.record import record
from jaxinfra.errors import ConfigError, nearest

type Weight = float | tuple[tuple[int, float], ...]
"""A number, or points of time and weight, the earliest first."""

OWN = "own"
"""The set of what is held out of the sources themselves, all together."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class MixtureUnit(enum.StrEnum):
    """Units in which the times of a mixture's weights count."""

    STEPS = "steps"
    TOKENS = "tokens"  # padding included: steps x batch_size x sequence_length


class MixtureBetween(enum.StrEnum):
    """Rules for a source's weight between two times at which it is given."""

    LINEAR = "linear"  # linear interpolation
    HOLD = "hold"  # the weight of the earlier time


@record
class MixtureSource:
    """One of several sources; the format and tokenizer of ``DataConfig`` apply to all of them.

    Raises:
        ConfigError: an invalid name, a weight below 0, or times that do not rise.

    Examples:
        >>> web = jaxinfra.MixtureSource(name="web", source="web/", weight=((0, 0.9), (1000, 0.2)))
        >>> code = jaxinfra.MixtureSource(name="code", source="code/", weight=0.5)
        >>> data = jaxinfra.DataConfig(mixture=(web, code))
    """

    name: str  # what tables and metrics call it
    source: str  # text to train on, as data.source
    # The source's fraction of a batch is its weight over the sum of all weights. A number, or
    # [[time, weight], ...] for a weight that changes during training.
    weight: Weight = 1.0
    heldout_source: str | None = None  # text to evaluate on; None: a part of source

    def __post_init__(self) -> None:
        _require_name(self.name, "mixture source")
        if not isinstance(self.weight, int | float | tuple):
            raise ConfigError(
                f"mixture source {self.name!r}: weight={self.weight!r} must be a number or a tuple "
                "of (time, weight)"
            )
        times = [time for time, _ in self.points]
        if not times or times[0] < 0 or any(b <= a for a, b in itertools.pairwise(times)):
            raise ConfigError(
                f"mixture source {self.name!r}: weight={self.weight} has the times {times}; give "
                "at least one point, times from 0 on and each later than the one before"
            )
        for _, weight in self.points:
            if not 0.0 <= weight < math.inf:
                raise ConfigError(
                    f"mixture source {self.name!r}: weight {weight} must be 0 or more, and finite"
                )

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Points of the source's weight over training, as (time, weight) pairs."""
        return self.weight if isinstance(self.weight, tuple) else ((0, self.weight),)

    def weight_at(self, time: int, between: MixtureBetween) -> float:
        """Returns the source's weight at a time; constant before the first and after the last."""
        points = self.points
        place = bisect.bisect_right(points, time, key=lambda point: point[0]) - 1
        if place < 0:
            return points[0][1]
        begin, weight = points[place]
        if between is MixtureBetween.HOLD or place + 1 == len(points):
            return weight
        end, later = points[place + 1]
        return weight + (later - weight) * ((time - begin) / (end - begin))


@record
class ValidationSet:
    """A named set of documents that is evaluated, never trained on.

    Raises:
        ConfigError: an invalid name.

    Examples:
        >>> books = jaxinfra.ValidationSet(name="books", source="books.jsonl")
        >>> data = jaxinfra.DataConfig(source="texts/", validation=(books,))
    """

    name: str  # what tables and metrics call it
    source: str  # text, as data.source; all of it

    def __post_init__(self) -> None:
        _require_name(self.name, "validation set")


def turning_points(sources: Sequence[MixtureSource]) -> list[int]:
    """Returns the times, 0 included, between which every source's weight is linear."""
    return sorted({0, *(time for each in sources for time, _ in each.points)})


def check_mixture(
    sources: Sequence[MixtureSource],
    validation: Sequence[ValidationSet],
    *,
    between: MixtureBetween,
    best_by: str | None,
) -> None:
    """Raises ConfigError for a name used twice, a time when no source has weight, or an unknown
    ``best_by``.
    """
    names = [each.name for each in (*sources, *validation)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"the name {name!r} is given to {names.count(name)} mixture sources or validation "
                "sets; metrics tell them apart by name: rename all but one"
            )
    for time in turning_points(sources):
        if sources and not any(each.weight_at(time, between) for each in sources):
            raise ConfigError(
                f"all weights of the mixture are 0 at {time}, so nothing would be read; give one "
                "of them a weight there"
            )
    known = [OWN, *names]
    if best_by is not None and best_by not in known:
        raise ConfigError(f"best_by={best_by!r} is no set to evaluate on{nearest(best_by, known)}")


def _require_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name) or name == OWN:
        raise ConfigError(
            f"{what} name {name!r}: names are letters, digits, '.', '_' and '-', begin with a "
            f"letter or digit, and are not {OWN!r}; choose another"
        )
