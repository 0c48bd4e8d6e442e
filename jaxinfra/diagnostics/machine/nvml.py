"""GPU readings from NVIDIA's management library (NVML), live or recorded.

Every reading is one call: a function of ``pynvml``, the index of a GPU, further arguments. A
recording is a JSON object from calls to their results. So a faulty machine's recording can be
examined on another machine, and tests need no GPU.
"""

import ctypes
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import pynvml

from jaxinfra.errors import ConfigError
from jaxinfra.runtime.files import read_json

_ERROR = "error"
_LIBRARY = "library"
# By nvmlValueType_t: which member of the union holds a field's value.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NoAnswerError(Exception):
    """Raised for a reading that the driver or GPU does not provide; the message says why."""


@final
class LiveAnswers:
    """NVML readings of this machine's driver, kept so that ``record`` can save them.

    Raises NoAnswerError where there is no driver.
    """

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoAnswerError(str(error)) from error
        self._handles: dict[int, Any] = {}
        version = importlib.metadata.version("nvidia-ml-py")
        self._kept: dict[str, Any] = {_LIBRARY: f"nvidia-ml-py {version}"}

    def ask(self, function: str, gpu: int | None = None, *args: Any) -> Any:
        """Calls ``pynvml.FUNCTION`` for one GPU or the driver (None), and keeps its result.

        Raises NoAnswerError if the driver or GPU does not provide it.
        """
        name = _question(function, gpu, args)
        try:
            if gpu is not None and gpu not in self._handles:
                self._handles[gpu] = pynvml.nvmlDeviceGetHandleByIndex(gpu)
            handle = [] if gpu is None else [self._handles[gpu]]
            answer = _plain(getattr(pynvml, function)(*handle, *args))
        except pynvml.NVMLError as error:
            self._kept[name] = {_ERROR: str(error)}
            raise NoAnswerError(str(error)) from error
        self._kept[name] = answer
        return answer

    def record(self, file: Path) -> None:
        """Writes all NVML calls so far and their results to a JSON file."""
        file.write_text(json.dumps(self._kept, indent=1) + "\n")


@final
class RecordedAnswers:
    """NVML readings from a recording, possibly of another machine."""

    def __init__(self, answers: Mapping[str, Any]):
        self._answers = answers

    @classmethod
    def read(cls, file: Path) -> "RecordedAnswers":
        """Reads a recording that ``LiveAnswers.record`` wrote, or raises ConfigError."""
        answers = read_json(file, holds=dict[str, Any])
        if _LIBRARY not in answers:
            raise ConfigError(f"{file} is no recording of jaxinfra doctor --record")
        return cls(answers)

    def ask(self, function: str, gpu: int | None = None, *args: Any) -> Any:
        """Returns the recorded result of ``pynvml.FUNCTION`` for one GPU or the driver."""
        answer = self._answers.get(_question(function, gpu, args), {_ERROR: "not recorded"})
        if isinstance(answer, dict) and _ERROR in answer:
            raise NoAnswerError(answer[_ERROR])
        return answer


def _question(function: str, gpu: int | None, args: tuple[Any, ...]) -> str:
    given = ([] if gpu is None else [gpu]) + [_plain(value) for value in args]
    return f"{function}{json.dumps(given)}"


def _plain(value: Any) -> Any:
    """Converts a ctypes structure, array or bytes to JSON values."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, pynvml.c_nvmlFieldValue_t):
        kind = int(value.valueType)
        member = _MEMBERS[kind] if kind < len(_MEMBERS) else "ullVal"
        return None if value.nvmlReturn else getattr(value.value, member)
    if isinstance(value, ctypes.Structure):
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, list | tuple | ctypes.Array):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return {name: _plain(item) for name, item in vars(value).items()}


type Answers = LiveAnswers | RecordedAnswers
"""NVML readings, from this machine's driver or from a recording."""


def asked_or_none(answers: Answers, function: str, gpu: int | None = None, *args: Any) -> Any:
    """Returns an NVML reading, or None if the driver or GPU does not provide it."""
    try:
        return answers.ask(function, gpu, *args)
    except NoAnswerError:
        return None
