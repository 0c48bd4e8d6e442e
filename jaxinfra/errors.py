"""Errors people see. Each message states what is wrong, the actual values, the rule, the remedy."""

import difflib
from collections.abc import Iterable


class JaxinfraError(Exception):
    """Base of every error raised on purpose; the command line prints it in one line.

    Examples:
        >>> try:
        ...     jaxinfra.load("runs/that-is-not-there")
        ... except jaxinfra.JaxinfraError as error:
        ...     print(type(error).__name__)
        ConfigError
    """

    exit_code = 1  # trying again would not help


class ConfigError(JaxinfraError):
    """A setting, flag or combination of settings that cannot work.

    Examples:
        >>> try:
        ...     jaxinfra.parse_mesh("fsdp=4,tensr=2")
        ... except jaxinfra.ConfigError as error:
        ...     print(error)
        unknown mesh axis 'tensr'; did you mean 'tensor'? Known: ...
    """


class DataError(JaxinfraError):
    """Input text, a token file or a tokenizer that cannot be used.

    Examples:
        >>> try:
        ...     jaxinfra.trace("texts")
        ... except jaxinfra.DataError as error:
        ...     print(error)
        texts holds no trace (*.xplane.pb); make one with --profile START:STOP
    """


class CheckpointError(JaxinfraError):
    """A checkpoint that is missing, partial, corrupt, or of another model.

    Examples:
        >>> try:
        ...     jaxinfra.load("runs/mine", step=77)
        ... except jaxinfra.CheckpointError as error:
        ...     print(error)
        no checkpoint of step 77 in runs/mine/checkpoints. Other steps there: 4
    """


class UnsupportedError(JaxinfraError):
    """A valid request that the chosen implementation cannot serve; another one may.

    Examples:
        >>> @jaxinfra.part
        ... class Uncached(jaxinfra.OwnMixer):
        ...     pass
        >>> try:
        ...     Uncached().cache
        ... except jaxinfra.UnsupportedError as error:
        ...     print(error)
        Uncached has no pages of cached tokens, which servers, ... need; ...
    """


class DeviceMemoryError(JaxinfraError):
    """A program that does not fit into a device's memory, and would not the next time."""


class LostPeerError(JaxinfraError):
    """Another process of the job is gone, stuck or never came; starting again may help."""

    exit_code = 74


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name, such as ``"; did you mean 'tiny'? Known: small, tiny"``."""
    names = sorted(known)
    # A family's name, such as mixtral, means its members rather than another family like it.
    close = [each for each in names if name and each.startswith(name)][:1]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} Known: {', '.join(names)}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether what XLA raised says that a device's memory was not enough."""
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory"))
